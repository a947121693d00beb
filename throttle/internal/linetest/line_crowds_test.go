package linetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// Many tenants with limits of their own, of which each alone could fill the shared window.
func TestFleetOfManyTenants(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, 4, limitertest.Policy(limitertest.SharedWindow(50, s), throttle.Window{Name: "own", Limit: 5, Period: 3 * s}))
		for i := range 100 {
			f.arrive(time.Duration(i)*5*ms, fmt.Sprint("t", i), 7)
		}
		f.run(700, m)
		f.keepsPace(50, s)
		limitertest.IsGone(t, client)
	})
}

// One tenant's bulk does not hold up tenants that come now and then, at a window or for slots.
func TestFleetBulkBesideLiveTenants(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		for name, tc := range map[string]struct {
			limit  int64
			takes  int // ms
			atOnce int // jobs in a period
			period time.Duration
		}{"a window binds": {50, 0, 50, s}, "slots bind": {1e6, 640, 32, 640 * ms}} {
			f := newFleet(t, client, 4, limitertest.Policy(limitertest.SharedWindow(tc.limit, s)))
			f.takes = tc.takes
			f.arrive(0, "bulk", 600)
			for i := range 9 {
				for j := range 30 {
					f.at(s+steps(j)*300*ms+steps(i)*7*ms, func() { f.join(fmt.Sprintf("live%d %05d", i, j)) })
				}
			}
			f.run(870, m)
			f.keepsPace(tc.atOnce, tc.period)
			// What starts may all start at once in a period, and then one job of each of ten tenants.
			most := tc.period + 10*tc.period/steps(tc.atOnce)
			for job, at := range f.joined {
				if waited := f.granted[job] - at; strings.HasPrefix(job, "live") && waited > most {
					t.Errorf("%s: %s waited %v beside the bulk", name, job, waited)
				}
			}
		}
	})
}

// No tenant is later than it would be if the window were cut into equal parts at every moment.
func TestFleetOfZipfTenants(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, 4, limitertest.Policy(limitertest.SharedWindow(50, s)))
		jobs, total := map[string]int{}, 0
		for i := range 60 {
			tenant := fmt.Sprintf("z%02d", i)
			jobs[tenant] = max(1, 200/(i+1))
			f.arrive(0, tenant, jobs[tenant])
			total += jobs[tenant]
		}
		f.run(total, m)
		f.keepsPace(50, s)
		finished := map[string]time.Duration{}
		for job, at := range f.granted {
			tenant := strings.Fields(job)[0]
			finished[tenant] = max(finished[tenant], at)
		}
		for tenant, n := range jobs {
			units := 0 // before this tenant is done, nobody gets more than one more
			for _, other := range jobs {
				units += min(n+1, other)
			}
			if fair := f.latest(units, 50, s); finished[tenant] > fair {
				t.Errorf("tenant %s with %d jobs was done at %v, its fair time is %v", tenant, n, finished[tenant], fair)
			}
		}
	})
}

// Tickets that left cost the others nothing, and a stop of all servers only its own time.
func TestFleetStoppedAndHalfDeleted(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, 2, limitertest.Policy(limitertest.SharedWindow(20, s)))
		f.arrive(0, "acme", 400)
		f.at(s-ms, func() {
			for i := 20; i < 400; i += 2 {
				f.sc.leave(fmt.Sprintf("acme %05d", i))
			}
		})
		f.run(100, m)
		stopped := f.now
		for i := range f.moments { // all that was to come comes 45 s later
			f.moments[i].at += 45 * s
		}
		f.run(210, 10*m)
		if most := f.latest(100, 20, s); stopped > most {
			t.Errorf("stopped at %v, want %v", stopped, most)
		}
		// The window is empty then: of 110 the last one starts after five periods.
		if last, most := f.granted[f.order[209]]-45*s, stopped+5*s+6*(spacing+loop); last > most {
			t.Errorf("done at %v, want %v", last, most)
		}
		limitertest.IsGone(t, client)
	})
}

