package throttle_test

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A fleet is workers and their queue on a made-up clock: jobs arrive, are granted or denied, are
// called, and come some milliseconds after that; behind every denial stands a fallback. Nothing
// here takes real time but the calls to Redis.
type fleet struct {
	t       *testing.T
	l       *throttle.Limiter
	p       throttle.Policy
	request func(job string) throttle.Request // of policy p; the ticket is the job

	now     time.Duration
	moments moments
	seq     int
	random  *rand.Rand
	dueAt   map[string]time.Duration // by line
	stopped [2]time.Duration         // no worker runs from here to there

	gone    map[string]bool // deleted from the queue
	planned bool            // jobs are planned when they arrive
	wakes   map[string]int
	coming  map[string]bool
	granted map[string]time.Duration
	order   []string // of grants
	called  []string // of calls, and of grants without one
	logs    map[string][]grant
}

// A moment is something that happens at its time.
type moment struct {
	at  time.Duration
	seq int
	do  func()
}

type moments []moment

func (m moments) Len() int { return len(m) }
func (m moments) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(m[i].at, m[j].at), m[i].seq-m[j].seq) < 0
}
func (m moments) Swap(i, j int) { m[i], m[j] = m[j], m[i] }
func (m *moments) Push(x any)   { *m = append(*m, x.(moment)) }
func (m *moments) Pop() any     { all := *m; last := all[len(all)-1]; *m = all[:len(all)-1]; return last }

// newFleet has one policy, "p". Jobs are named "TENANT NUMBER".
func newFleet(t *testing.T, client *redis.Client, p throttle.Policy) *fleet {
	t.Helper()
	p.Name = "p"
	l, c := newHanded(t, client, p)
	f := &fleet{
		t: t, l: l, p: p.WithDefaults(), random: rand.New(rand.NewPCG(1, 2)),
		request: func(job string) throttle.Request { return throttle.Request{Tenant: strings.Fields(job)[0]} },
		dueAt:   map[string]time.Duration{}, gone: map[string]bool{}, wakes: map[string]int{}, coming: map[string]bool{},
		granted: map[string]time.Duration{}, logs: map[string][]grant{},
	}
	l.SetNow(func() int64 { c.set(f.now); return c.us.Load() })
	t.Cleanup(l.OnLine(f.seen))
	return f
}

func (f *fleet) at(at time.Duration, do func()) {
	f.seq++
	heap.Push(&f.moments, moment{max(at, f.now), f.seq, do})
}

func (f *fleet) after(d time.Duration, do func()) { f.at(f.now+d, do) }

// seen wakes whom a call to Redis has called, and sees to it that somebody looks in time.
func (f *fleet) seen(line throttle.Line) {
	if line.Policy == "" {
		return
	}
	for _, job := range line.Calls {
		f.called = append(f.called, job)
		if f.gone[job] {
			f.after(2*ms, func() {
				if err := f.l.Leave(f.t.Context(), "p", f.request(job).Tenant, job); err != nil {
					f.t.Fatal(err)
				}
			})
			continue
		}
		f.coming[job] = true
		f.after(f.latency(), func() { f.wake(job) })
	}
	if line.Due < 0 {
		return
	}
	at := f.now + max(us, line.Due)
	if known, ok := f.dueAt[line.Tenant]; ok && known <= at && known > f.now {
		return
	}
	f.dueAt[line.Tenant] = at
	f.at(at, func() {
		if f.dueAt[line.Tenant] == at {
			delete(f.dueAt, line.Tenant)
			if err := f.l.Pump(f.t.Context(), "p", line.Tenant); err != nil {
				f.t.Fatal(err)
			}
		}
	})
}

// latency is how long a called job takes to come: 15 ms on average.
func (f *fleet) latency() time.Duration { return 5*ms + time.Duration(f.random.IntN(20_000))*us }

