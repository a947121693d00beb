package main

import (
	"context"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// bulkSize is the number of tasks in one EnqueueBulk here.
const bulkSize = 500

// A client is asynq's, or ours.
type client interface {
	EnqueueContext(context.Context, *asynq.Task, ...asynq.Option) (*asynq.TaskInfo, error)
}

// oneByOne enqueues tasks by one client, on several goroutines.
func oneByOne[C client](ctx context.Context, c C, all []*asynq.Task) {
	inParallel(len(all), enqueuers, func(i int) { must(c.EnqueueContext(ctx, all[i])) })
}

// inBulk is oneByOne with hundreds of tasks a call.
func inBulk(ctx context.Context, c *worker.Client, all []*asynq.Task) {
	inParallel((len(all)+bulkSize-1)/bulkSize, enqueuers, func(i int) {
		for _, e := range c.EnqueueBulk(ctx, all[i*bulkSize:min((i+1)*bulkSize, len(all))]) {
			check(e.Err)
		}
	})
}

// shared returns a window that all tenants share.
func shared(name string, limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: name, Limit: limit, Period: period, Shared: true}
}

// policyOf returns the policy of all tasks.
func policyOf(windows ...throttle.Window) throttle.Policy {
	return throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows}
}

// unbound returns a policy of two exact windows that never deny here.
func unbound() throttle.Policy {
	return policyOf(
		shared("shared", 1_000_000, time.Second),
		throttle.Window{Name: "tenant", Limit: 1_000_000, Period: time.Second})
}

// tasks returns n tasks, of so many tenants in turn.
func tasks(n, tenants int, opts ...asynq.Option) []*asynq.Task {
	all := make([]*asynq.Task, n)
	for i := range all {
		all[i] = worker.NewTask(worker.Identity{Tenant: fmt.Sprint("tenant-", i%tenants)}, "call", nil, opts...)
	}
	return all
}

// caseEnqueue: our client against asynq's, one task a call.
func caseEnqueue(ctx context.Context, o scenarioOptions) []figure {
	return compareEnqueue(ctx, o, o.size(6_000, 40_000), oneByOne[*worker.Client], 0.30, 3.3)
}

// caseEnqueueBulk: our client with hundreds of tasks a call, against asynq's.
func caseEnqueueBulk(ctx context.Context, o scenarioOptions) []figure {
	return compareEnqueue(ctx, o, turns*enqueuers*bulkSize/o.size(8, 1), inBulk, 0.60, 2.0)
}

// compareEnqueue compares put, by our client, with asynq's client, which enqueues one task a call.
func compareEnqueue(
	ctx context.Context, o scenarioOptions, n int,
	put func(context.Context, *worker.Client, []*asynq.Task), throughput, cpu float64,
) []figure {
	s := newTestbed(o)
	s.learnIdle(ctx, nil)
	return medians(o.rounds, func(round int) []figure {
		var costs []cost
		s.clear(ctx)
		s.withPlainClient(func(plain *asynq.Client) {
			s.withOurClient(unbound(), func(ours *worker.Client) {
				sides := []func() int{
					inSlices(n, func(slice []*asynq.Task) { oneByOne(ctx, plain, slice) }),
					inSlices(n, func(slice []*asynq.Task) { put(ctx, ours, slice) }),
				}
				for _, act := range sides { // makes connections and loads scripts
					act()
				}
				costs = s.inTurns(ctx, sides...)
			})
		})
		plain, ours := costs[0], costs[1]
		o.say("round %d of %d: plain %v; ours %v", round+1, o.rounds, plain, ours)
		return []figure{
			{Name: "throughput, beside asynq's client", Value: plain.each / ours.each, AtLeast: &throughput},
			{Name: "Redis CPU a task, beside asynq's client", Value: ours.cpu / plain.cpu, AtMost: &cpu},
			{Name: "Redis CPU a task", Value: ours.cpu, Unit: "us"},
		}
	})
}

// inSlices returns a side that enqueues so many tasks of ten tenants, in slices.
func inSlices(n int, put func([]*asynq.Task)) func() int {
	return func() int {
		slice := tasks(n/turns, 10)
		put(slice)
		return len(slice)
	}
}