// Scopes of every kind, crossing too: all get through, nothing idles, and one user holds up neither
// the others of its tenant nor other tenants.
func TestFleetOfScopes(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		const region, greedy, late = 12, 40, "t0/late/r0 00000"
		run := func(greedy int) (f *fleet, others time.Duration) {
			f = newFleet(t, client, 4, limitertest.Policy(
				throttle.Window{Name: "user", Limit: 1, Period: s, Scope: throttle.Per("tenant", "user")},
				throttle.Window{Name: "own", Limit: 5, Period: s},
				throttle.Window{Name: "region", Limit: region, Period: s, Scope: throttle.Per("region")},
				limitertest.SharedWindow(20, s),
			))
			f.request = func(job string) throttle.Request {
				parts := strings.Split(strings.Fields(job)[0], "/")
				return throttle.Request{Tenant: parts[0], Attributes: map[string]string{"user": parts[1], "region": parts[2]}}
			}
			for i := range 240 {
				f.arrive(steps(i)*300*us, fmt.Sprintf("t%d/u%d/r%d", i%8, i/8%10, i/80), 2)
			}
			f.arrive(0, "t0/greedy/r0", greedy)
			f.at(3*s, func() { f.join(late) })
			f.run(480+greedy+1, 3*m)
			for job, at := range f.granted {
				if !strings.HasPrefix(job, "t0/greedy") {
					others = max(others, at)
				}
			}
			limitertest.IsGone(t, client)
			return f, others
		}
		without, most := run(0)
		f, others := run(greedy)
		period := s + spacing + loop
		// What the greedy user takes of its region, which is the most that it takes of any window.
		takes := (greedy + region - 1) / region * period
		if others > most+takes || f.granted[late] > without.granted[late]+takes {
			t.Errorf("the others were done at %v, the late user at %v; without the greedy one at %v and %v",
				others, f.granted[late], most, without.granted[late])
		}
		left := 0 // for which it is alone
		for job, at := range f.granted {
			if strings.HasPrefix(job, "t0/greedy") && at > others {
				left++
			}
		}
		if at := f.granted["t0/greedy/r0 00039"]; at < (greedy-1)*s || at > others+steps(left)*period {
			t.Errorf("the greedy user was done at %v, %d after the others", at, left)
		}
	})
}

// A tenant over its own limit holds up nobody at the shared window; costs come in two units.
func TestFleetOfCosts(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, 3, limitertest.Policy(
			throttle.Window{Name: "own", Limit: 20, Period: s},
			throttle.Window{Name: "tokens", Limit: 1000, Period: s, Unit: "tokens", Scope: throttle.ScopeShared},
			limitertest.SharedWindow(30, s),
		))
		f.request = func(job string) throttle.Request {
			var tenant string
			var n int64
			if _, err := fmt.Sscan(job, &tenant, &n); err != nil {
				t.Fatal(err)
			}
			return throttle.Request{Tenant: tenant, Cost: map[string]int64{"requests": 1 + n%3, "tokens": (n * 37) % 100}}
		}
		for _, tenant := range []string{"a", "b", "c"} {
			f.arrive(0, tenant, 120)
		}
		f.run(360, 2*m)
		// A period has room for 28 requests at least, before one of up to 3 does not fit: 720 need 26
		// periods. The tokens, 17,800, need fewer.
		if last, most := f.granted[f.order[359]], 25*(s+spacing+loop); last > most {
			t.Errorf("done at %v, want %v", last, most)
		}
		got := map[string]float64{} // of the tightest window
		for job, at := range f.granted {
			if r := f.request(job); at >= 2*s && at < 14*s {
				got[r.Tenant] += max(float64(r.Cost["requests"])/30, float64(r.Cost["tokens"])/1000)
			}
		}
		const ticket, rounding = 3. / 30, 1e-9
		for one := range got {
			for other := range got {
				if got[one]-got[other] > 2*ticket+rounding {
					t.Errorf("tenant %s got %.3f, %s %.3f in 12 s", one, got[one], other, got[other])
				}
			}
		}
		limitertest.IsGone(t, client)
	})
}

// A large cost at the head of a shared window is not starved by small ones that come from windows
// of their own.
func TestFleetLargeCostIsNotStarved(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, 3, limitertest.Policy(throttle.Window{Name: "own", Limit: 10, Period: s}, limitertest.SharedWindow(10, s)))
		f.request = func(job string) throttle.Request {
			r := throttle.Request{Tenant: strings.Fields(job)[0]}
			if r.Tenant == "large" {
				r.Cost = map[string]int64{"requests": 10}
			}
			return r
		}
		for i := range 8 { // spread out, so that the shared window is never empty
			for j := range 20 {
				f.at(steps(j)*700*ms+steps(i)*90*ms, func() { f.join(fmt.Sprintf("small%d %05d", i, j)) })
			}
		}
		f.arrive(2*s, "large", 1)
		f.run(161, 2*m)
		// In the first period one of each small tenant may go first, and in the second it is empty.
		if waited := f.granted["large 00000"] - 2*s; waited > 2*(s+spacing+loop) {
			t.Errorf("the large one waited %v", waited)
		}
	})
}

// Where slots bind and nothing else, all of them are in use while anybody waits.
func TestFleetUsesAllSlots(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, 3, limitertest.Policy(throttle.Window{Name: "own", Limit: 1e6, Period: s}))
		f.takes = 100
		for _, tenant := range []string{"a", "b", "c"} {
			f.arrive(0, tenant, 200)
		}
		f.run(600, m)
		f.keepsPace(24, 100*ms)
		starts := make([]time.Duration, 0, 600)
		for _, at := range f.granted {
			starts = append(starts, at)
		}
		slices.Sort(starts)
		for i := range starts[24:] {
			if starts[i+24]-starts[i] < 100*ms {
				t.Fatalf("more than 24 run at %v", starts[i+24])
			}
		}
	})
}