// wake is a worker that picks the job up.
func (f *fleet) wake(job string) {
	if _, ok := f.granted[job]; ok || f.gone[job] {
		return
	}
	f.wakes[job]++
	r := f.request(job)
	r.Policy, r.Ticket = "p", job
	d := reserve(f.t, f.l, r)
	if !d.Granted {
		f.coming[job] = false
		f.after(d.RetryIn+m, func() {
			if !f.coming[job] {
				f.wake(job)
			}
		})
		return
	}
	if !f.coming[job] {
		f.called = append(f.called, job)
	}
	f.granted[job] = f.now
	f.order = append(f.order, job)
	for _, w := range d.Windows {
		f.logs[w.Name+"/"+w.Scope.String()] = append(f.logs[w.Name+"/"+w.Scope.String()], grant{d.At.UnixMicro(), lineCost(f.window(w.Name), r)})
	}
}

func (f *fleet) window(name string) throttle.Window {
	return f.p.Windows[slices.IndexFunc(f.p.Windows, func(w throttle.Window) bool { return w.Name == name })]
}

// arrive enqueues n jobs of a tenant, 300 us apart.
func (f *fleet) arrive(at time.Duration, tenant string, n int) {
	for i := range n {
		job := fmt.Sprintf("%s %05d", tenant, i)
		f.at(at+time.Duration(i)*300*us, func() {
			if !f.planned {
				f.wake(job)
				return
			}
			if d, err := f.plan(job, 0, 0); err != nil || !d.Planned {
				f.t.Fatalf("planned %v, %v", d.Planned, err)
			}
		})
	}
}

func (f *fleet) plan(job string, maxWait time.Duration, backlog int) (throttle.Decision, error) {
	r := f.request(job)
	r.Policy, r.Ticket = "p", job
	d, err := f.l.Plan(f.t.Context(), r, maxWait, backlog)
	if err == nil && d.RetryIn == 0 {
		f.called, f.coming[job] = append(f.called, job), true
		f.after(f.latency(), func() { f.wake(job) })
	}
	return d, err
}

// run lets time go by until n jobs are granted. It fails if that takes longer than the time given.
func (f *fleet) run(n int, most time.Duration) {
	f.t.Helper()
	for len(f.granted) < n {
		if len(f.moments) == 0 || f.now > most {
			f.t.Fatalf("after %v %d of %d jobs are through", f.now, len(f.granted), n)
		}
		next := heap.Pop(&f.moments).(moment)
		if f.stopped[0] <= next.at && next.at < f.stopped[1] {
			f.at(f.stopped[1], next.do)
			continue
		}
		f.now = next.at
		next.do()
	}
}

// never fails the test if a window was over at any time.
func (f *fleet) neverOver() {
	f.t.Helper()
	for name, log := range f.logs {
		window, _, _ := strings.Cut(name, "/")
		if over := mostOver(f.window(window), log); over > 0 {
			f.t.Errorf("%s: %d units over", name, over)
		}
	}
}

// inOrder fails the test if a job was called before an earlier one of its flow.
func (f *fleet) inOrder() {
	f.t.Helper()
	last, before := map[string]string{}, map[string]bool{}
	for _, job := range f.called {
		if before[job] {
			continue // its first call was lost
		}
		before[job] = true
		i := strings.LastIndexByte(job, ' ')
		if last[job[:i]] > job[i:] {
			f.t.Errorf("%s was called after%s", job, last[job[:i]])
			return
		}
		last[job[:i]] = job[i:]
	}
}

func (f *fleet) wakesATask() float64 {
	wakes := 0
	for job := range f.granted {
		wakes += f.wakes[job]
	}
	return float64(wakes) / float64(len(f.granted))
}

// utilization is the time that the jobs take at the rate of limit units a period, over the time
// that they took.
func (f *fleet) utilization(limit int, period time.Duration) float64 {
	took := f.granted[f.order[len(f.order)-1]] - f.granted[f.order[0]]
	ideal := float64(len(f.order)-limit) * float64(period) / float64(limit)
	return ideal / float64(took)
}

// meets fails the test if the fleet did worse than that, was over or out of order.
func (f *fleet) meets(wakes, utilization float64, limit int, period time.Duration) {
	f.t.Helper()
	if got := f.wakesATask(); got > wakes {
		f.t.Errorf("%.3f wakes a task, want at most %.3f", got, wakes)
	}
	if worst := slices.Max(slices.Collect(maps.Values(f.wakes))); worst > 4 {
		f.t.Errorf("a task woke %d times", worst)
	}
	if got := f.utilization(limit, period); got < utilization {
		f.t.Errorf("utilization %.3f, want at least %.3f", got, utilization)
	}
	f.neverOver()
	f.inOrder()
}

