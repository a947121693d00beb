package linetest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func tokens(limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: "tokens", Limit: limit, Period: period, Unit: "tokens", Scope: throttle.ScopeShared}
}

// A settle whose reply was lost is repeated by go-redis: it counts once, for all algorithms.
func TestSettleWhoseReplyWasLost(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for _, w := range []throttle.Window{
			tokens(4000, 60*s),
			{Name: "tokens", Algorithm: throttle.AlgorithmFixed, Limit: 4000, Period: m, Unit: "tokens"},
			{Name: "tokens", Algorithm: throttle.AlgorithmGCRA, Limit: 1, Burst: 4000, Period: h, Unit: "tokens"},
			{Name: "tokens", Algorithm: throttle.AlgorithmCalendar, Limit: 4000, Resets: "@yearly", Unit: "tokens"},
		} {
			limitertest.Must(t, client.FlushAll(t.Context()).Err())
			l, _ := limitertest.NewWithClock(t, client, limitertest.Policy(w))
			repeating := redis.NewClient(client.Options())
			t.Cleanup(func() { repeating.Close() })
			repeating.AddHook(hooktest.Hook(hooktest.Twice))
			l2 := limitertest.NewByClock(t, repeating, limitertest.NewClock(), limitertest.Policy(w))
			r := limitertest.Acme(0)
			r.Cost = map[string]int64{"tokens": 1000}
			d := limitertest.Reserve(t, l, r)
			for _, actual := range []int64{1500, 700, 3000} {
				settled := limitertest.Settle(t, l2, d.Reservation, actual)
				limitertest.WantUsed(t, l, r, actual)
				d.Reservation = settled
			}
		}
	})
}
