package linetest

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func demand(tenant string, n int, class throttle.Class) inspect.Demand {
	r := throttle.Request{Policy: "p", Tenant: tenant, Class: class, Ticket: throttle.Ticket{Queue: "q"}}
	return inspect.Demand{Count: n, Request: r}
}

func opensAt(after time.Duration) func(time.Time) time.Time {
	return func(t time.Time) time.Time { return t.Add(max(0, limitertest.At(after).Sub(t))) }
}

// A plan comes true, for each tenant and for all, beside others that wait, with windows and weights of all kinds.
func TestPlansComeTrue(t *testing.T) {
	t.Parallel()
	tenantWindow := throttle.Window{Name: "own", Limit: 4, Period: s}
	for name, p := range map[string]throttle.Policy{
		"shared":   limitertest.Policy(limitertest.SharedWindow(20, s)),
		"both":     limitertest.Policy(tenantWindow, limitertest.SharedWindow(20, s)),
		"weights":  weighted(map[string]float64{"t1": 4, "t2": 0.5}, limitertest.SharedWindow(20, s)),
		"spaced":   limitertest.Policy(throttle.Window{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 25, Burst: 3, Period: s, Shared: true}),
		"a minute": limitertest.Policy(throttle.Window{Name: "fixed", Algorithm: throttle.AlgorithmFixed, Limit: 50, Period: m, Shared: true}, tenantWindow),
		"a quota":  limitertest.Policy(limitertest.SharedWindow(20, s), throttle.Window{Name: "quota", Algorithm: throttle.AlgorithmCalendar, Limit: 125, Resets: "*/5 * * * *", Shared: true}),
	} {
		classes := []throttle.Class{throttle.ClassLive, throttle.ClassBatch}
		if name == "weights" || name == "spaced" || name == "a quota" { // what differs is not of a class
			classes = classes[1:]
		}
		for _, class := range classes {
			t.Run(name+"/"+string(class), func(t *testing.T) {
				client := limitertest.RedisClient(t)
				st := newStory(t, client, p)
				st.at(3*h).joinMany("q", "t3", 20)
				st.joinMany("q", "else", 30)
				var demands []inspect.Demand
				tenants := []string{"t0", "t1", "t2", "t3", "t4"}
				for i, tenant := range tenants {
					demands = append(demands, demand(tenant, 20+5*i, class))
				}
				before := lineText(t, client)
				plan := st.plan(inspect.PlanOptions{Deadline: limitertest.At(3*h + 5*s)}, demands...)
				expect.Equal(t, lineText(t, client), before)
				st.class = class
				for i, tenant := range tenants {
					var requests []throttle.Request
					for n := range demands[i].Count {
						r := demands[i].Request
						r.Ticket = throttle.Ticket{Queue: "q", ID: fmt.Sprint("d", tenant, n)}
						requests = append(requests, r)
					}
					limitertest.Join(t, st.l, requests...)
				}
				last, late := map[string]time.Time{}, 0
				var starts []time.Time // of any tickets
				for id, after := range st.starts() {
					at := limitertest.At(after)
					if starts = append(starts, at); id[0] != 'd' {
						continue
					}
					if tenant := id[1:3]; at.After(last[tenant]) {
						last[tenant] = at
					}
					if at.After(limitertest.At(3*h + 5*s)) {
						late++
					}
				}
				slices.SortFunc(starts, time.Time.Compare)
				// Of tenants whose turn it is, the plan may take another first: one starts a turn later.
				off := func(got, want time.Time) bool {
					first := slices.IndexFunc(starts, func(at time.Time) bool { return !at.Before(want) })
					after := slices.IndexFunc(starts, func(at time.Time) bool { return at.After(want) })
					if after < 0 {
						after = len(starts) - 1
					}
					return got.Before(starts[max(0, first-1)]) || got.After(starts[after])
				}
				var whole time.Time
				expect.Equal(t, len(plan.Tenants), len(tenants))
				for _, got := range plan.Tenants {
					end := last[got.Tenant]
					expect.That(t, !off(got.Expected, end) && got.Binds != "", got, "it was over at", end)
					if end.After(whole) {
						whole = end
					}
				}
				expect.That(t, !off(plan.Expected, whole) && plan.Binds != "" && max(plan.Late-late, late-plan.Late) <= 1,
					"all", plan.Finish, "it was over at", whole, late, "after 5 s")
			})
		}
	}
}

