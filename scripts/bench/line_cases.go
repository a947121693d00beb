package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

func shared(name string, limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: name, Limit: limit, Period: period, Per: []string{}}
}

func lineCases() []lineCase {
	return []lineCase{
		{"second", "one tenant, 20 per 1 s, full: 2,000 tasks", func(ctx context.Context, o lineOptions) ([]figure, error) {
			return drain(ctx, o, o.of(400, 2000), 2.1, new(4.), 0.95, shared("second", 20, time.Second))
		}},
		{"ten-seconds", "one tenant, 200 per 10 s, full: 2,000 tasks", func(ctx context.Context, o lineOptions) ([]figure, error) {
			return drain(ctx, o, o.of(600, 2000), 2.1, new(4.), 0.95, shared("ten", 200, 10*time.Second))
		}},
		{"two-windows", "one tenant, 20 per 60 s and 5 per 3 s, full: 300 tasks; short: both periods a sixth", func(ctx context.Context, o lineOptions) ([]figure, error) {
			return drain(ctx, o, o.of(60, 300), 2.1, new(4.), 0.95, twoWindows(o)...)
		}},
		{"tenth", "one tenant, 5 per 100 ms, full: 2,000 tasks", func(ctx context.Context, o lineOptions) ([]figure, error) {
			return drain(ctx, o, o.of(750, 2000), 2.2, nil, 0.85, shared("tenth", 5, 100*time.Millisecond))
		}},
		{"second-planned", "20 per 1 s, planned at enqueue", func(ctx context.Context, o lineOptions) ([]figure, error) {
			return planned(ctx, o, o.of(300, 2000), 0.95, shared("second", 20, time.Second))
		}},
		{"two-planned", "20 per 60 s and 5 per 3 s, planned at enqueue; short: both periods a sixth", func(ctx context.Context, o lineOptions) ([]figure, error) {
			return planned(ctx, o, o.of(60, 300), 0.95, twoWindows(o)...)
		}},
		{"tenth-planned", "5 per 100 ms, planned at enqueue", func(ctx context.Context, o lineOptions) ([]figure, error) {
			return planned(ctx, o, o.of(750, 2000), 0.85, shared("tenth", 5, 100*time.Millisecond))
		}},
		{"nginx", "calls through nginx: two limits at once, and 5 per 1 s without a burst", nginx},
		{"idle", "worker processes with nothing to do", idle},
		{"weights", "4 tenants, weights 1, 1, 1, 2, shared 50 per 1 s, one with a backlog, others later", weights},
		{"tenants", "200 tenants, own 5 per 3 s each, shared 50 per 1 s", tenants},
		{"lines", "300 tenants, own 1 per 1 s each: a line of its own for each", lines},
		{"slots", "handlers of 1 s, fewer slots than the limit: 32 run at once, 50 per 1 s", slots},
		{"at-once", "8 at once, handlers of 200 ms, full: 2,000 tasks", atOnce},
		{"bulk", "a bulk beside nine live tenants, shared 50 per 1 s, full: 3,000 tasks", bulk},
		{"zipf", "Zipf backlog, shared 50 per 1 s, full: 1,000 tenants", zipf},
		{"plan-many", "one tenant plans a backlog, another one task, full: 100,000", planMany},
		{"waiting", "a line of many tickets beside an empty one, full: 1,000,000", waiting},
		{"deleted", "half of the waiting tasks deleted with asynq's Inspector, full: 1,000", deleted},
		{"stopped", "workers stopped while a backlog waits, full: 60 s, 20,000 tasks", stopped},
	}
}

func twoWindows(o lineOptions) []throttle.Window {
	scale := time.Duration(o.of(6, 1))
	return []throttle.Window{shared("minute", 20, time.Minute/scale), shared("burst", 5, 3*time.Second/scale)}
}

// drain lets a backlog of one tenant, enqueued before the workers start, run dry.
func drain(ctx context.Context, o lineOptions, n int, wakes float64, most *float64, utilization float64, windows ...throttle.Window) ([]figure, error) {
	f, err := newFleet(o, windows...)
	if err != nil {
		return nil, err
	}
	defer f.close()
	if _, err := f.enqueue("acme", n); err != nil {
		return nil, err
	}
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.await(ctx, n); err != nil {
		return nil, err
	}
	figures, err := f.drained(ctx, &wakes, most, &utilization)
	return append(figures, f.reaction()...), err
}

