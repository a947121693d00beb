package linetest

import (
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A reset empties what it is asked for, and what waits behind it starts.
func TestAResetLetsGoWhatWaits(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(
			throttle.Window{Name: "own", Limit: 1, Period: h},
			throttle.Window{Name: "users", Limit: 2, Period: h, Scope: throttle.Per("tenant", "user")},
			throttle.Window{Name: "all", Limit: 4, Period: h, Scope: throttle.ScopeShared},
		))
		reset := func(tenant string, want int) {
			t.Helper()
			if n, err := sc.l.Reset(t.Context(), "p", tenant); err != nil || n != want {
				t.Errorf("emptied %d counts, want %d: %v", n, want, err)
			}
		}
		used := func(tenant string, want ...int64) {
			t.Helper()
			for i, w := range limitertest.Peek(t, sc.l, sc.without(tenant)).Windows {
				if w.Used != want[i] {
					t.Errorf("tenant %s has used %d of %s, want %d", tenant, w.Used, w.Name, want[i])
				}
			}
		}
		sc.with = map[string]string{"user": "u,:%"}
		sc.granted("a1", "b1", "c1")
		sc.waits("a2", "b2")
		sc.at(s).takes()
		reset("a", 2)
		used("a", 0, 0, 3)
		used("b", 1, 1, 3)
		sc.at(3 * s).takes("a2")
		sc.at(4 * s).waits("a3")
		sc.takes()
		reset("", 7)
		used("a", 0, 0, 0)
		sc.at(6*s).takes("b2", "a3").asks(-1)
		limitertest.Agrees(t, client)
		if _, err := sc.l.Reset(t.Context(), "q", ""); !errors.Is(err, throttle.ErrUnknownPolicy) {
			t.Error(err)
		}
		if _, err := sc.l.Reset(t.Context(), "q", "a"); !errors.Is(err, throttle.ErrUnknownPolicy) {
			t.Error(err)
		}
	})
}