// What a plan starts from: a part has joined, demands come later, or nothing binds them.
func TestPlansStartFromTheLine(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		st := newStory(t, client, limitertest.Policy(limitertest.SharedWindow(10, s)))
		st.joinMany("q", "a", 30)
		d := demand("a", 50, throttle.ClassLive)
		expect.Equal(t, st.plan(inspect.PlanOptions{}, d).Expected, limitertest.At(7*s))
		d.Joined = 30
		got := st.plan(inspect.PlanOptions{}, d)
		expect.That(t, got.Expected == limitertest.At(4*s) && got.Binds == "shared", "50, 30 of them in line", got)
		var crowd []inspect.Demand
		for i := range 30 {
			crowd = append(crowd, demand(fmt.Sprint("t", i), 1, ""))
		}
		for i, got := range st.plan(inspect.PlanOptions{}, crowd...).Tenants {
			expect.Equal(t, got.Expected == limitertest.At(0), got.Binds == "", "the window holds up all that do not start now", i)
		}
		got = st.plan(inspect.PlanOptions{Open: opensAt(h), Deadline: limitertest.At(h)}, demand("b", 50, ""))
		expect.That(t, got.Expected == limitertest.At(h+4*s) && got.Late == 40 && got.Binds == "shared", "an hour later", got)
		d.Count = 0
		expect.That(t, expect.ErrOf(inspect.Of(st.l).Snapshot(t.Context(), []inspect.Demand{d})) != nil, "a demand of nothing is planned")
		limitertest.SetPolicy(t, st.l, limitertest.SharedWindow(1_000_000, s))
		anywhere := inspect.Demand{Count: 50, Request: throttle.Request{Policy: "p", Tenant: "b"}}
		expect.Equal(t, st.plan(inspect.PlanOptions{Open: opensAt(2 * h)}, anywhere).Expected, limitertest.At(2*h), "that all fit, and may start after two hours")
	})
}