func planned(ctx context.Context, o lineOptions, n int, utilization float64, windows ...throttle.Window) ([]figure, error) {
	f, err := newFleet(o, windows...)
	if err != nil {
		return nil, err
	}
	defer f.close()
	c, err := f.planner()
	if err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	if err := f.plan(ctx, c, "acme", n, 8); err != nil {
		return nil, err
	}
	if err := f.await(ctx, n); err != nil {
		return nil, err
	}
	figures, err := f.drained(ctx, new(1.1), new(4.), &utilization)
	return append(figures, f.reaction()...), err
}

// idle counts what workers ask of Redis that have had a task, and have none.
func idle(ctx context.Context, o lineOptions) ([]figure, error) {
	f, err := newFleet(o, shared("second", 20, time.Second))
	if err != nil {
		return nil, err
	}
	defer f.close()
	if err := f.start(); err != nil {
		return nil, err
	}
	if _, err := f.enqueue("acme", 30); err != nil {
		return nil, err
	}
	if err := f.await(ctx, 30); err != nil {
		return nil, err
	}
	time.Sleep(6 * time.Second) // until the line and its lease are gone
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	const watched = 10 * time.Second
	time.Sleep(watched)
	calls, err := f.calls(ctx)
	if err != nil {
		return nil, err
	}
	stats, err := f.redis.info(ctx, "commandstats")
	if err != nil {
		return nil, err
	}
	sent := 0.
	for _, script := range []string{"evalsha", "eval"} {
		var n float64
		fmt.Sscanf(stats["cmdstat_"+script], "calls=%f", &n)
		sent += n
	}
	per := watched.Seconds() * float64(o.servers)
	return []figure{
		{Name: "scripts of an idle worker process", Value: sent / per, Unit: "per s"},
		{Name: "Redis calls of an idle worker process, those in scripts included", Value: calls / per, Unit: "per s"},
	}, nil
}

// weights: a first tenant has a backlog, a second comes later, and then two more.
func weights(ctx context.Context, o lineOptions) ([]figure, error) {
	f, err := newFleetOf(o, throttle.Policy{
		Name: "api", Match: []string{"*"}, Windows: []throttle.Window{shared("second", 50, time.Second)},
		Tenants: map[string]throttle.Tenant{"a": {Weight: 1}, "b": {Weight: 1}, "c": {Weight: 1}, "d": {Weight: 2}},
	})
	if err != nil {
		return nil, err
	}
	defer f.close()
	arrivals := []struct {
		tenant string
		n      int
		pause  time.Duration // before it
	}{
		{"a", o.of(750, 3000), 0},
		{"b", o.of(300, 800), time.Duration(o.of(3, 10)) * time.Second},
		{"c", o.of(200, 500), time.Duration(o.of(3, 10)) * time.Second},
		{"d", o.of(400, 1000), 0},
	}
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	all := 0
	for _, a := range arrivals {
		time.Sleep(a.pause)
		if _, err := f.enqueue(a.tenant, a.n); err != nil {
			return nil, err
		}
		all += a.n
	}
	if err := f.await(ctx, all); err != nil {
		return nil, err
	}
	// All wait from the first period after the last tenant came until one has no more to call.
	first, last := map[string]time.Time{}, map[string]time.Time{}
	for _, l := range f.grants() {
		if at, ok := first[l.tenant]; !ok || l.came.Before(at) {
			first[l.tenant] = l.came
		}
		last[l.tenant] = l.granted
	}
	var from, to time.Time
	for tenant := range first {
		if first[tenant].After(from) {
			from = first[tenant]
		}
		if to.IsZero() || last[tenant].Before(to) {
			to = last[tenant]
		}
	}
	from, to = from.Add(time.Second), to.Add(-time.Second)
	figures, err := f.drained(ctx, new(2.2), nil, new(0.95))
	return append(append(figures, f.reaction()...),
		figure{Name: "share error", Value: f.shareError(from, to), AtMost: new(0.05)},
		figure{Name: "time in which all wait", Value: to.Sub(from).Seconds(), Unit: "s"},
	), err
}

