package throttletest

import (
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/sluice-go/sluice/internal/testhook"
	"github.com/sluice-go/sluice/throttle"
)

// A Clock is the time by which a limiter of NewLimiterAt counts. It stands still until the test turns
// it. It is safe for concurrent use.
type Clock struct {
	redis *miniredis.Miniredis

	mu  sync.Mutex
	now time.Time
}

// Now returns the time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Advance turns the clock forward. What the limiter stored meanwhile grows older, and expires.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
	c.redis.FastForward(d)
}

// NewLimiterAt is NewLimiter, by a clock that begins at a time and that only the test turns. It needs no
// bubble. Calls that wait, such as Limiter.Wait, and workers go by the real clock: test these in a
// bubble of testing/synctest.
func NewLimiterAt(t testing.TB, at time.Time, policies ...throttle.Policy) (*throttle.Limiter, *Clock) {
	t.Helper()
	m := miniredis.NewMiniRedis()
	t.Cleanup(m.Close)
	clock := &Clock{redis: m, now: at}
	l, err := throttle.New(throttle.Config{
		Client: &testhook.Client{
			UniversalClient: Memory{m}.Client(t), Now: func() int64 { return clock.Now().UnixMicro() },
		},
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Policies: policies,
	})
	if err != nil {
		t.Fatal(err)
	}
	return l, clock
}
