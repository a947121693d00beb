package main

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// engineReset: the rule by which a denied task comes back at the earliest reset.
func engineReset(ctx context.Context, o scenarioOptions) ([]figure, error) {
	policy := throttle.Policy{Name: "api", Match: []string{"*"}, Requeue: throttle.RequeueEarliestReset, Windows: []throttle.Window{
		shared("shared", 20, 2300*time.Millisecond), // resets are rarely on a whole second
	}}
	s, err := newSite(o)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	return medians(o.rounds, func(int) ([]figure, error) {
		var mu sync.Mutex
		resets := map[string]time.Time{} // as the last denial of a task said
		c := crew{policy: &policy, slots: 32, denied: func(id string, d throttle.Decision) {
			mu.Lock()
			defer mu.Unlock()
			resets[id] = d.At.Add(d.EarliestReset())
		}}
		ours, err := s.drainOurs(ctx, c, tasks(o.of(60, 200), 10))
		if err != nil {
			return nil, err
		}
		var late []time.Duration
		for _, s := range ours.starts {
			if reset, denied := resets[s.id]; denied {
				late = append(late, s.at.Sub(reset))
			}
		}
		return []figure{
			{Name: "reset to start p99", Value: quantile(late, 0.99).Seconds(), Unit: "s", AtMost: new(1.2)},
			{Name: "reset to start p50", Value: quantile(late, 0.5).Seconds(), Unit: "s"},
			{Name: "reset to start, earliest", Value: quantile(late, 0).Seconds(), Unit: "s", AtLeast: new(0.)},
			{Name: "wakes a task", Value: ours.wakes},
		}, nil
	})
}
