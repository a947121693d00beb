package main

import (
	"context"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// atOnce: a slot of a concurrency window that is given back is used again at once.
func atOnce(ctx context.Context, o scenarioOptions) ([]figure, error) {
	o.servers, o.slots = 2, 16
	const limit = 8
	f, err := newFleet(o, throttle.Window{Name: "at-once", Algorithm: throttle.Concurrency, Limit: limit, Scope: throttle.Shared})
	if err != nil {
		return nil, err
	}
	defer f.close()
	f.work = 200 * time.Millisecond
	n := o.of(200, 2000)
	if _, err := f.enqueue("acme", n); err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.await(ctx, n); err != nil {
		return nil, err
	}
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
	}, nil
}
