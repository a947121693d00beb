package main

import (
	"context"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// batchSize is the number of tasks in one EnqueueBatch here.
const batchSize = 500

// An enqueue enqueues tasks by one client, on several goroutines.
type enqueue func([]*asynq.Task) error

func plainly(ctx context.Context, c *asynq.Client) enqueue {
	return func(all []*asynq.Task) error {
		return inParallel(len(all), enqueuers, func(i int) error {
			_, err := c.EnqueueContext(ctx, all[i])
			return err
		})
	}
}

func oneByOne(ctx context.Context, c *worker.Client) enqueue {
	return func(all []*asynq.Task) error {
		return inParallel(len(all), enqueuers, func(i int) error {
			_, err := c.EnqueueContext(ctx, all[i])
			return err
		})
	}
}

func inBatches(ctx context.Context, c *worker.Client) enqueue {
	return func(all []*asynq.Task) error {
		return inParallel((len(all)+batchSize-1)/batchSize, enqueuers, func(i int) error {
			for _, e := range c.EnqueueBatch(ctx, all[i*batchSize:min((i+1)*batchSize, len(all))]) {
				if e.Err != nil {
					return e.Err
				}
			}
			return nil
		})
	}
}

// unbound returns a policy of two exact windows that never deny here.
func unbound() throttle.Policy {
	return throttle.Policy{Name: "api", Match: []string{"*"}, Windows: []throttle.Window{
		shared("shared", 1_000_000, time.Second),
		{Name: "tenant", Limit: 1_000_000, Period: time.Second},
	}}
}

// tasks returns n tasks, of so many tenants in turn.
func tasks(n, tenants int) []*asynq.Task {
	all := make([]*asynq.Task, n)
	for i := range all {
		all[i] = worker.NewTask(worker.Identity{Tenant: fmt.Sprint("tenant-", i%tenants)}, "call", nil)
	}
	return all
}

// engineEnqueue: our client against asynq's, one task a call.
func engineEnqueue(ctx context.Context, o scenarioOptions) ([]figure, error) {
	return compareEnqueue(ctx, o, o.of(6_000, 40_000), oneByOne, 0.30, 3.3)
}

// engineEnqueueBatch: our client with hundreds of tasks a call, against asynq's.
func engineEnqueueBatch(ctx context.Context, o scenarioOptions) ([]figure, error) {
	return compareEnqueue(ctx, o, turns*enqueuers*batchSize/o.of(8, 1), inBatches, 0.60, 2.0)
}

func compareEnqueue(ctx context.Context, o scenarioOptions, n int, by func(context.Context, *worker.Client) enqueue, throughput, cpu float64) ([]figure, error) {
	s, err := newSite(o)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.learnIdle(ctx, nil); err != nil {
		return nil, err
	}
	return medians(o.rounds, func(round int) (figures []figure, err error) {
		if err := s.clear(ctx); err != nil {
			return nil, err
		}
		return figures, s.withPlainClient(func(plain *asynq.Client) error {
			return s.withOurClient(unbound(), func(ours *worker.Client) error {
				sides := []func() (int, error){
					inSlices(plainly(ctx, plain), n),
					inSlices(by(ctx, ours), n),
				}
				for _, act := range sides { // makes connections and loads scripts
					if _, err := act(); err != nil {
						return err
					}
				}
				costs, err := s.inTurns(ctx, sides...)
				if err != nil {
					return err
				}
				o.say("round %d of %d: plain %v; ours %v", round+1, o.rounds, costs[0], costs[1])
				figures = []figure{
					{Name: "throughput, beside asynq's client", Value: costs[0].each / costs[1].each, AtLeast: &throughput},
					{Name: "Redis CPU a task, beside asynq's client", Value: costs[1].cpu / costs[0].cpu, AtMost: &cpu},
					{Name: "Redis CPU a task", Value: costs[1].cpu, Unit: "us"},
				}
				return nil
			})
		})
	})
}

// inSlices returns a side that enqueues so many tasks of ten tenants, in slices.
func inSlices(put enqueue, n int) func() (int, error) {
	return func() (int, error) {
		slice := tasks(n/turns, 10)
		return len(slice), put(slice)
	}
}
