package main

import (
	"context"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// caseRun: the cost of throttling that denies nothing. Each round runs the same backlog three
// times: by plain asynq, by our server with tasks of our client, and by our server with tasks of
// asynq's client.
func caseRun(
	n, tenants, slots int, work time.Duration, throughput float64, opts ...asynq.Option,
) runFunc {
	return func(ctx context.Context, o scenarioOptions) []figure {
		policy := unbound()
		c := crew{policy: &policy, slots: slots, work: work}
		s, take := newDrainTestbed(ctx, o, c)
		n := o.size(n/10, n)
		return medians(o.rounds, func(round int) []figure {
			plain := s.drainPlain(ctx, c.plain(), tasks(n, tenants, opts...))
			ours := s.drainOurs(ctx, c, tasks(n, tenants, opts...))
			theirs := s.drainPlain(ctx, c, tasks(n, tenants, opts...))
			o.say("round %d of %d: plain %v; ours %v; ours with a plain client's tasks %v",
				round+1, o.rounds, plain, ours, theirs)
			figures := append(
				ratios(plain, ours, "our client's tasks", throughput),
				ratios(plain, theirs, "a plain client's tasks", throughput)...)
			return append(figures, takenFigures(ours, take, false)...)
		})
	}
}

// caseRate: a backlog at a shared window and a window for each tenant. Its cost is compared with
// plain asynq, which runs the same backlog as fast as it can, and then at the rate of our limit: a
// server that is often idle pays more for a task.
func caseRate(limit int, utilization float64, barred bool) runFunc {
	return func(ctx context.Context, o scenarioOptions) []figure {
		const tenants = 10
		r := rate{limit, time.Second}
		policy := policyOf(
			shared("shared", int64(limit), r.period),
			throttle.Window{Name: "tenant", Limit: int64(2 * limit / tenants), Period: r.period}) // twice a fair share
		c := crew{policy: &policy, slots: 32}
		s, take := newDrainTestbed(ctx, o, c)
		n := limit * (1 + o.size(3, 20))
		return medians(o.rounds, func(round int) []figure {
			paced := c.plain()
			paced.work = time.Second * time.Duration(c.slots) / time.Duration(limit)
			plain := s.drainPlain(ctx, c.plain(), tasks(n, tenants))
			pacedPlain := s.drainPlain(ctx, paced, tasks(n, tenants))
			ours := s.drainOurs(ctx, c, tasks(n, tenants))
			o.say("round %d of %d: plain %v, at the same rate %v; ours %v", round+1, o.rounds, plain, pacedPlain, ours)
			cpu := figure{Name: "Redis CPU a task, beside plain asynq's", Value: ours.cpu / pacedPlain.cpu}
			if barred {
				cpu.AtMost = new(1.4)
			}
			figures := []figure{
				cpu,
				{Name: "the same, beside plain asynq as fast as it can", Value: ours.cpu / plain.cpu},
				{Name: "Redis CPU a task", Value: ours.cpu, Unit: "us"},
				{Name: "utilization", Value: r.utilization(ours.starts), AtLeast: &utilization},
				{Name: "excess", Value: float64(r.excess(ours.starts)), Unit: "units", AtMost: new(0.)},
				{Name: "wakes a task", Value: ours.wakes, AtMost: new(1.02)},
			}
			return append(figures, takenFigures(ours, take, barred)...)
		})
	}
}

// caseQueues: a backlog at 2,000 per second in three queues, 6:3:1, in turn with one in a single queue.
func caseQueues(ctx context.Context, o scenarioOptions) []figure {
	policy := policyOf(shared("shared", 2000, time.Second), throttle.Window{Name: "tenant", Limit: 400, Period: time.Second})
	c := crew{policy: &policy, slots: 32}
	s, _ := newDrainTestbed(ctx, o, c)
	n := 2000 * o.size(4, 21)
	return medians(o.rounds, func(int) []figure {
		var cpu [2]float64
		for i, queues := range []map[string]int{{"default": 10}, {"critical": 6, "default": 3, "low": 1}} {
			var all []*asynq.Task
			for queue, priority := range queues {
				for j := range n * priority / 10 {
					id := worker.Identity{Tenant: fmt.Sprint("tenant-", j%10)}
					all = append(all, worker.NewTask(id, "call", nil, asynq.Queue(queue)))
				}
			}
			c.queues = queues
			cpu[i] = s.drainOurs(ctx, c, all).cpu
		}
		o.say("one queue: %.1f us of Redis a task; three: %.1f", cpu[0], cpu[1])
		return []figure{{Name: "Redis CPU a task, beside one queue's", Value: cpu[1] / cpu[0], AtMost: new(1.5)}}
	})
}

// caseDefaults: a backlog of our client at a window. Only the concurrency is set.
func caseDefaults(r rate, short, full int, utilization float64, react bool) runFunc {
	return func(ctx context.Context, o scenarioOptions) []figure {
		policy := policyOf(shared("shared", int64(r.limit), r.period))
		s := newTestbed(o)
		return medians(o.rounds, func(int) []figure {
			ours := s.drainOurs(ctx, crew{policy: &policy, slots: 32}, tasks(o.size(short, full), 10))
			wakes := figure{Name: "wakes a task", Value: ours.wakes}
			figures := []figure{
				{Name: "utilization", Value: r.utilization(ours.starts), AtLeast: &utilization},
				{Name: "excess", Value: float64(r.excess(ours.starts)), Unit: "units", AtMost: new(0.)},
			}
			_, running := r.fits(ours.starts)
			p50 := figure{Name: "fits to running p50", Value: milliseconds(quantile(running, 0.5)), Unit: "ms"}
			p99 := figure{Name: "fits to running p99", Value: milliseconds(quantile(running, 0.99)), Unit: "ms"}
			if react {
				wakes.AtMost, p50.AtMost, p99.AtMost = new(1.02), new(5.), new(25.)
			}
			return append(figures, wakes, p50, p99)
		})
	}
}

// newDrainTestbed returns a testbed that knows the idle cost of the crew, and the script that takes.
func newDrainTestbed(ctx context.Context, o scenarioOptions, c crew) (s *testbed, take string) {
	s = newTestbed(o)
	take = takeScript(ctx, s.addr())
	s.learnIdle(ctx, &c)
	return s, take
}

// drainPlain has a crew run tasks that asynq's client enqueued.
func (s *testbed) drainPlain(ctx context.Context, c crew, all []*asynq.Task) *drainRun {
	s.clear(ctx)
	s.withPlainClient(func(client *asynq.Client) { oneByOne(ctx, client, all) })
	return s.drain(ctx, c, len(all))
}

// drainOurs has a crew run tasks that our client enqueued.
func (s *testbed) drainOurs(ctx context.Context, c crew, all []*asynq.Task) *drainRun {
	s.clear(ctx)
	s.withOurClient(*c.policy, func(client *worker.Client) { inBulk(ctx, client, all) })
	return s.drain(ctx, c, len(all))
}

func (d *drainRun) String() string {
	return fmt.Sprintf("%.0f/s, %.1f us of Redis a task", perSecond(d.starts), d.cpu)
}

// ratios returns the figures of a run, as ratios to plain asynq's run of the same tasks.
func ratios(plain, ours *drainRun, whose string, throughput float64) []figure {
	ratio := perSecond(ours.starts) / perSecond(plain.starts)
	return []figure{
		{Name: whose + ": throughput, beside plain asynq", Value: ratio, AtLeast: &throughput},
		{Name: whose + ": Redis CPU a task, beside plain asynq's", Value: ours.cpu / plain.cpu, AtMost: new(2.)},
		{Name: whose + ": Redis CPU a task", Value: ours.cpu, Unit: "us"},
	}
}

// takenFigures returns how long tasks took from their take to their handlers.
func takenFigures(d *drainRun, take string, barred bool) []figure {
	taken := d.takenToStart(take)
	p50 := figure{Name: "taken to start p50", Value: milliseconds(quantile(taken, 0.5)), Unit: "ms"}
	p99 := figure{Name: "taken to start p99", Value: milliseconds(quantile(taken, 0.99)), Unit: "ms"}
	if barred {
		p50.AtMost, p99.AtMost = new(3.), new(15.)
	}
	return []figure{p50, p99}
}
