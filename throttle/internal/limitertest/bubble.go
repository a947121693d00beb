package limitertest

import (
	"testing"
	"testing/synctest"

	"github.com/alicebob/miniredis/v2"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Bubble runs the test on fake time, with a limiter on a miniredis. It fails if the test leaves a
// goroutine behind.
func Bubble(t *testing.T, p throttle.Policy, test func(t *testing.T, l *throttle.Limiter, server *miniredis.Miniredis)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		test(t, New(t, m.Client(t), p), m.Miniredis)
	})
}