// grantedIn counts the tenants' grants from one time to another.
func (f *fleet) grantedIn(from, to time.Duration) map[string]int {
	counts := map[string]int{}
	for job, at := range f.granted {
		if at >= from && at < to {
			counts[strings.Fields(job)[0]]++
		}
	}
	return counts
}

func (f *fleet) setPolicy(edit func(p *throttle.Policy)) {
	f.t.Helper()
	p := f.p
	p.Windows = slices.Clone(p.Windows)
	edit(&p)
	f.p = p.WithDefaults()
	if err := f.l.SetPolicies([]throttle.Policy{p}); err != nil {
		f.t.Fatal(err)
	}
}

func sharedWindow(limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: "shared", Limit: limit, Period: period, Per: []string{}}
}

// onRedis runs the longer tests on a real Redis only: miniredis takes ten times as long for a script.
func onRedis(t *testing.T, test func(t *testing.T, client *redis.Client)) {
	t.Helper()
	t.Parallel()
	test(t, throttletest.Client(t, throttletest.Redis(t)))
}

func TestFleetOfOneTenant(t *testing.T) {
	own := func(limit int64, period time.Duration) throttle.Window {
		return throttle.Window{Name: "own", Limit: limit, Period: period}
	}
	for name, tc := range map[string]struct {
		windows     []throttle.Window
		jobs        int // more than 200 only on a real Redis
		planned     bool
		wakes       float64
		utilization float64
		limit       int
		period      time.Duration
	}{
		"20 a second":           {[]throttle.Window{own(20, s)}, 400, false, 2.1, 0.95, 20, s},
		"20 a second, shared":   {[]throttle.Window{sharedWindow(20, s)}, 400, false, 2.1, 0.95, 20, s},
		"200 in 10 seconds":     {[]throttle.Window{own(200, 10*s)}, 1000, false, 2.1, 0.95, 200, 10 * s},
		"20 a minute, 5 in 3 s": {[]throttle.Window{own(20, m), {Name: "burst", Limit: 5, Period: 3 * s}}, 100, false, 2.1, 0.95, 20, m},
		"5 in 100 ms":           {[]throttle.Window{own(5, 100*ms)}, 200, false, 2.2, 0.85, 5, 100 * ms},
		"planned":               {[]throttle.Window{own(20, s)}, 400, true, 1.1, 0.95, 20, s},
		"planned, shared":       {[]throttle.Window{sharedWindow(20, s)}, 400, true, 1.1, 0.95, 20, s},
		"fixed":                 {[]throttle.Window{{Name: "own", Algorithm: throttle.Fixed, Limit: 20, Period: s}}, 400, false, 2.1, 0.95, 20, s},
		"fixed, first use": {[]throttle.Window{{Name: "own", Algorithm: throttle.Fixed, Anchor: throttle.AnchorFirstUse, Limit: 20, Period: s}},
			400, false, 2.1, 0.95, 20, s},
		"gcra": {[]throttle.Window{{Name: "own", Algorithm: throttle.GCRA, Limit: 20, Burst: 5, Period: s}}, 200, false, 2.1, 0.95, 5, 250 * ms},
		"three algorithms": {[]throttle.Window{
			sharedWindow(30, s),
			{Name: "fixed", Algorithm: throttle.Fixed, Limit: 45, Period: 3 * s},
			{Name: "gcra", Algorithm: throttle.GCRA, Limit: 20, Burst: 20, Period: s},
		}, 300, false, 2.1, 0.9, 45, 3 * s},
		"1100 in 10 seconds, merged": {[]throttle.Window{own(1100, 10*s)}, 2200, true, 1.1, 0.95, 1100, 10 * s},
	} {
		t.Run(name, func(t *testing.T) {
			each := throttletest.Each
			if tc.jobs > 200 {
				each = onRedis
			}
			each(t, func(t *testing.T, client *redis.Client) {
				f := newFleet(t, client, policy(tc.windows...))
				f.planned = tc.planned
				f.arrive(0, "acme", tc.jobs)
				f.run(tc.jobs, h)
				f.meets(tc.wakes, tc.utilization, tc.limit, tc.period)
				mustBeGone(t, client)
			})
		})
	}
}