func tenants(ctx context.Context, o lineOptions) ([]figure, error) {
	f, err := newFleet(o,
		throttle.Window{Name: "own", Limit: 5, Period: 3 * time.Second},
		shared("second", 50, time.Second))
	if err != nil {
		return nil, err
	}
	defer f.close()
	const of = 200
	each := o.of(5, 15)
	if err := f.enqueueAcross(of, each); err != nil {
		return nil, err
	}
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.await(ctx, each*of); err != nil {
		return nil, err
	}
	figures, err := f.drained(ctx, new(2.2), nil, nil)
	return append(figures, f.sharedUtilization(50, time.Second)), err
}

// lines: without a shared window every tenant has a line, and all of them have to be looked after.
func lines(ctx context.Context, o lineOptions) ([]figure, error) {
	f, err := newFleet(o, throttle.Window{Name: "own", Limit: 1, Period: time.Second})
	if err != nil {
		return nil, err
	}
	defer f.close()
	const of = 300
	each := o.of(15, 60)
	if err := f.enqueueAcross(of, each); err != nil {
		return nil, err
	}
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.await(ctx, each*of); err != nil {
		return nil, err
	}
	figures, err := f.drained(ctx, new(2.2), nil, nil)
	return append(figures, f.reaction()...), err
}

// slots: the limit allows more than the workers can run, so whoever is called has to wait for them.
func slots(ctx context.Context, o lineOptions) ([]figure, error) {
	o.servers, o.slots = 2, 16
	f, err := newFleet(o, shared("second", 50, time.Second))
	if err != nil {
		return nil, err
	}
	defer f.close()
	f.work = time.Second
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	c, err := f.planner()
	if err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	n := o.of(600, 2000)
	if err := f.plan(ctx, c, "acme", n, 1); err != nil {
		return nil, err
	}
	if err := f.await(ctx, n); err != nil {
		return nil, err
	}
	ran := f.grants()
	ideal := float64(n-o.servers*o.slots) / float64(o.servers*o.slots) * f.work.Seconds()
	figures, err := f.drained(ctx, new(2.2), nil, nil)
	return append(figures,
		figure{Name: "utilization of the slots", Value: ideal / ran[n-1].granted.Sub(ran[0].granted).Seconds(), AtLeast: new(0.9)},
		figure{Name: "places that a task fell back, most", Value: float64(fellBack(ran, byNumber)), AtMost: new(100.)},
	), err
}

// enqueueAcross enqueues a backlog of as many tasks for each of so many tenants, in turn.
func (f *fleet) enqueueAcross(tenants, each int) error {
	return inParallel(tenants*each, 8, func(i int) error {
		tenant := "tenant-" + strconv.Itoa(i%tenants)
		_, err := f.plain.Enqueue(worker.NewTask(worker.Identity{Tenant: tenant}, "call", nil), asynq.TaskID(fmt.Sprint(tenant, "-", i/tenants)))
		return err
	})
}

func (f *fleet) sharedUtilization(limit int, period time.Duration) figure {
	ran := f.grants()
	ideal := float64(len(ran)-limit) / float64(limit) * period.Seconds()
	return figure{Name: "utilization of the shared window", Value: ideal / ran[len(ran)-1].granted.Sub(ran[0].granted).Seconds()}
}

