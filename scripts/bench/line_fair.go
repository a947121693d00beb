package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// weights: a first tenant has a backlog, a second comes later, and then two more.
func weights(ctx context.Context, o scenarioOptions) []figure {
	f := newFleetOf(o, throttle.Policy{
		Name: "api", Match: []string{"*"}, Windows: []throttle.Window{shared("second", 50, time.Second)},
		Tenants: map[string]throttle.Tenant{"a": {Weight: 1}, "b": {Weight: 1}, "c": {Weight: 1}, "d": {Weight: 2}},
	})
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
	f.redis.reset(ctx)
	f.start()
	all := 0
	for _, a := range arrivals {
		time.Sleep(a.pause)
		f.enqueue(a.tenant, a.n)
		all += a.n
	}
	f.await(ctx, all)
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
	figures := f.drained(ctx, new(wakesPlain), nil, new(0.98))
	return append(append(figures, f.reaction(10, 25)...),
		figure{Name: "share error", Value: f.shareError(from, to), AtMost: new(0.05)},
		figure{Name: "time in which all wait", Value: to.Sub(from).Seconds(), Unit: "s"},
	)
}

func tenants(ctx context.Context, o scenarioOptions) []figure {
	f := newFleet(o,
		throttle.Window{Name: "own", Limit: 5, Period: 3 * time.Second},
		shared("second", 50, time.Second))
	const of = 200
	each := o.of(5, 15)
	f.enqueueAcross(of, each)
	f.workOff(ctx, each*of)
	figures := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures, f.sharedUtilization(50, time.Second))
}

// lines: without a shared window no tenant waits for another.
func lines(ctx context.Context, o scenarioOptions) []figure {
	f := newFleet(o, throttle.Window{Name: "own", Limit: 1, Period: time.Second})
	const of = 300
	each := o.of(15, 60)
	f.enqueueAcross(of, each)
	f.workOff(ctx, each*of)
	figures := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures, f.reaction(12, 48)...)
}

// crossing: after a grant, another tenant's first ticket may wait for its region and not its own
// window.
func crossing(ctx context.Context, o scenarioOptions) []figure {
	const tenants, regions, limit, period = 40, 4, 5, 3 * time.Second
	f := newFleet(o,
		throttle.Window{Name: "own", Limit: limit, Period: period},
		throttle.Window{Name: "region", Limit: 20, Period: time.Second, Scope: throttle.Per("region")})
	each := o.of(20, 50)
	inParallel(tenants*each, 8, func(i int) {
		region := strconv.Itoa(i / 7 % regions)
		f.put(fmt.Sprint("crossing-", i), worker.Identity{
			Tenant: "tenant-" + strconv.Itoa(i%tenants), Attributes: map[string]string{"region": region},
		})
	})
	f.workOff(ctx, tenants*each)
	ran := f.grants()
	ideal := float64(each-limit) / limit * period.Seconds()
	figures := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures, figure{
		Name: "utilization of the tenants' windows", Value: ideal / took(ran),
	})
}

// slots: the limit allows more than the workers can run, so tasks wait for free slots.
func slots(ctx context.Context, o scenarioOptions) []figure {
	o.servers, o.slots = 2, 16
	f := newFleet(o, shared("second", 50, time.Second))
	f.work = time.Second
	f.redis.reset(ctx)
	c := f.planner()
	f.start()
	n := o.of(600, 2000)
	f.join(ctx, c, "acme", n, 1)
	f.await(ctx, n)
	ran := f.grants()
	ideal := float64(n-o.servers*o.slots) / float64(o.servers*o.slots) * f.work.Seconds()
	figures := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(figures,
		figure{Name: "utilization of the slots", Value: ideal / took(ran), AtLeast: new(0.98)},
		figure{Name: "places that a task fell back, most", Value: float64(fellBack(ran, byNumber)), AtMost: new(100.)},
	)
}

// enqueueAcross enqueues a backlog of as many tasks for each of so many tenants, in turn.
func (f *fleet) enqueueAcross(tenants, each int) {
	inParallel(tenants*each, 8, func(i int) {
		tenant := "tenant-" + strconv.Itoa(i%tenants)
		f.put(fmt.Sprint(tenant, "-", i/tenants), worker.Identity{Tenant: tenant})
	})
}

func (f *fleet) sharedUtilization(limit int, period time.Duration) figure {
	ran := f.grants()
	ideal := float64(len(ran)-limit) / float64(limit) * period.Seconds()
	return figure{Name: "utilization of the shared window", Value: ideal / took(ran)}
}

// bulk: nine tenants enqueue three tasks a second each, and one has a backlog.
func bulk(ctx context.Context, o scenarioOptions) []figure {
	f := newFleet(o, shared("second", 50, time.Second))
	n := o.of(500, 3000)
	f.enqueue("bulk", n)
	f.redis.reset(ctx)
	f.start()
	bulkEnds := make(chan struct{})
	var lives atomic.Int64
	var live sync.WaitGroup
	var failed error
	live.Go(func() {
		failed = guarded(func() {
			inParallel(9, 9, func(tenant int) {
				name := "live-" + strconv.Itoa(tenant)
				tick := time.NewTicker(time.Second / 3)
				defer tick.Stop()
				for i := 0; ; i++ {
					select {
					case <-bulkEnds:
						return
					case <-tick.C:
					}
					f.put(fmt.Sprint(name, "-", i), worker.Identity{Tenant: name})
					lives.Add(1)
				}
			})
		})
	})
	err := guarded(func() { f.awaitTenant(ctx, "bulk", n) })
	close(bulkEnds)
	live.Wait()
	check(errors.Join(err, failed))
	f.await(ctx, n+int(lives.Load()))
	var waits []time.Duration
	for _, l := range f.grants() {
		if l.tenant != "bulk" {
			waits = append(waits, l.granted.Sub(l.came))
		}
	}
	figures := f.drained(ctx, new(wakesPlain), nil, nil)
	return append(append(figures, f.reaction(10, 27)...),
		f.sharedUtilization(50, time.Second),
		figure{Name: "wait of a live task p50", Value: milliseconds(quantile(waits, 0.5)), Unit: "ms"},
		figure{Name: "wait of a live task p99", Value: milliseconds(quantile(waits, 0.99)), Unit: "ms"},
	)
}

// zipf: the backlog of tenant k is 1/k of the first one's. All come at once.
func zipf(ctx context.Context, o scenarioOptions) []figure {
	const limit, period = 50, time.Second
	f := newFleet(o, shared("second", limit, period))
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
	inParallel(len(ids), 8, func(i int) {
		tenant, _, _ := strings.Cut(ids[i], "/")
		f.put(ids[i], worker.Identity{Tenant: tenant})
	})
	f.workOff(ctx, len(ids))
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
	figures := f.drained(ctx, nil, nil, new(0.95))
	return append(append(figures, f.reaction(10, 25)...),
		figure{Name: "tenants later than fair + 10 % + 1 s", Value: float64(late), AtMost: new(0.)},
		figure{Name: "latest tenant, beyond that", Value: worst, Unit: "s"},
	)
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
