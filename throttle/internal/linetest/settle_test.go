package linetest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func tokens(limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: "tokens", Limit: limit, Period: period, Unit: "tokens", Scope: throttle.ScopeShared}
}

func (sc *scene) settle(r throttle.Reservation, tokens int64) throttle.Reservation {
	sc.t.Helper()
	return limitertest.Settle(sc.t, sc.l, r, tokens)
}

func (sc *scene) used(want int64) {
	sc.t.Helper()
	r := sc.of("peek")
	r.Tenant, r.Ticket = "a", throttle.Ticket{}
	if d := limitertest.Peek(sc.t, sc.l, r); d.Windows[len(d.Windows)-1].Used != want {
		sc.t.Errorf("%d tokens are counted, want %d", d.Windows[len(d.Windows)-1].Used, want)
	}
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
			l, _ := limitertest.NewHanded(t, client, limitertest.Policy(w))
			repeating := redis.NewClient(client.Options())
			t.Cleanup(func() { repeating.Close() })
			repeating.AddHook(hooktest.Hook(hooktest.Twice))
			l2 := limitertest.NewBy(t, repeating, limitertest.NewClock(), limitertest.Policy(w))
			r := limitertest.Acme(0)
			r.Cost = map[string]int64{"tokens": 1000}
			d := limitertest.Reserve(t, l, r)
			for _, actual := range []int64{1500, 700, 3000} {
				settled := limitertest.Settle(t, l2, d.Reservation, actual)
				if got := limitertest.Peek(t, l, r).Windows[0].Used; got != actual {
					t.Errorf("%s: settled for %d, %d are counted", w.Algorithm, actual, got)
				}
				d.Reservation = settled
			}
		}
	})
}

// What was granted is at most the limit and the sum of what was estimated too low: by random
// settles, by a log that knows what was really used.
func TestExcessIsWhatWasUnderestimated(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		rapid.Check(t, func(t *rapid.T) {
			limitertest.Must(t, client.FlushAll(t.Context()).Err())
			const limit = 100
			w := tokens(limit, 10*s)
			l, c := limitertest.NewHanded(t, client, limitertest.Policy(w))
			now := time.Duration(0)
			type use struct {
				at    time.Duration
				units int64
			}
			type job struct {
				r        throttle.Reservation
				at       time.Duration
				estimate int64
			}
			var uses []use
			var jobs []job
			r := throttle.Request{Policy: "p", Cost: map[string]int64{}}
			t.Repeat(map[string]func(*rapid.T){
				"": func(*rapid.T) {},
				"pass": func(t *rapid.T) {
					now += time.Duration(rapid.Int64Range(1, int64(4*s)).Draw(t, "by")).Truncate(us)
					c.Set(now)
				},
				"reserve": func(t *rapid.T) {
					r.Cost["tokens"] = rapid.Int64Range(1, 60).Draw(t, "cost")
					d := limitertest.Reserve(t, l, throttle.Request{Policy: "p", Cost: map[string]int64{"tokens": r.Cost["tokens"], "requests": 0}})
					var inWindow, unsettled int64
					for _, u := range uses {
						if u.at > now-w.Period {
							inWindow += u.units
						}
					}
					for _, j := range jobs {
						if j.at > now-w.Period {
							unsettled += j.estimate
						}
					}
					if want := inWindow+unsettled+r.Cost["tokens"] <= limit; d.Granted != want {
						t.Fatalf("%d beside %d and %d estimated: granted %v", r.Cost["tokens"], inWindow, unsettled, d.Granted)
					}
					if d.Granted {
						jobs = append(jobs, job{d.Reservation, now, r.Cost["tokens"]})
					}
				},
				"settle": func(t *rapid.T) {
					if len(jobs) == 0 {
						t.Skip("nothing")
					}
					j := jobs[0]
					jobs = jobs[1:]
					actual := rapid.Int64Range(0, 90).Draw(t, "actual")
					limitertest.Settle(t, l, j.r, actual)
					// What is beyond the estimate counts from when it is known.
					uses = append(uses, use{j.at, min(actual, j.estimate)})
					if actual > j.estimate {
						uses = append(uses, use{now, actual - j.estimate})
					}
				},
			})
		})
	})
}
