package main

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// twentyPerSecond is the policy of servers that have little to do.
func twentyPerSecond() throttle.Policy {
	return policyOf(shared("second", 20, time.Second))
}

// caseIdleSystem: one task now and then that fits at once, at default settings.
func caseIdleSystem(ctx context.Context, o scenarioOptions) []figure {
	s := newTestbed(o)
	return medians(o.rounds, func(int) []figure {
		s.clear(ctx)
		n := o.size(15, 60)
		enqueued := make(map[string]time.Time, n)
		j := newStartLog(n)
		policy := twentyPerSecond()
		var shift shift
		defer shift.end()
		shift.start(crew{policy: &policy, slots: 32}, s.addr(), j)
		s.withOurClient(policy, func(c *worker.Client) {
			for range n {
				// Long enough for all servers to be idle, and in step with no timer.
				time.Sleep(300*time.Millisecond + rand.N(500*time.Millisecond))
				at := time.Now()
				info := must(c.EnqueueContext(ctx, worker.NewTask(worker.Identity{Tenant: "acme"}, "call", nil)))
				enqueued[info.ID] = at
			}
			j.await(ctx, o.say)
		})
		var took []time.Duration
		for _, s := range j.starts() {
			took = append(took, s.at.Sub(enqueued[s.id]))
		}
		return []figure{
			{Name: "enqueue to start p50", Value: milliseconds(quantile(took, 0.5)), Unit: "ms", AtMost: new(5.)},
			{Name: "enqueue to start, longest", Value: milliseconds(quantile(took, 1)), Unit: "ms"},
		}
	})
}

// caseIdleServer: the commands of a server that had a task and has none, against plain asynq's.
// Both run at the same time, each on a Redis of its own.
func caseIdleServer(ctx context.Context, o scenarioOptions) []figure {
	const settle = 7 * time.Second // until the last commands for the task have ended
	watch := time.Duration(o.size(15, 60)) * time.Second
	policy := twentyPerSecond()
	crews := []crew{{}, {policy: &policy}} // nothing set at all
	testbeds := make([]*testbed, len(crews))
	for i, c := range crews {
		s := newTestbed(o)
		testbeds[i] = s
		j := newStartLog(1)
		var shift shift
		o.cleanup(shift.end)
		shift.start(c, s.addr(), j)
		s.withPlainClient(func(client *asynq.Client) { oneByOne(ctx, client, tasks(1, 1)) })
		j.await(ctx, o.say)
	}
	time.Sleep(settle)
	return medians(o.rounds, func(round int) []figure {
		var each [2]float64
		inParallel(2, 2, func(i int) { each[i] = testbeds[i].commandsASecond(ctx, watch) })
		o.say("round %d of %d: plain %.1f commands a second, ours %.1f", round+1, o.rounds, each[0], each[1])
		return []figure{
			{Name: "Redis commands a second, beside plain asynq's", Value: each[1] / each[0], AtMost: new(1.5)},
			{Name: "Redis commands a second", Value: each[1]},
			{Name: "Redis commands a second, plain asynq", Value: each[0]},
		}
	})
}

// commandsASecond counts commands inside scripts, too, but not our own.
func (s *testbed) commandsASecond(ctx context.Context, watch time.Duration) float64 {
	begin := time.Now()
	check(s.control.ConfigResetStat(ctx).Err())
	select {
	case <-time.After(watch):
	case <-ctx.Done():
		check(ctx.Err())
	}
	return s.calls(ctx, "config", "info") / time.Since(begin).Seconds()
}
