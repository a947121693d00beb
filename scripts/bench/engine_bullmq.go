package main

import (
	"context"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
)

// engineBullMQ: another queue, whose limiter has one fixed window a queue, against plain asynq. It
// has no bars: its figures are for comparison with ours against plain asynq.
func engineBullMQ(ctx context.Context, o scenarioOptions) ([]figure, error) {
	b, missing := installBullMQ(ctx)
	if missing != nil {
		o.say("left out: %v", missing)
		return nil, nil
	}
	defer b.remove()
	c := crew{slots: 32}
	s, err := newSite(o)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.learnIdle(ctx, &c); err != nil {
		return nil, err
	}
	return medians(o.rounds, func(round int) ([]figure, error) {
		o.say("round %d of %d", round+1, o.rounds)
		enqueued, err := s.bullMQEnqueue(ctx, b, o.of(4_000, 20_000))
		if err != nil {
			return nil, err
		}
		unbound, err := s.bullMQRun(ctx, b, c, o.of(4_000, 20_000), rate{1_000_000, time.Second})
		if err != nil {
			return nil, err
		}
		figures := append(enqueued, unbound...)
		for _, limit := range []int{500, 2000} {
			bound, err := s.bullMQRun(ctx, b, c, limit*(1+o.of(3, 20)), rate{limit, time.Second})
			if err != nil {
				return nil, err
			}
			figures = append(figures, bound...)
		}
		return figures, nil
	})
}

func (s *site) bullMQEnqueue(ctx context.Context, b *bullMQ, n int) ([]figure, error) {
	if err := s.clear(ctx); err != nil {
		return nil, err
	}
	var plain cost
	if err := s.withPlainClient(func(client *asynq.Client) error {
		costs, err := s.inTurns(ctx, inSlices(plainly(ctx, client), n))
		if err == nil {
			plain = costs[0]
		}
		return err
	}); err != nil {
		return nil, err
	}
	one, _, err := b.process(ctx, s, n, "add", enqueuers)
	if err != nil {
		return nil, err
	}
	bulk, _, err := b.process(ctx, s, n, "bulk", batchSize)
	if err != nil {
		return nil, err
	}
	s.o.say("enqueue: plain %v; BullMQ %v, in bulk %v", plain, one, bulk)
	return []figure{
		{Name: "enqueue one by one: throughput, beside asynq's client", Value: plain.each / one.each},
		{Name: "enqueue one by one: Redis CPU a task, beside asynq's client", Value: one.cpu / plain.cpu},
		{Name: "enqueue in bulk: throughput, beside asynq's client", Value: plain.each / bulk.each},
		{Name: "enqueue in bulk: Redis CPU a task, beside asynq's client", Value: bulk.cpu / plain.cpu},
	}, nil
}

// bullMQRun has plain asynq and then BullMQ run as many tasks, BullMQ at a limit.
func (s *site) bullMQRun(ctx context.Context, b *bullMQ, c crew, n int, r rate) ([]figure, error) {
	plain, err := s.drainPlain(ctx, c, tasks(n, 10))
	if err != nil {
		return nil, err
	}
	if err := s.clear(ctx); err != nil {
		return nil, err
	}
	if _, _, err := b.process(ctx, s, n, "bulk", batchSize); err != nil {
		return nil, err
	}
	cost, starts, err := b.process(ctx, s, n, "run", c.slots, r.limit, r.period.Milliseconds())
	if err != nil {
		return nil, err
	}
	binds := n > r.limit
	name := "a limit that never binds"
	if binds {
		name = fmt.Sprintf("%d per second", r.limit)
	}
	s.o.say("%s: plain %v; BullMQ %.0f/s, %.1f us of Redis a task", name, plain, perSecond(starts), cost.cpu)
	figures := []figure{{Name: name + ": Redis CPU a task, beside plain asynq's", Value: cost.cpu / plain.cpu}}
	if binds {
		return append(figures, figure{Name: name + ": utilization", Value: r.utilization(starts)}), nil
	}
	return append(figures, figure{Name: name + ": throughput, beside plain asynq", Value: perSecond(starts) / perSecond(plain.starts)}), nil
}