// What windows have counted is read as the scripts wrote it: a plan says when a request fits, as its denial does.
func TestPlansStartFromWhatWindowsHaveCounted(t *testing.T) {
	for name, w := range map[string]throttle.Window{
		"sliding":               {Limit: 9, Period: 10 * s},
		"sliding, of many":      {Limit: 900, Period: 10 * s}, // entries of two bytes of units
		"fixed":                 {Algorithm: throttle.AlgorithmFixed, Limit: 9, Period: 20 * s},
		"calendar":              {Algorithm: throttle.AlgorithmCalendar, Limit: 9, Resets: "* * * * *"},
		"gcra":                  {Algorithm: throttle.AlgorithmGCRA, Limit: 9, Burst: 9, Period: 10 * s},
		"gcra, with a fraction": {Algorithm: throttle.AlgorithmGCRA, Limit: 7, Burst: 9, Period: 11 * s},
	} {
		t.Run(name, func(t *testing.T) {
			w.Name, w.Shared = "all", true
			st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(w))
			r := requestOf("a")
			r.Cost = map[string]int64{throttle.Requests: max(1, w.Limit/100)}
			for i := int64(0); i < min(w.Limit, 100); i++ {
				expect.That(t, limitertest.Reserve(t, st.at(h+time.Duration(i)*11*ms).l, r).Granted, "grant", i)
			}
			r.Cost = map[string]int64{throttle.Requests: w.Limit * 2 / 3}
			denied := limitertest.Reserve(t, st.at(h+3*s).l, r)
			got := st.plan(inspect.PlanOptions{}, inspect.Demand{Count: 1, Request: r})
			off := got.Expected.Sub(denied.At.Add(denied.RetryIn))
			expect.That(t, !denied.Granted && off.Abs() <= us && got.Binds == "all", got, "is off by", off)
		})
	}
	t.Run("fixed, with a margin", func(t *testing.T) {
		w := throttle.Window{Name: "all", Algorithm: throttle.AlgorithmFixed, Limit: 9, Period: 20 * s, Margin: 5 * s}
		st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(w))
		st.at(5 * s).granted("a1")
		got := st.plan(inspect.PlanOptions{}, demand("a", 9, ""))
		expect.That(t, got.Expected == limitertest.At(25*s) && got.Binds == "all", got)
		st.at(36 * s).costs(4).granted("b1") // within the margin of the reset at 40 s, so it counts until that at 60 s
		expect.Equal(t, st.plan(inspect.PlanOptions{}, demand("c", 10, "")).Expected, limitertest.At(65*s), "as the plan's grants do")
		expect.Equal(t, st.at(46*s).plan(inspect.PlanOptions{}, demand("b", 6, "")).Expected, limitertest.At(65*s))
	})
	t.Run("concurrency", func(t *testing.T) {
		slots := limitertest.Slots(2)
		slots.Lease = 2 * s // which holders renew
		st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(slots))
		st.granted("a1", "a2")
		d := demand("a", 1, "")
		d.Hold = m // so long the others hold theirs: they end evenly until then
		expect.Equal(t, st.plan(inspect.PlanOptions{}, d).Expected, limitertest.At(30*s+m))
	})
	t.Run("what if, for a tenant with another burst", func(t *testing.T) {
		p := limitertest.Policy(throttle.Window{Name: "own", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Period: 10 * s})
		p.Tenants = map[string]throttle.Tenant{"b": {Windows: map[string]throttle.Override{"own": {Burst: 5}}}}
		st := newStory(t, limitertest.RedisClient(t), p)
		got := st.plan(inspect.PlanOptions{Limits: map[string]int64{"own": 100}}, demand("b", 105, ""))
		expect.Equal(t, got.Expected, limitertest.At(10*s))
	})
	t.Run("pauses", func(t *testing.T) {
		p := limitertest.Policy(limitertest.SharedWindow(10, 10*s))
		p.UpstreamShared = true
		st := newStory(t, limitertest.RedisClient(t), p)
		st.pause(st.granted("a1").Reservation, 5*s)
		st.pauses("b") // for an hour
		got := st.plan(inspect.PlanOptions{}, demand("a", 1, ""), demand("b", 1, "")).Tenants
		expect.That(t, got[0].Expected == limitertest.At(5*s) && got[1].Expected == limitertest.At(h), got)
	})
	t.Run("a pause of an exempt tenant", func(t *testing.T) {
		p := limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: m})
		p.Tenants = map[string]throttle.Tenant{"b": {Exempt: true}}
		st := newStory(t, limitertest.RedisClient(t), p)
		st.pauses("b") // for an hour
		expect.Equal(t, st.plan(inspect.PlanOptions{}, demand("b", 60, "")).Expected, limitertest.At(h))
	})
	t.Run("weights at a huge window", func(t *testing.T) {
		st := newStory(t, limitertest.RedisClient(t), weighted(map[string]float64{"a": 10, "b": 1000}, limitertest.SharedWindow(1e12, s)))
		a, b := demand("a", 10, ""), demand("b", 1000, "")
		a.Hold, b.Hold = s, s
		snapshot := expect.Got(inspect.Of(st.l).Snapshot(t.Context(), []inspect.Demand{a, b}, inspect.Slots{Count: 1, Queues: []string{"q"}}))(t)
		got := expect.Got(snapshot.Plan(t.Context(), inspect.PlanOptions{}))(t).Tenants // in turn, one of a with 100 of b
		expect.That(t, got[1].Tenant == "a" && got[1].Expected.Sub(limitertest.At(0)) > 800*s, got)
	})
	t.Run("what the upstream has left", func(t *testing.T) {
		st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(10, 10*s)))
		st.remaining(st.granted("a1").Reservation, 3, h)
		got := st.plan(inspect.PlanOptions{Deadline: limitertest.At(0)}, demand("a", 13, ""))
		expect.That(t, got.Late == 10 && got.Expected == limitertest.At(h) && got.Binds == "shared", got)
	})
}