// bulk: nine tenants enqueue three tasks a second each, beside one with a backlog.
func bulk(ctx context.Context, o lineOptions) ([]figure, error) {
	f, err := newFleet(o, shared("second", 50, time.Second))
	if err != nil {
		return nil, err
	}
	defer f.close()
	n := o.of(500, 3000)
	if _, err := f.enqueue("bulk", n); err != nil {
		return nil, err
	}
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	ends, end := context.WithCancel(ctx)
	var live sync.WaitGroup
	var mu sync.Mutex
	var failed error
	lives := 0
	for tenant := range 9 {
		live.Go(func() {
			tick := time.NewTicker(time.Second / 3)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-ends.Done():
					return
				case <-tick.C:
				}
				name := "live-" + strconv.Itoa(tenant)
				_, err := f.plain.Enqueue(worker.NewTask(worker.Identity{Tenant: name}, "call", nil), asynq.TaskID(fmt.Sprint(name, "-", i)))
				mu.Lock()
				lives++
				if err != nil {
					failed = err
				}
				mu.Unlock()
			}
		})
	}
	err = f.awaitTenant(ctx, "bulk", n)
	end()
	live.Wait()
	if failed != nil {
		return nil, failed
	}
	if err == nil {
		err = f.await(ctx, n+lives)
	}
	if err != nil {
		return nil, err
	}
	var waits []time.Duration
	for _, l := range f.grants() {
		if l.tenant != "bulk" {
			waits = append(waits, l.granted.Sub(l.came))
		}
	}
	figures, err := f.drained(ctx, new(2.2), nil, nil)
	return append(append(figures, f.reaction()...),
		f.sharedUtilization(50, time.Second),
		figure{Name: "wait of a live task p50", Value: milliseconds(quantile(waits, 0.5)), Unit: "ms"},
		figure{Name: "wait of a live task p99", Value: milliseconds(quantile(waits, 0.99)), Unit: "ms"},
	), err
}

