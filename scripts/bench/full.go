package main

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// Windows that stay full have this period, and grant so many calls in it.
const (
	fullPeriod = 500 * time.Millisecond
	fullGrants = 1000
)

// caseFull: single calls to sliding windows that the calls keep full. Each window has a third of the time, in slices.
// All windows grant as many calls a second, so they differ only in size.
func caseFull(ctx context.Context, o scenarioOptions) []figure {
	s := newReserveTestbed(ctx, o, 1)
	limits := []int{20, 1_000, 100_000}
	sides, granted := s.fullWindows(ctx, limits)
	return medians(o.rounds, func(round int) []figure {
		s.clear(ctx)
		fillWindows(sides)
		clear(granted)
		costs := s.inTurns(ctx, sides...)
		o.say("round %d of %d: limits %v: %v, granted %v", round+1, o.rounds, limits, costs, granted)
		var all []figure
		for i, limit := range limits[1:] {
			name := fmt.Sprintf("full window of %d: Redis CPU a decision, beside one of 20", limit)
			all = append(all, figure{Name: name, Value: costs[i+1].cpu / costs[0].cpu, AtMost: new(1.3)})
		}
		return all
	})
}

// fullWindows returns sides that call windows of these limits one call after the other, without a
// pause, and how many calls each was granted. A call to a large window costs more units. Small
// windows are spread over several tenants.
func (s *reserveTestbed) fullWindows(ctx context.Context, limits []int) (sides []func() int, granted []int) {
	slice := time.Duration(s.o.size(50, 150)) * time.Millisecond
	granted = make([]int, len(limits))
	for i, limit := range limits {
		window := throttle.Window{Name: "full", Limit: int64(limit), Period: fullPeriod}
		reserve := ourReserve(s.askers, fmt.Sprint("full-", limit), window)
		tenants := max(1, fullGrants/limit)
		cost := limit * tenants / fullGrants
		next := 0
		sides = append(sides, func() (n int) {
			for end := time.Now().Add(slice); time.Now().Before(end); n++ {
				if reserve(ctx, "tenant-"+strconv.Itoa(next%tenants), cost) {
					granted[i]++
				}
				next++
			}
			return n
		})
	}
	return sides, granted
}

// fillWindows fills one window after the other: in the end the first windows have room again.
func fillWindows(sides []func() int) {
	for _, act := range sides {
		for begin := time.Now(); time.Since(begin) < fullPeriod; {
			act()
		}
	}
}

// caseSlots: handler slots bind, and no limit does. One tenant's backlog came first.
func caseSlots(ctx context.Context, o scenarioOptions) []figure {
	const others, each = 9, 100
	s := newTestbed(o)
	policy := unbound()
	c := crew{policy: &policy, slots: 32, work: 5 * time.Millisecond}
	return medians(o.rounds, func(int) []figure {
		var all []*asynq.Task
		for range o.size(2_000, 10_000) {
			all = append(all, worker.NewTask(worker.Identity{Tenant: "bulk"}, "call", nil))
		}
		all = append(all, tasks(others*each, others)...)
		ours := s.drainOurs(ctx, c, all)
		return []figure{
			{Name: "share error while all wait", Value: shareErrorOf(ours.starts, others+1), AtMost: new(0.05)},
			{Name: "wakes a task", Value: ours.wakes, AtMost: new(1.02)},
		}
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
