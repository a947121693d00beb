package linetest

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Claims that joined by other scopes than the policy has now are granted by those of now: one of
// two at once, and the other when its limit is raised.
func TestClaimsGoByThePolicyAsItIsNow(t *testing.T) {
	t.Parallel()
	window := func(limit int64, per ...string) throttle.Window {
		return throttle.Window{Name: "w", Limit: limit, Period: h, Scope: throttle.Per(per...)}
	}
	for name, change := range map[string]func(limit int64) []throttle.Window{
		"a window comes": func(limit int64) []throttle.Window {
			return []throttle.Window{window(limit, "tenant"), limitertest.SharedWindow(9, h)}
		},
		"a scope is another": func(limit int64) []throttle.Window { return []throttle.Window{window(limit, "region")} },
		"a scope is not known": func(limit int64) []throttle.Window {
			return []throttle.Window{window(limit, "tenant", "region"), limitertest.SharedWindow(9, h)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			throttletest.Each(t, func(t *testing.T, client *redis.Client) {
				l := limitertest.New(t, client, limitertest.Policy(limitertest.SharedWindow(2, h)))
				limitertest.Reserve(t, l, limitertest.Acme(2))
				r := limitertest.Acme(1)
				r.Attributes = map[string]string{"region": "north"}
				ended := make(chan error, 2)
				for range 2 {
					one := waits(t.Context(), t, client, l, r)
					go func() { ended <- <-one }()
				}
				limitertest.SetPolicy(t, l, change(1)...)
				if err := <-ended; err != nil {
					t.Error(err)
				}
				until(t, "the other one stands in line", func() bool {
					peeked := limitertest.Peek(t, l, r)
					return peeked.Windows[0].Used == 1 && len(limitertest.ReadLine(t, client).Hashes["t"]) == 1
				})
				limitertest.Agrees(t, client)
				limitertest.SetPolicy(t, l, change(2)...)
				if err := <-ended; err != nil {
					t.Error(err)
				}
				if used := limitertest.Peek(t, l, r).Windows[0].Used; used != 2 {
					t.Errorf("%d are used of 2", used)
				}
				limitertest.IsGone(t, client)
			})
		})
	}
}
