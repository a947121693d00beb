package main

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

func shared(name string, limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: name, Limit: limit, Period: period, Scope: throttle.Shared}
}

// policyOf returns the policy of all tasks.
func policyOf(windows ...throttle.Window) throttle.Policy {
	return throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows}
}

// The mean wakes of a task, at most: by a plain client, whose tasks are denied once, and by ours.
const (
	wakesPlain = 2.02
	wakesOurs  = 1.02
)

// A standing is the bars of a backlog at one window: the figures of an earlier engine, whose
// servers asked every 20 ms.
type standing struct{ utilization, p50, p99 float64 }

func lineScenarios() []scenario {
	type windowsFunc = func(scenarioOptions) []throttle.Window
	denied := func(short, full int, s standing, windows windowsFunc) runFunc {
		return func(ctx context.Context, o scenarioOptions) []figure {
			return drain(ctx, o, o.of(short, full), s, windows(o)...)
		}
	}
	joined := func(short, full int, s standing, windows windowsFunc) runFunc {
		return func(ctx context.Context, o scenarioOptions) []figure {
			return drainJoined(ctx, o, o.of(short, full), s, windows(o)...)
		}
	}
	one := func(w throttle.Window) windowsFunc {
		return func(scenarioOptions) []throttle.Window { return []throttle.Window{w} }
	}
	second := one(shared("second", 20, time.Second))
	ten := one(shared("ten", 200, 10*time.Second))
	tenth := one(shared("tenth", 5, 100*time.Millisecond))
	return []scenario{
		{"second", "one tenant's backlog by asynq's client, 20 per 1 s; full: 2,000 tasks",
			denied(400, 2000, standing{0.99, 9, 25}, second)},
		{"ten-seconds", "the same, 200 per 10 s; full: 2,000 tasks",
			denied(600, 2000, standing{0.99, 16, 41}, ten)},
		{"two-windows", "the same, 20 per 60 s and 5 per 3 s; full: 300 tasks; short: both periods a sixth",
			denied(60, 300, standing{0.99, 10, 43}, twoWindows)},
		{"tenth", "the same, 5 per 100 ms; full: 2,000 tasks",
			denied(750, 2000, standing{0.91, 8, 25}, tenth)},
		{"second-joined", "one tenant's backlog by our client, 20 per 1 s; full: 2,000 tasks",
			joined(300, 2000, standing{0.98, 11, 49}, second)},
		{"two-joined", "the same, 20 per 60 s and 5 per 3 s; full: 300 tasks; short: both periods a sixth",
			joined(60, 300, standing{0.99, 8, 49}, twoWindows)},
		{"tenth-joined", "the same, 5 per 100 ms; full: 2,000 tasks",
			joined(750, 2000, standing{0.90, 9, 29}, tenth)},
		{"nginx", "calls to nginx, which has the limits too: " +
			"two at once, and 5 per 1 s without a burst; its refusals", nginx},
		{"weights", "4 tenants of weights 1, 1, 1 and 2 share 50 per 1 s, " +
			"one has a backlog, the others come later; their shares", weights},
		{"tenants", "200 tenants with 5 per 3 s each share 50 per 1 s", tenants},
		{"lines", "300 tenants with 1 per 1 s each, nothing shared", lines},
		{"crossing", "40 tenants with 5 per 3 s each in 4 regions with 20 per 1 s each: scopes that cross", crossing},
		{"slots", "handlers of 1 s on 32 slots at a limit of 50 per 1 s; utilization of the slots", slots},
		{"at-once", "a concurrency window of 8, handlers of 200 ms; full: 2,000 tasks; " +
			"time from a free slot to the next start", atOnce},
		{"bulk", "one tenant's bulk beside nine tenants that enqueue now and then, 50 per 1 s shared; " +
			"full: 3,000 tasks; their waits", bulk},
		{"zipf", "backlogs of Zipf sizes share 50 per 1 s; full: 1,000 tenants; " +
			"when each ends against its fair time", zipf},
		{"join-many", "one tenant enqueues a backlog by our client, then another one task; " +
			"full: 100,000 tasks", joinMany},
		{"deleted", "half of the waiting tasks are deleted by asynq's Inspector; full: 1,000", deleted},
		{"stopped", "workers stop while a backlog waits; full: for 60 s, 20,000 tasks; " +
			"time to drain against the ideal", stopped},
	}
}

func twoWindows(o scenarioOptions) []throttle.Window {
	scale := time.Duration(o.of(6, 1))
	return []throttle.Window{shared("minute", 20, time.Minute/scale), shared("burst", 5, 3*time.Second/scale)}
}

// drain measures how a backlog of one tenant drains. It is enqueued before the workers start.
func drain(ctx context.Context, o scenarioOptions, n int, s standing, windows ...throttle.Window) []figure {
	f := newFleet(o, windows...)
	f.enqueue("acme", n)
	f.workOff(ctx, n)
	figures := f.drained(ctx, new(wakesPlain), new(4.), &s.utilization)
	return append(figures, f.reaction(s.p50, s.p99)...)
}

func drainJoined(ctx context.Context, o scenarioOptions, n int, s standing, windows ...throttle.Window) []figure {
	f := newFleet(o, windows...)
	c := f.planner()
	f.start()
	f.redis.reset(ctx)
	f.join(ctx, c, "acme", n, 8)
	f.await(ctx, n)
	figures := f.drained(ctx, new(wakesOurs), new(4.), &s.utilization)
	return append(figures, f.reaction(s.p50, s.p99)...)
}

