package linetest

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// One tenant's bulk does not hold up tenants that come now and then, at a window or for slots.
func TestFleetBulkBesideLiveTenants(t *testing.T) {
	client := limitertest.Redis(t)
	for name, tc := range map[string]struct {
		limit  int64
		takes  int // ms
		atOnce int // jobs in a period
		period time.Duration
	}{"a window binds": {50, 0, 50, s}, "slots bind": {1e6, 640, 32, 640 * ms}} {
		f := newFleet(t, client, 4, limitertest.Policy(limitertest.SharedWindow(tc.limit, s)))
		f.takes = tc.takes
		f.arrive(0, "bulk", 300)
		for i := range 9 {
			for j := range 15 {
				f.at(s+steps(j)*300*ms+steps(i)*7*ms, func() { f.join(fmt.Sprintf("live%d %05d", i, j)) })
			}
		}
		f.run(435, m)
		f.keepsPace(tc.atOnce, tc.period)
		// What starts may all start at once in a period, and then one job of each of ten tenants.
		most := tc.period + 10*tc.period/steps(tc.atOnce)
		for job, at := range f.joined {
			if waited := f.granted[job] - at; strings.HasPrefix(job, "live") && waited > most {
				t.Errorf("%s: %s waited %v beside the bulk", name, job, waited)
			}
		}
	}
}

// Scopes of every kind, crossing too: all get through, nothing idles, and one user holds up neither
// the others of its tenant nor other tenants.
func TestFleetOfScopes(t *testing.T) {
	client := limitertest.Redis(t)
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
}

// After a limit has changed, a take looks at as many tenants as ever, however many wait at their own
// nodes. Takes go on until all were looked at.
func TestATakeLooksAtSoManyWhateverHasChanged(t *testing.T) {
	client := limitertest.Redis(t)
	own := throttle.Window{Name: "own", Limit: 1, Period: h}
	tenants := []int{500, 4000}
	if os.Getenv("SLUICE_LONG") != "" {
		tenants[1] = 20_000
	}
	var commands [2]int // of a take, at most
	for k, n := range tenants {
		client.FlushAll(t.Context())
		l := limitertest.New(t, client, limitertest.Policy(own))
		var requests []throttle.Request
		for i := range 2 * n {
			r := throttle.Request{Policy: "p", Tenant: fmt.Sprint(i / 2), Ticket: limitertest.Ticket(fmt.Sprint(i))}
			requests = append(requests, r)
		}
		limitertest.Must(t, limitertest.Err(l.Line("p").Reserve(t.Context(), requests)))
		limitertest.Take(t, l, throttle.MaxTake, "q")
		changed := own
		changed.Limit = 2
		limitertest.Must(t, l.SetPolicies([]throttle.Policy{limitertest.Policy(changed)}))
		for left := n; left > 0; {
			before := calls(t, client)
			taken := limitertest.Take(t, l, throttle.MaxTake, "q")
			commands[k] = max(commands[k], calls(t, client)-before)
			if left -= len(taken.Tickets); len(taken.Tickets) == 0 && taken.Next != 0 {
				t.Fatalf("%d of %d tenants still wait", left, n)
			}
		}
	}
	t.Logf("of %d tenants: a take made %d commands at most", tenants, commands)
	if commands[1] > commands[0]*5/4 {
		t.Errorf("of %d tenants: a take made %d commands at most", tenants, commands)
	}
}
