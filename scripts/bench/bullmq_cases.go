package main

import (
	"context"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
)

// caseBullMQ: another queue, whose limiter has one fixed window a queue, against plain asynq. It
// has no bars: its figures are for comparison with ours against plain asynq.
func caseBullMQ(ctx context.Context, o scenarioOptions) []figure {
	b, missing := installBullMQ(ctx, o)
	if missing != nil {
		o.say("left out: %v", missing)
		return nil
	}
	c := crew{slots: 32}
	s := newSite(o)
	s.learnIdle(ctx, &c)
	return medians(o.rounds, func(round int) []figure {
		o.say("round %d of %d", round+1, o.rounds)
		enqueued := s.bullMQEnqueue(ctx, b, o.of(4_000, 20_000))
		unbound := s.bullMQRun(ctx, b, c, o.of(4_000, 20_000), rate{1_000_000, time.Second})
		figures := append(enqueued, unbound...)
		for _, limit := range []int{500, 2000} {
			bound := s.bullMQRun(ctx, b, c, limit*(1+o.of(3, 20)), rate{limit, time.Second})
			figures = append(figures, bound...)
		}
		return figures
	})
}

func (s *site) bullMQEnqueue(ctx context.Context, b *bullMQ, n int) []figure {
	s.clear(ctx)
	var plain cost
	s.withPlainClient(func(client *asynq.Client) {
		plain = s.inTurns(ctx, inSlices(n, func(slice []*asynq.Task) { oneByOne(ctx, client, slice) }))[0]
	})
	one, _ := b.process(ctx, s, n, "add", enqueuers)
	bulk, _ := b.process(ctx, s, n, "bulk", batchSize)
	s.o.say("enqueue: plain %v; BullMQ %v, in bulk %v", plain, one, bulk)
	return []figure{
		{Name: "enqueue one by one: throughput, beside asynq's client", Value: plain.each / one.each},
		{Name: "enqueue one by one: Redis CPU a task, beside asynq's client", Value: one.cpu / plain.cpu},
		{Name: "enqueue in bulk: throughput, beside asynq's client", Value: plain.each / bulk.each},
		{Name: "enqueue in bulk: Redis CPU a task, beside asynq's client", Value: bulk.cpu / plain.cpu},
	}
}

// bullMQRun has plain asynq and then BullMQ run as many tasks, BullMQ at a limit.
func (s *site) bullMQRun(ctx context.Context, b *bullMQ, c crew, n int, r rate) []figure {
	plain := s.drainPlain(ctx, c, tasks(n, 10))
	s.clear(ctx)
	b.process(ctx, s, n, "bulk", batchSize)
	cost, starts := b.process(ctx, s, n, "run", c.slots, r.limit, r.period.Milliseconds())
	binds := n > r.limit
	name := "a limit that never binds"
	if binds {
		name = fmt.Sprintf("%d per second", r.limit)
	}
	s.o.say("%s: plain %v; BullMQ %.0f/s, %.1f us of Redis a task", name, plain, perSecond(starts), cost.cpu)
	figures := []figure{{Name: name + ": Redis CPU a task, beside plain asynq's", Value: cost.cpu / plain.cpu}}
	if binds {
		return append(figures, figure{Name: name + ": utilization", Value: r.utilization(starts)})
	}
	throughput := perSecond(starts) / perSecond(plain.starts)
	return append(figures, figure{Name: name + ": throughput, beside plain asynq", Value: throughput})
}