// mustBeGone fails the test if anything of a line is left.
func mustBeGone(t *testing.T, client *redis.Client) {
	t.Helper()
	for _, key := range client.Keys(t.Context(), "*").Val() {
		if _, name, _ := strings.Cut(key, "}:"); !strings.HasPrefix(name, "w:") && !strings.HasPrefix(name, "n:") || strings.HasPrefix(name, "n:w:") {
			t.Errorf("%s is left", key)
		}
	}
}

// Whoever comes while another has a backlog gets a share by weight from then on, and what one
// does not use the others do.
func TestFleetSharesByWeight(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		p := policy(sharedWindow(50, s))
		p.Tenants = map[string]throttle.Tenant{"d": {Weight: 2}}
		f := newFleet(t, client, p)
		f.arrive(0, "a", 700)
		f.arrive(3*s, "b", 150)
		f.arrive(3*s, "d", 300)
		f.arrive(6*s, "c", 150)
		f.run(1300, m)
		f.meets(2.2, 0.95, 50, s)
		for tenant, want := range map[string]float64{"a": 50, "b": 50, "c": 50, "d": 100} {
			if got := float64(f.grantedIn(7*s, 12*s)[tenant]); got < 0.95*want || got > 1.05*want {
				t.Errorf("tenant %s got %v in 5 s, want %v", tenant, got, want)
			}
		}
		mustBeGone(t, client)
	})
}

// Many tenants with limits of their own, of which each alone could fill the shared window.
func TestFleetOfManyTenants(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(sharedWindow(50, s), throttle.Window{Name: "own", Limit: 5, Period: 3 * s}))
		for i := range 100 {
			f.arrive(time.Duration(i)*5*ms, fmt.Sprint("t", i), 7)
		}
		f.run(700, m)
		f.meets(2.2, 0.95, 50, s)
		mustBeGone(t, client)
	})
}

// One tenant's bulk holds up nobody who comes now and then.
func TestFleetBulkBesideLiveTenants(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(sharedWindow(50, s)))
		f.arrive(0, "bulk", 600)
		arrived := map[string]time.Duration{}
		for i := range 9 {
			for j := range 30 {
				job, at := fmt.Sprintf("live%d %05d", i, j), s+time.Duration(j)*300*ms+time.Duration(i)*7*ms
				arrived[job] = at
				f.at(at, func() { f.wake(job) })
			}
		}
		f.run(870, m)
		f.meets(2.2, 0.95, 50, s)
		for job, at := range arrived {
			if waited := f.granted[job] - at; waited > 1200*ms {
				t.Errorf("%s waited %v beside the bulk", job, waited)
			}
		}
	})
}

// No tenant is later than it would be if the window were cut into equal parts at every moment.
func TestFleetOfZipfTenants(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(sharedWindow(50, s)))
		jobs := map[string]int{}
		total := 0
		for i := range 60 {
			tenant := fmt.Sprintf("z%02d", i)
			jobs[tenant] = max(1, 200/(i+1))
			f.arrive(0, tenant, jobs[tenant])
			total += jobs[tenant]
		}
		f.run(total, m)
		f.meets(2.1, 0.94, 50, s) // the last second is not full
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
			fair := time.Duration(units) * s / 50
			if finished[tenant] > fair+fair/10+s {
				t.Errorf("tenant %s with %d jobs was done at %v, its fair time is %v", tenant, n, finished[tenant], fair)
			}
		}
	})
}

func TestFleetPlannedMassHoldsUpNobody(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(sharedWindow(20, s)))
		f.planned = true
		f.arrive(0, "a", 2000)
		f.arrive(1700*ms, "b", 1)
		f.run(100, m)
		if at, ok := f.granted["b 00000"]; !ok || at > 3*s {
			t.Errorf("b came at 1.7 s and started at %v", at)
		}
		f.neverOver()
		f.inOrder()
	})
}

