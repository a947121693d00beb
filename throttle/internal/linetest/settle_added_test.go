package linetest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// What a settle adds is given back by a later one and by a cancel, as far as it still counts, even
// if it fell into a later bucket than the grant.
func TestWhatWasAddedIsGivenBack(t *testing.T) {
	t.Parallel()
	window := func(w throttle.Window) throttle.Window {
		w.Name, w.Unit = "tokens", "tokens"
		return w
	}
	limitertest.EachCase(t, map[string]throttle.Window{
		"sliding":   window(throttle.Window{Limit: 1000, Period: m}),
		"merged":    window(throttle.Window{Limit: 1000, Period: 10 * h}),
		"fixed":     window(throttle.Window{Limit: 1000, Period: m, Algorithm: throttle.AlgorithmFixed}),
		"first use": window(throttle.Window{Limit: 1000, Period: m, Algorithm: throttle.AlgorithmFixed, Anchor: throttle.AnchorFirstUse}),
		"gcra":      window(throttle.Window{Limit: 1, Burst: 1000, Period: h, Algorithm: throttle.AlgorithmGCRA}),
		"calendar":  window(throttle.Window{Limit: 1000, Resets: "* * * * *", Algorithm: throttle.AlgorithmCalendar}),
	}, func(t *testing.T, client *redis.Client, w throttle.Window) {
		st := newStory(t, client, limitertest.Policy(w))
		tokens := throttle.Request{Policy: "p", Tenant: "a", Cost: map[string]int64{"tokens": 10}}
		others := tokens
		others.Tenant, others.Cost = "a", map[string]int64{"tokens": 7}
		used := func(want int64) {
			t.Helper()
			// Of a bucket some parts of a unit have drained, which somebody else may have got.
			used := limitertest.Peek(t, st.l, tokens).Windows[0].Used
			limitertest.That(t, used == want || w.Algorithm == throttle.AlgorithmGCRA && used == want+1,
				used, "are counted, want", want)
		}
		r := limitertest.Reserve(t, st.at(30*s).l, tokens).Reservation
		r = st.at(50*s).settle(r, 100)
		r = st.at(55*s).settle(r, 300)
		limitertest.Reserve(t, st.l, others)
		used(307)
		r = st.settle(r, 90) // all that the second added, and of the first
		used(97)
		r = st.settle(r, 10)
		used(17)
		r = st.settle(r, 5) // of the grant itself
		used(12)
		r = st.settle(r, 15)
		limitertest.Cancel(t, st.l, r)
		used(7)
		// The next minute: what was granted in this one may count no longer, what is added then does.
		r = limitertest.Reserve(t, st.at(30*m+57*s).l, tokens).Reservation
		counted := limitertest.Peek(t, st.l, tokens).Windows[0].Used - 10
		r = st.at(31*m+2*s).settle(r, 100)
		r = st.settle(r, 20)
		limitertest.Cancel(t, st.l, r)
		now := limitertest.Peek(t, st.l, tokens).Windows[0].Used
		limitertest.That(t, now <= counted, now, "are counted, want", counted)
	})
}

// By random settles and cancels at random times: a sliding window counts for each reservation what
// was granted, and what settles added and did not give back, while it is not too old.
func TestSettlesAddUp(t *testing.T) {
	client := limitertest.Redis(t)
	rapid.Check(t, func(t *rapid.T) {
		limitertest.Must(t, client.FlushAll(t.Context()).Err())
		const period = 10 * s
		l, c := limitertest.NewWithClock(t, client, limitertest.Policy(throttle.Window{Name: "tokens", Limit: 120, Period: period, Unit: "tokens"}))
		type part struct {
			at    time.Duration
			units int64
		}
		type job struct {
			r     throttle.Reservation
			cost  int64
			parts []part
		}
		var jobs []*job
		now := time.Duration(0)
		add := func(j *job, units int64) { j.parts, j.cost = append(j.parts, part{now, units}), j.cost+units }
		remove := func(j *job, units int64) {
			j.cost -= units
			for i := len(j.parts) - 1; i >= 0; i-- {
				n := min(units, j.parts[i].units)
				j.parts[i].units -= n
				units -= n
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				want := int64(0)
				for _, j := range jobs {
					for _, p := range j.parts {
						if p.at+period > now {
							want += p.units
						}
					}
				}
				r := throttle.Request{Policy: "p", Tenant: "acme", Cost: map[string]int64{"tokens": 1}}
				used := limitertest.Peek(t, l, r).Windows[0].Used
				limitertest.Require(t, used == want, used, "are counted, want", want)
			},
			"pass": func(t *rapid.T) {
				now += time.Duration(rapid.Int64Range(1, 4000).Draw(t, "ms")) * ms
				c.Set(now)
			},
			"reserve": func(t *rapid.T) {
				cost := rapid.Int64Range(1, 20).Draw(t, "cost")
				d := limitertest.Reserve(t, l, throttle.Request{Policy: "p", Tenant: "acme", Cost: map[string]int64{"tokens": cost}})
				if d.Granted {
					jobs = append(jobs, &job{r: d.Reservation})
					add(jobs[len(jobs)-1], cost)
				}
			},
			"settle": func(t *rapid.T) {
				if len(jobs) == 0 {
					t.Skip("nothing")
				}
				j := rapid.SampledFrom(jobs).Draw(t, "job")
				actual := rapid.Int64Range(0, 40).Draw(t, "actual")
				j.r = limitertest.Settle(t, l, j.r, actual)
				if actual > j.cost {
					add(j, actual-j.cost)
				} else {
					remove(j, j.cost-actual)
				}
			},
			"cancel": func(t *rapid.T) {
				if len(jobs) == 0 {
					t.Skip("nothing")
				}
				i := rapid.IntRange(0, len(jobs)-1).Draw(t, "job")
				limitertest.Cancel(t, l, jobs[i].r)
				jobs = append(jobs[:i:i], jobs[i+1:]...)
			},
		})
	})
}

// Of many corrections the oldest count as one: what is known of a reservation stays small, and
// others' units are never given back.
func TestManyCorrections(t *testing.T) {
	st := newStory(t, limitertest.Redis(t), limitertest.Policy(throttle.Window{Name: "tokens", Limit: 1000, Period: h, Unit: "tokens"}))
	of := func(units int64) throttle.Request {
		return throttle.Request{Policy: "p", Tenant: "a", Cost: map[string]int64{"tokens": units}}
	}
	r := limitertest.Reserve(t, st.l, of(10)).Reservation
	for i := range 60 {
		r = st.at(time.Duration(i+1)*m/2).settle(r, int64(11+i))
		limitertest.Reserve(t, st.l, of(1)) // others', at the same times
	}
	st.used(130)
	// When it was granted, what it costs, and the last corrections. The oldest counts for many.
	const head, correction, kept = "1800057600000000 =tokens=70", " +1800057600000000:tokens=1", 16
	bytes := st.client.StrLen(t.Context(), "sluice:{p}:n:"+r.ID).Val()
	least := len(head+correction) + (kept-1)*len(correction)
	limitertest.That(t, bytes >= int64(least) && bytes <= int64(least+len("60")),
		bytes, "bytes are kept of the reservation, want", least)
	limitertest.Cancel(t, st.l, r)
	if used := limitertest.Peek(t, st.l, of(1)).Windows[0].Used; used < 60 || used > 60+60-16 {
		t.Errorf("%d are counted, want the 60 of others, and at most the oldest of its own", used)
	}
}
