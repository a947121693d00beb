package main

import (
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

// weights: a first tenant has a backlog, a second comes later, and then two more.
func weights(ctx context.Context, o scenarioOptions) ([]figure, error) {
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
	// All tenants wait from the first period after the last one came until one has no tasks left.
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
	figures, err := f.drained(ctx, new(wakesPlain), nil, new(0.98))
	return append(append(figures, f.reaction(10, 25)...),
		figure{Name: "share error", Value: f.shareError(from, to), AtMost: new(0.05)},
		figure{Name: "time in which all wait", Value: to.Sub(from).Seconds(), Unit: "s"},
	), err
}

func tenants(ctx context.Context, o scenarioOptions) ([]figure, error) {
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
	figures, err := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures, f.sharedUtilization(50, time.Second)), err
}

// lines: without a shared window no tenant waits for another.
func lines(ctx context.Context, o scenarioOptions) ([]figure, error) {
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
	figures, err := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures, f.reaction(12, 48)...), err
}

// crossing: after a grant, another tenant's first ticket may wait for its region and not its own
// window.
func crossing(ctx context.Context, o scenarioOptions) ([]figure, error) {
	const tenants, regions, limit, period = 40, 4, 5, 3 * time.Second
	f, err := newFleet(o,
		throttle.Window{Name: "own", Limit: limit, Period: period},
		throttle.Window{Name: "region", Limit: 20, Period: time.Second, Scope: throttle.Per("region")})
	if err != nil {
		return nil, err
	}
	defer f.close()
	each := o.of(20, 50)
	if err := inParallel(tenants*each, 8, func(i int) error {
		id := worker.Identity{Tenant: "tenant-" + strconv.Itoa(i%tenants), Attributes: map[string]string{"region": strconv.Itoa(i / 7 % regions)}}
		_, err := f.plain.Enqueue(worker.NewTask(id, "call", nil), asynq.TaskID(fmt.Sprint("crossing-", i)))
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
	if err := f.await(ctx, tenants*each); err != nil {
		return nil, err
	}
	ran := f.grants()
	ideal := float64(each-limit) / limit * period.Seconds()
	figures, err := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures, figure{
		Name: "utilization of the tenants' windows", Value: ideal / ran[len(ran)-1].granted.Sub(ran[0].granted).Seconds(),
	}), err
}

// slots: the limit allows more than the workers can run, so tasks wait for free slots.
func slots(ctx context.Context, o scenarioOptions) ([]figure, error) {
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
	if err := f.join(ctx, c, "acme", n, 1); err != nil {
		return nil, err
	}
	if err := f.await(ctx, n); err != nil {
		return nil, err
	}
	ran := f.grants()
	ideal := float64(n-o.servers*o.slots) / float64(o.servers*o.slots) * f.work.Seconds()
	figures, err := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures,
		figure{Name: "utilization of the slots", Value: ideal / ran[n-1].granted.Sub(ran[0].granted).Seconds(), AtLeast: new(0.98)},
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

// bulk: nine tenants enqueue three tasks a second each, and one has a backlog.
func bulk(ctx context.Context, o scenarioOptions) ([]figure, error) {
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
	figures, err := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(append(figures, f.reaction(10, 27)...),
		f.sharedUtilization(50, time.Second),
		figure{Name: "wait of a live task p50", Value: milliseconds(quantile(waits, 0.5)), Unit: "ms"},
		figure{Name: "wait of a live task p99", Value: milliseconds(quantile(waits, 0.99)), Unit: "ms"},
	), err
}

// zipf: the backlog of tenant k is 1/k of the first one's. All come at once.
func zipf(ctx context.Context, o scenarioOptions) ([]figure, error) {
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
	return append(append(figures, f.reaction(10, 25)...),
		figure{Name: "tenants later than fair + 10 % + 1 s", Value: float64(late), AtMost: new(0.)},
		figure{Name: "latest tenant, beyond that", Value: worst, Unit: "s"},
	), err
}

// fairFinish returns when each tenant's backlog ends if all tenants that have one share the rate
// equally at every moment. Start-time fair queueing approximates this. The first limit units go at
// once.
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