// Of those who are gone each costs one call, but no room.
func TestFleetHalfDeleted(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(sharedWindow(20, s)))
		f.arrive(0, "acme", 400)
		f.at(s, func() {
			for i := range 400 {
				if job := fmt.Sprintf("acme %05d", i); i%2 == 0 && i >= 20 {
					f.gone[job] = !f.coming[job]
				}
			}
		})
		gone := 0
		f.run(200, m)
		for range f.gone {
			gone++
		}
		if gone < 150 {
			t.Fatalf("%d jobs were deleted", gone)
		}
		f.run(400-gone, m)
		f.meets(2.1, 0.9, 20, s)
	})
}

// Whoever was called when the workers stopped keeps its rank, and so does everybody else. A stop
// that is no longer than the fallback's slack wakes nobody in vain.
func TestFleetStopped(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(sharedWindow(20, s)))
		f.stopped = [2]time.Duration{5 * s, 50 * s}
		f.arrive(0, "acme", 600)
		f.run(600, 10*m)
		f.neverOver()
		f.inOrder()
		if got := f.wakesATask(); got > 2.2 {
			t.Errorf("%.3f wakes a task", got)
		}
		rest := f.granted[f.order[599]] - 50*s
		if ideal := 25 * s; rest > ideal+ideal/10 { // 100 went before
			t.Errorf("after the stop it took %v, ideal is %v", rest, ideal)
		}
		for i, job := range f.order { // those of one second come in any order
			if n, _ := strconv.Atoi(job[len("acme "):]); n/20 != i/20 {
				t.Errorf("grant %d went to %s", i, job)
			}
		}
		mustBeGone(t, client)
	})
}

// Scopes of every kind: all get through, nothing idles, and one user holds up neither the others
// of its tenant nor other tenants.
func TestFleetOfScopes(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(
			throttle.Window{Name: "user", Limit: 1, Period: s, Per: []string{"tenant", "user"}},
			throttle.Window{Name: "own", Limit: 5, Period: s},
			throttle.Window{Name: "region", Limit: 12, Period: s, Per: []string{"region"}},
			sharedWindow(20, s),
		))
		f.request = func(job string) throttle.Request {
			parts := strings.Split(strings.Fields(job)[0], "/")
			return throttle.Request{Tenant: parts[0], Attributes: map[string]string{"user": parts[1], "region": parts[2]}}
		}
		for i := range 240 {
			f.arrive(time.Duration(i)*300*us, fmt.Sprintf("t%d/u%d/r%d", i%8, i/8%10, i/80), 2)
		}
		f.arrive(0, "t0/greedy/r0", 40) // needs 39 s
		late := "t0/late/r0 00000"
		f.at(3*s, func() { f.wake(late) })
		f.run(521, 3*m)
		f.neverOver()
		f.inOrder()
		if got := f.wakesATask(); got > 2.2 {
			t.Errorf("%.3f wakes a task", got)
		}
		others := time.Duration(0)
		for job, at := range f.granted {
			if !strings.HasPrefix(job, "t0/greedy") {
				others = max(others, at)
			}
		}
		// 480 jobs at 20 a second, less what the greedy one takes of it.
		if most := 30 * s; others > most || f.granted[late] > 20*s {
			t.Errorf("the others were done at %v, want %v; the late user at %v", others, most, f.granted[late])
		}
		if at := f.granted["t0/greedy/r0 00039"]; at < 39*s || at > 44*s {
			t.Errorf("the greedy user was done at %v", at)
		}
		mustBeGone(t, client)
	})
}

// A tenant over its own limit holds up nobody at the shared window; costs come in two units.
func TestFleetOfCosts(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(
			throttle.Window{Name: "own", Limit: 20, Period: s},
			throttle.Window{Name: "tokens", Limit: 1000, Period: s, Unit: "tokens", Per: []string{}},
			sharedWindow(30, s),
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
		f.neverOver()
		f.inOrder()
		if got := f.wakesATask(); got > 2.2 {
			t.Errorf("%.3f wakes a task", got)
		}
		if last := f.granted[f.order[359]]; last > 26*s { // 720 requests, 17,800 tokens
			t.Errorf("done at %v", last)
		}
		for tenant, n := range f.grantedIn(2*s, 14*s) {
			if n < 54 || n > 68 {
				t.Errorf("tenant %s: %d in 12 s", tenant, n)
			}
		}
		mustBeGone(t, client)
	})
}