func (f *fleet) awaitTenant(ctx context.Context, tenant string, n int) error {
	for told := time.Now(); ; {
		ran := 0
		f.mu.Lock()
		for _, l := range f.tasks {
			if l.tenant == tenant && !l.started.IsZero() {
				ran++
			}
		}
		last := f.startedAt
		f.mu.Unlock()
		if ran >= n {
			return nil
		}
		if time.Since(told) > 5*time.Second {
			told = time.Now()
			f.o.say("%d of %d tasks of %s have started", ran, n, tenant)
		}
		if !last.IsZero() && time.Since(last) > stalledAfter {
			return fmt.Errorf("no task has started for %v", stalledAfter)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// zipf: tenant number k has a backlog of 1/k of the first one's, all of it there at once.
func zipf(ctx context.Context, o lineOptions) ([]figure, error) {
	const limit, period = 50, time.Second
	f, err := newFleet(o, shared("second", limit, period))
	if err != nil {
		return nil, err
	}
	defer f.close()
	var ids []string
	backlog := map[string]float64{}
	for k := range o.of(200, 1000) {
		tenant := "tenant-" + strconv.Itoa(k)
		n := int(math.Ceil(float64(o.of(180, 300)) / float64(k+1)))
		backlog[tenant] = float64(n)
		for i := range n {
			ids = append(ids, fmt.Sprint(tenant, "/", i))
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	if err := inParallel(len(ids), 8, func(i int) error {
		tenant := ids[i][:slices.Index([]byte(ids[i]), '/')]
		_, err := f.plain.Enqueue(worker.NewTask(worker.Identity{Tenant: tenant}, "call", nil), asynq.TaskID(ids[i]))
		return err
	}); err != nil {
		return nil, err
	}
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.await(ctx, len(ids)); err != nil {
		return nil, err
	}
	ran := f.grants()
	finished := map[string]time.Duration{}
	for _, l := range ran {
		finished[l.tenant] = l.granted.Sub(ran[0].granted)
	}
	fair := fairFinish(backlog, limit, period)
	worst, late := math.Inf(-1), 0
	for tenant, at := range finished {
		over := at - time.Duration(1.1*float64(fair[tenant])) - period
		worst = max(worst, over.Seconds())
		if over > 0 {
			late++
		}
	}
	figures, err := f.drained(ctx, nil, nil, new(0.95))
	return append(append(figures, f.reaction()...),
		figure{Name: "tenants later than fair + 10 % + 1 s", Value: float64(late), AtMost: new(0.)},
		figure{Name: "latest tenant, beyond that", Value: worst, Unit: "s"},
	), err
}

// fairFinish is when each tenant's backlog is gone if all that have one share the rate equally
// at every moment: the fluid that start-time fair queueing follows. The first limit units go at once.
func fairFinish(backlog map[string]float64, limit int, period time.Duration) map[string]time.Duration {
	type entry struct {
		tenant string
		n      float64
	}
	var all []entry
	for tenant, n := range backlog {
		all = append(all, entry{tenant, n})
	}
	slices.SortFunc(all, func(a, b entry) int { return int(a.n - b.n) })
	finish := map[string]time.Duration{}
	served, level := 0., 0.
	for i, e := range all {
		served += (e.n - level) * float64(len(all)-i)
		level = e.n
		finish[e.tenant] = time.Duration(max(0, served-float64(limit)) / float64(limit) * float64(period))
	}
	return finish
}

// planMany: one tenant plans a backlog, then another plans one task.
func planMany(ctx context.Context, o lineOptions) ([]figure, error) {
	const limit, period = 50, time.Second
	f, err := newFleet(o, shared("second", limit, period))
	if err != nil {
		return nil, err
	}
	defer f.close()
	c, err := f.planner()
	if err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	n := o.of(20_000, 100_000)
	begin := time.Now()
	if err := f.plan(ctx, c, "a", n, 64); err != nil {
		return nil, err
	}
	took := time.Since(begin)
	f.o.say("planned %d in %v", n, took.Round(time.Millisecond))
	time.Sleep(2 * time.Second)
	asked := time.Now()
	if err := f.plan(ctx, c, "b", 1, 1); err != nil {
		return nil, err
	}
	if err := f.awaitTenant(ctx, "b", 1); err != nil {
		return nil, err
	}
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
	return []figure{
		{Name: "planning " + strconv.Itoa(n) + " tasks", Value: took.Seconds(), Unit: "s", AtMost: new(30 * float64(n) / 100_000)},
		{Name: "the other's task after the next free unit", Value: started.Sub(free).Seconds(), Unit: "s", AtMost: new(1.)},
	}, nil
}

// waiting: what one reserve costs the server in a line of many, beside an empty one. Nobody
// works here; a limiter is asked directly.
func waiting(ctx context.Context, o lineOptions) ([]figure, error) {
	n := o.of(100_000, 1_000_000)
	if o.waiting > 0 {
		n = o.waiting
	}
	s, err := startServer(128)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	limiter, err := throttle.New(throttle.Config{Client: s.client, Policies: []throttle.Policy{{
		Name: "api", Match: []string{"*"}, Windows: []throttle.Window{{Name: "hour", Limit: 1, Period: time.Hour}},
	}}})
	if err != nil {
		return nil, err
	}
	limiter.OnLine(func(throttle.Line) {})
	const measured = 2000
	request := func(tenant, ticket string) throttle.Request {
		return throttle.Request{Policy: "api", Tenant: tenant, Ticket: ticket}
	}
	// reserves asks for tickets of tenants, and returns the server's time for one, in microseconds.
	reserves := func(n int, tenant func(i int) string, ticket func(i int) string) (float64, error) {
		cpu, err := s.reset(ctx)
		if err != nil {
			return 0, err
		}
		if err := inParallel(n, 64, func(i int) error {
			_, err := limiter.Reserve(ctx, request(tenant(i), ticket(i)))
			return err
		}); err != nil {
			return 0, err
		}
		u, err := s.usage(ctx, cpu)
		return u.server / float64(n), err
	}
	ticket := func(prefix string) func(int) string {
		return func(i int) string { return "default/" + prefix + "-" + strconv.Itoa(i) }
	}
	big := func(int) string { return "big" }
	if _, err := reserves(1, big, ticket("first")); err != nil { // granted: the window is full then
		return nil, err
	}
	before, err := s.memory(ctx)
	if err != nil {
		return nil, err
	}
	for from := 0; from < n; from += 50_000 {
		o.say("%d of %d wait", from, n)
		if _, err := reserves(min(50_000, n-from), big, ticket("waits-"+strconv.Itoa(from))); err != nil {
			return nil, err
		}
	}
	after, err := s.memory(ctx)
	if err != nil {
		return nil, err
	}
	var granted, empty, again, long, ratios []float64
	for round := range 3 {
		o.say("round %d of 3", round+1)
		name := func(kind string) func(int) string {
			return func(i int) string { return fmt.Sprint(kind, "-", round, "-", i) }
		}
		for _, m := range []struct {
			to     *[]float64
			tenant func(int) string
			ticket func(int) string
		}{
			{&granted, name("one"), name("default/grants")},
			{&empty, name("one"), name("default/joins")}, // each tenant's window is full, and nobody waits
			{&long, big, name("default/joins")},          // behind all
			{&again, big, ticket("waits-0")},             // comes though nobody called it
		} {
			time, err := reserves(measured, m.tenant, m.ticket)
			if err != nil {
				return nil, err
			}
			*m.to = append(*m.to, time)
		}
		ratios = append(ratios, long[round]/empty[round])
	}
	grant := quantile(granted, 0.5)
	return []figure{
		{Name: "joins " + strconv.Itoa(n) + " waiting / joins an empty line, server time", Value: quantile(ratios, 0.5), AtMost: new(2.5)},
		{Name: "joins " + strconv.Itoa(n) + " waiting / a grant without a line, server time", Value: quantile(long, 0.5) / grant},
		{Name: "joins an empty line / a grant without a line, server time", Value: quantile(empty, 0.5) / grant},
		{Name: "comes uncalled among them / a grant without a line, server time", Value: quantile(again, 0.5) / grant},
		{Name: "a grant without a line, server time", Value: grant, Unit: "us"},
		{Name: "memory of a waiting task", Value: float64(after-before) / float64(n), Unit: "bytes"},
	}, nil
}

// deleted: half of what waits is deleted behind the line's back.
func deleted(ctx context.Context, o lineOptions) ([]figure, error) {
	f, err := newFleet(o, shared("second", 20, time.Second))
	if err != nil {
		return nil, err
	}
	defer f.close()
	n := o.of(600, 1000)
	ids, err := f.enqueue("acme", n)
	if err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.awaitSeen(ctx, n); err != nil {
		return nil, err
	}
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
	if err := f.await(ctx, n-gone); err != nil {
		return nil, err
	}
	figures, err := f.drained(ctx, new(2.2), nil, new(0.9))
	return append(figures, figure{Name: "deleted", Value: float64(gone), Unit: "tasks"}), err
}

// stopped: all workers are away for a while.
func stopped(ctx context.Context, o lineOptions) ([]figure, error) {
	const limit, period = 200, time.Second
	f, err := newFleet(o, shared("second", limit, period))
	if err != nil {
		return nil, err
	}
	defer f.close()
	n := o.of(4000, 20_000)
	if _, err := f.enqueue("acme", n); err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.awaitSeen(ctx, n); err != nil {
		return nil, err
	}
	pause := time.Duration(o.of(5, 60)) * time.Second
	f.stop()
	left := n - len(f.grants())
	f.o.say("%d wait; stopped for %v", left, pause)
	time.Sleep(pause)
	if _, err := f.redis.reset(ctx); err != nil {
		return nil, err
	}
	back := time.Now()
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.await(ctx, n); err != nil {
		return nil, err
	}
	ran := f.grants()
	ideal := time.Duration(float64(left-limit) / limit * float64(period))
	figures, err := f.drained(ctx, new(2.2), nil, nil)
	return append(figures,
		figure{Name: "drained in, of the ideal", Value: ran[len(ran)-1].granted.Sub(back).Seconds() / ideal.Seconds(), AtMost: new(1.1)},
		figure{Name: "places that a task fell back, most", Value: float64(fellBack(ran, byCame)), AtMost: new(float64(limit))},
	), err
}

// fellBack is by how many tasks that came later a task was overtaken, at the most. Tasks that
// are called together run in any order, so it is not 0.
func fellBack(ran []*logged, order func(a, b *logged) int) int {
	came := slices.SortedFunc(slices.Values(ran), order)
	rank := make(map[*logged]int, len(came))
	for i, l := range came {
		rank[l] = i
	}
	worst := 0
	for i, l := range ran {
		worst = max(worst, i-rank[l])
	}
	return worst
}

func byCame(a, b *logged) int { return a.came.Compare(b.came) }

// byNumber is the order in which they were planned one after the other.
func byNumber(a, b *logged) int {
	return cmp.Or(cmp.Compare(len(a.id), len(b.id)), cmp.Compare(a.id, b.id))
}
