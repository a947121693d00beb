package main

import (
	"context"
	"math"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
)

// engineSlots: handler slots bind, and no limit does. One tenant's backlog came first.
func engineSlots(ctx context.Context, o scenarioOptions) ([]figure, error) {
	const others, each = 9, 100
	s, err := newSite(o)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	policy := unbound()
	c := crew{policy: &policy, slots: 32, work: 5 * time.Millisecond}
	return medians(o.rounds, func(int) ([]figure, error) {
		var all []*asynq.Task
		for range o.of(2_000, 10_000) {
			all = append(all, worker.NewTask(worker.Identity{Tenant: "bulk"}, "call", nil))
		}
		all = append(all, tasks(others*each, others)...)
		ours, err := s.drainOurs(ctx, c, all)
		if err != nil {
			return nil, err
		}
		return []figure{
			{Name: "share error while all wait", Value: shareErrorOf(ours.starts, others+1), AtMost: new(0.05)},
			{Name: "wakes a task", Value: ours.wakes, AtMost: new(1.02)},
		}, nil
	})
}

// shareErrorOf returns the largest difference between a tenant's part of the starts and an equal
// part, until the first tenant's tasks have all started.
func shareErrorOf(starts []start, tenants int) float64 {
	left, ran := map[string]int{}, map[string]float64{}
	for _, s := range starts {
		left[s.tenant]++
	}
	worst, sum := 0., 0.
	for _, s := range starts {
		sum++
		ran[s.tenant]++
		if left[s.tenant]--; left[s.tenant] == 0 {
			break
		}
	}
	for tenant := range left {
		worst = max(worst, math.Abs(ran[tenant]/sum*float64(tenants)-1))
	}
	return worst
}