// A large cost at the head of a shared window is not starved by small ones that come from
// windows of their own.
func TestFleetLargeCostIsNotStarved(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(throttle.Window{Name: "own", Limit: 10, Period: s}, sharedWindow(10, s)))
		f.request = func(job string) throttle.Request {
			tenant := strings.Fields(job)[0]
			cost := int64(1)
			if tenant == "large" {
				cost = 10
			}
			return throttle.Request{Tenant: tenant, Cost: map[string]int64{"requests": cost}}
		}
		f.p.Windows[0].Limit = 10
		for i := range 8 { // spread out, so that the shared window is never empty
			for j := range 20 {
				job := fmt.Sprintf("small%d %05d", i, j)
				f.at(time.Duration(j)*700*ms+time.Duration(i)*90*ms, func() { f.wake(job) })
			}
		}
		f.arrive(2*s, "large", 1)
		f.run(161, 2*m)
		f.neverOver()
		if waited := f.granted["large 00000"] - 2*s; waited > 4*s {
			t.Errorf("the large one waited %v", waited)
		}
	})
}

func TestFleetRaisedLimitActsAtTheNextCall(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for name, w := range map[string]throttle.Window{"own": {Name: "w", Limit: 2, Period: h}, "shared": {Name: "w", Limit: 2, Period: h, Per: []string{}}} {
			t.Run(name, func(t *testing.T) {
				if err := client.FlushDB(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
				f := newFleet(t, client, policy(w))
				f.arrive(0, "acme", 30)
				f.at(5*s, func() {
					f.setPolicy(func(p *throttle.Policy) { p.Windows[0].Limit = 25 })
					f.wake("acme 99999") // anybody, at the end of the line
				})
				f.run(25, 6*s)
				f.neverOver()
				f.inOrder()
				if f.granted["acme 99999"] > 0 {
					t.Error("whoever came last was let in")
				}
				// Cut below what is used: nobody goes until it is an hour old.
				f.at(6*s, func() { f.setPolicy(func(p *throttle.Policy) { p.Windows[0].Limit = 10 }) })
				f.run(31, 4*h)
				if at := f.granted["acme 00026"]; at < h+5*s {
					t.Errorf("granted at %v by a limit that was cut", at)
				}
			})
		}
	})
}

func TestFleetWeightActsOnTheBacklog(t *testing.T) {
	onRedis(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(sharedWindow(40, s)))
		f.arrive(0, "a", 600)
		f.arrive(0, "b", 600)
		f.at(5*s, func() {
			f.setPolicy(func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"b": {Weight: 3}} })
		})
		f.run(480, m)
		if n := f.grantedIn(s, 5*s); n["a"] < 76 || n["a"] > 84 {
			t.Errorf("with equal weights: %v", n)
		}
		if n := f.grantedIn(6*s, 10*s); n["b"] < 114 || n["b"] > 126 || n["a"] < 36 {
			t.Errorf("with weights 1 and 3: %v", n)
		}
		f.neverOver()
		f.inOrder()
	})
}

func TestFleetRefusesWhatWouldStartTooLate(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		f := newFleet(t, client, policy(sharedWindow(10, s)))
		taken := 0
		for i := range 100 {
			job := fmt.Sprintf("acme %05d", i)
			before := fmt.Sprintf("%+v", readLineState(t, client, "sluice:{p}:"))
			_, err := f.plan(job, 4*s, 0)
			switch {
			case err == nil:
				taken++
			case !errors.As(err, new(*throttle.RefusedError)):
				t.Fatal(err)
			case fmt.Sprintf("%+v", readLineState(t, client, "sluice:{p}:")) != before:
				t.Error("a refusal changed the line")
			}
		}
		if taken != 50 {
			t.Errorf("%d were taken, want the 50 that start within 4 s", taken)
		}
		f.run(taken, m)
		if last := f.granted[f.order[taken-1]]; last > 4*s+150*ms {
			t.Errorf("the last one started at %v", last)
		}
		f.meets(1, 0.9, 10, s)
		mustBeGone(t, client)
	})
}
