package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// twenty is the policy of servers that have little to do.
func twenty() throttle.Policy {
	return throttle.Policy{Name: "api", Match: []string{"*"}, Windows: []throttle.Window{shared("second", 20, time.Second)}}
}

// engineIdleSystem: one task now and then that fits at once, at default settings.
func engineIdleSystem(ctx context.Context, o scenarioOptions) ([]figure, error) {
	s, err := newSite(o)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	return medians(o.rounds, func(int) ([]figure, error) {
		if err := s.clear(ctx); err != nil {
			return nil, err
		}
		n := o.of(15, 60)
		enqueued := make(map[string]time.Time, n)
		j := newJournal(n)
		policy := twenty()
		shift, err := crew{policy: &policy, slots: 32}.start(s.addr(), j)
		if err != nil {
			return nil, err
		}
		defer shift.end()
		if err := s.withOurClient(policy, func(c *worker.Client) error {
			for range n {
				// Long enough for all servers to be idle, and in step with no timer.
				time.Sleep(300*time.Millisecond + rand.N(500*time.Millisecond))
				at := time.Now()
				info, err := c.EnqueueContext(ctx, worker.NewTask(worker.Identity{Tenant: "acme"}, "call", nil))
				if err != nil {
					return err
				}
				enqueued[info.ID] = at
			}
			return j.await(ctx, o.say)
		}); err != nil {
			return nil, err
		}
		var took []time.Duration
		for _, s := range j.starts() {
			took = append(took, s.at.Sub(enqueued[s.id]))
		}
		return []figure{
			{Name: "enqueue to start p50", Value: milliseconds(quantile(took, 0.5)), Unit: "ms", AtMost: new(5.)},
			{Name: "enqueue to start, longest", Value: milliseconds(quantile(took, 1)), Unit: "ms"},
		}, nil
	})
}

// engineIdleServer: the commands of a server that had a task and has none, against plain asynq's.
// Both run at the same time, each on a Redis of its own.
func engineIdleServer(ctx context.Context, o scenarioOptions) ([]figure, error) {
	const settle = 7 * time.Second // until all that the task has left behind is over
	watch := time.Duration(o.of(15, 60)) * time.Second
	policy := twenty()
	crews := []crew{{}, {policy: &policy}} // nothing set at all
	sites := make([]*site, len(crews))
	for i, c := range crews {
		s, err := newSite(o)
		if err != nil {
			return nil, err
		}
		defer s.stop()
		sites[i] = s
		j := newJournal(1)
		shift, err := c.start(s.addr(), j)
		if err != nil {
			return nil, err
		}
		defer shift.end()
		if err := s.withPlainClient(func(client *asynq.Client) error { return plainly(ctx, client)(tasks(1, 1)) }); err != nil {
			return nil, err
		}
		if err := j.await(ctx, o.say); err != nil {
			return nil, err
		}
	}
	time.Sleep(settle)
	return medians(o.rounds, func(round int) ([]figure, error) {
		var each [2]float64
		var errs [2]error
		var both sync.WaitGroup
		for i, s := range sites {
			both.Go(func() { each[i], errs[i] = s.commands(ctx, watch) })
		}
		both.Wait()
		for _, err := range errs {
			if err != nil {
				return nil, err
			}
		}
		o.say("round %d of %d: plain %.1f commands a second, ours %.1f", round+1, o.rounds, each[0], each[1])
		return []figure{
			{Name: "Redis commands a second, beside plain asynq's", Value: each[1] / each[0], AtMost: new(1.5)},
			{Name: "Redis commands a second", Value: each[1]},
			{Name: "Redis commands a second, plain asynq", Value: each[0]},
		}, nil
	})
}

// commands returns how many commands Redis processes a second, with those inside scripts, without
// our own.
func (s *site) commands(ctx context.Context, watch time.Duration) (float64, error) {
	begin := time.Now()
	if err := s.control.ConfigResetStat(ctx).Err(); err != nil {
		return 0, err
	}
	select {
	case <-time.After(watch):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	stats, err := s.info(ctx, "commandstats")
	if err != nil {
		return 0, err
	}
	sum := int64(0)
	for command, line := range stats {
		if strings.HasPrefix(command, "cmdstat_config") || command == "cmdstat_info" {
			continue
		}
		var calls int64
		if _, err := fmt.Sscanf(line, "calls=%d", &calls); err != nil {
			return 0, fmt.Errorf("INFO commandstats: %s: %q: %w", command, line, err)
		}
		sum += calls
	}
	return float64(sum) / time.Since(begin).Seconds(), nil
}