// joinMany: one tenant's backlog joins the line, then one task of another tenant.
func joinMany(ctx context.Context, o scenarioOptions) []figure {
	const limit, period = 50, time.Second
	f := newFleet(o, shared("second", limit, period))
	c := f.planner()
	f.start()
	n := o.of(20_000, 100_000)
	begin := time.Now()
	f.join(ctx, c, "a", n, 64)
	took := time.Since(begin)
	f.o.say("joined %d in %v", n, took.Round(time.Millisecond))
	time.Sleep(2 * time.Second)
	asked := time.Now()
	f.join(ctx, c, "b", 1, 1)
	f.awaitTenant(ctx, "b", 1)
	// The first unit of the shared window that frees after b has asked.
	ran := f.grants()
	var free, started time.Time
	for _, l := range ran {
		if at := l.granted.Add(period); !at.Before(asked) && (free.IsZero() || at.Before(free)) {
			free = at
		}
		if l.tenant == "b" {
			started = l.started
		}
	}
	name, most := "joining of "+strconv.Itoa(n)+" tasks", 10*float64(n)/100_000
	waited := started.Sub(free).Seconds()
	return []figure{
		{Name: name, Value: took.Seconds(), Unit: "s", AtMost: &most},
		{Name: "the other's task after the next free unit", Value: waited, Unit: "s", AtMost: new(1.)},
	}
}

// deleted: half of the waiting tasks are deleted, without a call to the line.
func deleted(ctx context.Context, o scenarioOptions) []figure {
	f := newFleet(o, shared("second", 20, time.Second))
	n := o.of(600, 1000)
	ids := f.enqueue("acme", n)
	f.start()
	f.awaitSeen(ctx, n)
	inspector := asynq.NewInspector(f.opt())
	defer inspector.Close()
	gone := 0
	// Every second one at random: where the line is all holes, too.
	random := rand.New(rand.NewPCG(3, 4))
	for _, i := range random.Perm(n) {
		if gone < n/2 && inspector.DeleteTask("default", ids[i]) == nil { // an error: it has run
			gone++
		}
	}
	f.await(ctx, n-gone)
	figures := f.drained(ctx, new(wakesPlain), nil, new(0.98))
	return append(figures, figure{Name: "deleted", Value: float64(gone), Unit: "tasks"})
}

// stopped: all workers are away for a while.
func stopped(ctx context.Context, o scenarioOptions) []figure {
	const limit, period = 200, time.Second
	f := newFleet(o, shared("second", limit, period))
	n := o.of(4000, 20_000)
	f.enqueue("acme", n)
	f.start()
	f.awaitSeen(ctx, n)
	pause := time.Duration(o.of(5, 60)) * time.Second
	f.shift.end()
	left := n - len(f.grants())
	f.o.say("%d wait; stopped for %v", left, pause)
	time.Sleep(pause)
	f.redis.reset(ctx)
	back := time.Now()
	f.start()
	f.await(ctx, n)
	ran := f.grants()
	ideal := time.Duration(float64(left-limit) / limit * float64(period))
	took := ran[len(ran)-1].granted.Sub(back)
	figures := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures,
		figure{Name: "drained in, of the ideal", Value: took.Seconds() / ideal.Seconds(), AtMost: new(1.02)},
		figure{Name: "places that a task fell back, most", Value: float64(fellBack(ran, byCame)), AtMost: new(21.)},
	)
}

// fellBack returns the most later tasks that overtook a task. Tasks that are granted at the same
// moment overtake none.
func fellBack(ran []*logged, order func(a, b *logged) int) int {
	came := slices.SortedFunc(slices.Values(ran), order)
	rank := make(map[*logged]int, len(came))
	for i, l := range came {
		rank[l] = i
	}
	worst, before := 0, 0
	for i, l := range ran {
		if !l.granted.Equal(ran[before].granted) {
			before = i
		}
		worst = max(worst, before-rank[l])
	}
	return worst
}

func byCame(a, b *logged) int { return a.came.Compare(b.came) }

// byNumber orders tasks as they joined.
func byNumber(a, b *logged) int {
	return cmp.Or(cmp.Compare(len(a.id), len(b.id)), cmp.Compare(a.id, b.id))
}

// atOnce: a slot of a concurrency window that is given back is used again at once.
func atOnce(ctx context.Context, o scenarioOptions) []figure {
	o.servers, o.slots = 2, 16
	const limit = 8
	slots := shared("at-once", limit, 0)
	slots.Algorithm = throttle.Concurrency
	f := newFleet(o, slots)
	f.work = 200 * time.Millisecond
	n := o.of(200, 2000)
	f.enqueue("acme", n)
	f.start()
	f.await(ctx, n)
	time.Sleep(2 * f.work) // until the last have ended
	var starts, ends []time.Time
	wakes, running, most := 0, 0, 0
	for _, l := range f.grants() {
		starts, ends = append(starts, l.started), append(ends, l.ended)
		wakes += l.wakes
	}
	slices.SortFunc(starts, time.Time.Compare)
	slices.SortFunc(ends, time.Time.Compare)
	for i, j := 0, 0; i < len(starts); {
		if ends[j].Before(starts[i]) {
			running, j = running-1, j+1
			continue
		}
		running, i = running+1, i+1
		most = max(most, running)
	}
	// While others wait, the end of one run allows the start that is `limit` starts later.
	var reuse []float64
	for i := limit; i < len(starts); i++ {
		reuse = append(reuse, milliseconds(starts[i].Sub(ends[i-limit])))
	}
	return []figure{
		{Name: "wakes per task", Value: float64(wakes) / float64(n), AtMost: new(wakesPlain)},
		{Name: "most at once, over the limit", Value: float64(most - limit), AtMost: new(0.)},
		{Name: "freed -> running, p50", Value: quantile(reuse, 0.5), Unit: "ms", AtMost: new(8.)},
		{Name: "freed -> running, p99", Value: quantile(reuse, 0.99), Unit: "ms", AtMost: new(25.)},
	}
}
