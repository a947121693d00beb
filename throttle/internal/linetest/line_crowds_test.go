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
		f.utilization(0.95, 50, s)
		limitertest.IsGone(t, client)
	})
}

// One tenant's bulk does not hold up tenants that come now and then, at a window or for slots.
func TestFleetBulkBesideLiveTenants(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		for name, tc := range map[string]struct {
			limit int64
			takes int // ms; 32 slots
		}{"a window binds": {50, 0}, "slots bind": {1e6, 640}} {
			f := newFleet(t, client, 4, limitertest.Policy(limitertest.SharedWindow(tc.limit, s)))
			f.takes = tc.takes
			f.arrive(0, "bulk", 600)
			for i := range 9 {
				for j := range 30 {
					f.at(s+steps(j)*300*ms+steps(i)*7*ms, func() { f.join(fmt.Sprintf("live%d %05d", i, j)) })
				}
			}
			f.run(870, m)
			if last := f.granted[f.order[869]]; last > 19*s {
				t.Errorf("%s: done at %v", name, last)
			}
			for job, at := range f.joined {
				if waited := f.granted[job] - at; strings.HasPrefix(job, "live") && waited > 1200*ms {
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
		f.utilization(0.95, 50, s)
		finished := map[string]time.Duration{}
		for job, at := range f.granted {
			tenant := strings.Fields(job)[0]
			finished[tenant] = max(finished[tenant], at)
		}
		for tenant, n := range jobs {
			units := 0 // before this tenant is done, nobody gets more than it
			for _, other := range jobs {
				units += min(n, other)
			}
			fair := steps(units) * s / 50
			if finished[tenant] > fair+fair/10+s {
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
		// 80 + 110 at 20 a second, after the 20 of the beginning.
		if last := f.granted[f.order[209]] - 45*s; last > 10*s || stopped > 4100*ms {
			t.Errorf("stopped at %v, done at %v", stopped, last)
		}
		limitertest.IsGone(t, client)
	})
}

// Scopes of every kind, crossing too: all get through, nothing idles, and one user holds up neither
// the others of its tenant nor other tenants.
func TestFleetOfScopes(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, 4, limitertest.Policy(
			throttle.Window{Name: "user", Limit: 1, Period: s, Scope: throttle.Per("tenant", "user")},
			throttle.Window{Name: "own", Limit: 5, Period: s},
			throttle.Window{Name: "region", Limit: 12, Period: s, Scope: throttle.Per("region")},
			limitertest.SharedWindow(20, s),
		))
		f.request = func(job string) throttle.Request {
			parts := strings.Split(strings.Fields(job)[0], "/")
			return throttle.Request{Tenant: parts[0], Attributes: map[string]string{"user": parts[1], "region": parts[2]}}
		}
		for i := range 240 {
			f.arrive(steps(i)*300*us, fmt.Sprintf("t%d/u%d/r%d", i%8, i/8%10, i/80), 2)
		}
		f.arrive(0, "t0/greedy/r0", 40) // needs 39 s
		late := "t0/late/r0 00000"
		f.at(3*s, func() { f.join(late) })
		f.run(521, 3*m)
		others := time.Duration(0)
		for job, at := range f.granted {
			if !strings.HasPrefix(job, "t0/greedy") {
				others = max(others, at)
			}
		}
		// 480 jobs at 20 a second, less what the greedy one takes of it; the last ones are of one region.
		if most := 31 * s; others > most || f.granted[late] > 20*s {
			t.Errorf("the others were done at %v, want %v; the late user at %v", others, most, f.granted[late])
		}
		if at := f.granted["t0/greedy/r0 00039"]; at < 39*s || at > 48*s {
			t.Errorf("the greedy user was done at %v", at)
		}
		limitertest.IsGone(t, client)
	})
}

// A tenant over its own limit holds up nobody at the shared window; costs come in two units.
func TestFleetOfCosts(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, 3, limitertest.Policy(
			throttle.Window{Name: "own", Limit: 20, Period: s},
			throttle.Window{Name: "tokens", Limit: 1000, Period: s, Unit: "tokens", Scope: throttle.Shared},
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
		if last := f.granted[f.order[359]]; last > 26*s { // 720 requests, 17,800 tokens
			t.Errorf("done at %v", last)
		}
		got := map[string]int{}
		for job, at := range f.granted {
			if at >= 2*s && at < 14*s {
				got[strings.Fields(job)[0]]++
			}
		}
		for tenant, n := range got {
			if n < 54 || n > 68 {
				t.Errorf("tenant %s: %d in 12 s", tenant, n)
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
		if waited := f.granted["large 00000"] - 2*s; waited > 4*s {
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
		if last := f.granted[f.order[599]]; last > 2700*ms { // 25 rounds of 24
			t.Errorf("done at %v", last)
		}
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