// A batch gets its share of a limit from its beginning, whether live tickets wait in one queue or in several.
func TestABatchIsPlannedToGetItsShare(t *testing.T) {
	client := limitertest.RedisClient(t)
	for _, queues := range [][]string{{"a"}, {"a", "b"}} {
		p := limitertest.Policy(limitertest.Slots(10))
		p.BatchShare = 0.2
		st := newStory(t, client, p)
		for _, queue := range queues {
			st.joinMany(queue, queue, 300)
		}
		d := demand("c", 20, throttle.ClassBatch)
		d.Hold = s
		got := st.plan(inspect.PlanOptions{Open: opensAt(10 * s)}, d).Expected.Sub(limitertest.At(0))
		expect.That(t, got >= 20*s && got <= 21*s, "2 of 10 a second, beside", queues, got)
	}
}

// Tenants take turns, however many flows they have.
func TestTenantsArePlannedToTakeTurns(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.Slots(1), throttle.Window{Name: "user", Limit: 9, Period: s, Per: []string{"user"}}))
	var demands []inspect.Demand
	for i, n := range []int{1, 1, 1, 1, 1, 1, 1, 1, 1, 5} {
		d := demand([]string{"many", "one"}[i/9], n, "")
		d.Hold, d.Request.Attributes = s, map[string]string{"user": fmt.Sprint(i)}
		demands = append(demands, d)
	}
	got := st.plan(inspect.PlanOptions{}, demands...).Tenants
	expect.That(t, got[0].Expected == limitertest.At(14*s) && !got[1].Expected.After(limitertest.At(11*s)), got)
}

// Tickets that wait for slots hold up the queues of these slots, in all lines, and no others.
func TestQueuesWithoutSlotsHoldUpNoOther(t *testing.T) {
	client := limitertest.RedisClient(t)
	for also, want := range map[string][2]time.Duration{"beside": {40 * s, 10 * s}, "free": {70 * s, 80 * s}} {
		other := limitertest.Policy(limitertest.Slots(5))
		other.Name = "other"
		st := newStory(t, client, limitertest.Policy(limitertest.Slots(5)))
		expect.Must(t, st.l.SetPolicies(append(st.l.Policies(), other)))
		slots := inspect.Slots{Count: 1, Queues: []string{"busy", also}}
		var demands []inspect.Demand
		for _, queue := range []string{"busy", "free", "beside"} {
			d := demand(queue, 4, "")
			d.Hold, d.Request.Ticket.Queue = 10*s, queue
			if queue == "beside" {
				d.Count, d.Hold, d.Request.Policy = 2, 0, "other"
			}
			demands = append(demands, d)
		}
		snapshot := expect.Got(inspect.Of(st.l).Snapshot(t.Context(), demands, slots))(t)
		plan := expect.Got(snapshot.Plan(t.Context(), inspect.PlanOptions{}))(t)
		busy, free := plan.Tenants[0], plan.Tenants[1]
		expect.That(t, busy.Expected == limitertest.At(want[0]) && busy.Binds == throttle.BySlots, "one slot, also for", also, busy)
		expect.That(t, free.Expected == limitertest.At(want[1]) && (free.Binds == "") == (also == "beside"), free)
	}
}

// A plan of more than anybody waits for ends with its context.
func TestAPlanEndsWithItsContext(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(10, s)))
	ctx, cancel := context.WithCancel(t.Context())
	opens := func(t time.Time) time.Time { cancel(); return t }
	snapshot := expect.Got(inspect.Of(st.l).Snapshot(ctx, []inspect.Demand{demand("a", math.MaxInt, "")}))(t)
	_, err := snapshot.Plan(ctx, inspect.PlanOptions{Open: opens})
	expect.Err(t, err, context.Canceled)
}
