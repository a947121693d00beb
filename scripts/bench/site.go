package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// enqueuers is the default number of goroutines that enqueue.
const enqueuers = 16

// A site is a redis-server on which plain asynq and Sluice do the same work in turn. It is emptied
// before each measurement.
type site struct {
	*server
	o       scenarioOptions
	idleCPU float64 // microseconds of Redis a second when nothing is done: see learnIdle
}

func newSite(o scenarioOptions) (*site, error) {
	s, err := startServer(1)
	if err != nil {
		return nil, err
	}
	return &site{server: s, o: o}, nil
}

func (s *site) addr() string { return s.process.Addr }

func (s *site) opt() asynq.RedisClientOpt { return asynq.RedisClientOpt{Addr: s.addr()} }

// clear empties Redis, and waits until the measurement before has ended in this process too.
func (s *site) clear(ctx context.Context) error {
	runtime.GC()
	return s.control.FlushAll(ctx).Err()
}

// learnIdle measures the idle CPU of Redis, with a plain crew that has nothing to do, or alone. It
// is subtracted from both sides, so the further idle cost of our servers counts as theirs.
func (s *site) learnIdle(ctx context.Context, c *crew) error {
	const settle, watch = 300 * time.Millisecond, 2 * time.Second
	if err := s.clear(ctx); err != nil {
		return err
	}
	if c != nil {
		shift, err := c.plain().start(s.addr(), newJournal(0))
		if err != nil {
			return err
		}
		defer shift.end()
	}
	time.Sleep(settle)
	s.idleCPU = 0
	took, cpu, err := s.spent(ctx, func() error {
		time.Sleep(watch)
		return nil
	})
	s.idleCPU = cpu / took.Seconds()
	return err
}

// spent calls run, and returns how long it took and the CPU of Redis in microseconds, without the
// idle CPU.
func (s *site) spent(ctx context.Context, run func() error) (took time.Duration, cpu float64, err error) {
	before, err := s.cpu(ctx)
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	if err := run(); err != nil {
		return 0, 0, err
	}
	took = time.Since(begin)
	after, err := s.cpu(ctx)
	return took, after - before - s.idleCPU*took.Seconds(), err
}

// withPlainClient calls use with asynq's client.
func (s *site) withPlainClient(use func(*asynq.Client) error) error {
	client := asynq.NewClient(s.opt())
	defer client.Close()
	return use(client)
}

// withOurClient calls use with our client.
func (s *site) withOurClient(policy throttle.Policy, use func(*worker.Client) error) error {
	connection, limiter, err := newLimiter(s.addr(), policy)
	if err != nil {
		return err
	}
	defer connection.Close()
	client, err := worker.NewClient(s.opt(), worker.ClientConfig{Limiter: limiter})
	if err != nil {
		return err
	}
	defer client.Close()
	return use(client)
}

// A drained is what a run over a backlog was like.
type drained struct {
	calls  []*callLog
	cpu    float64 // microseconds of Redis a task
	starts []start
	wakes  float64
}

func (s *site) drain(ctx context.Context, c crew, n int) (*drained, error) {
	j := newJournal(n)
	runtime.GC()
	var shift *shift
	_, cpu, err := s.spent(ctx, func() (err error) {
		if shift, err = c.start(s.addr(), j); err != nil {
			return err
		}
		if err := j.await(ctx, s.o.say); err != nil {
			return err
		}
		return s.awaitDone(ctx)
	})
	if shift != nil {
		shift.end()
	}
	if err != nil {
		return nil, err
	}
	starts := j.starts()
	if err := honest(starts, n, c.policy != nil); err != nil {
		return nil, err
	}
	return &drained{shift.calls, cpu / float64(n), starts, j.wakes()}, nil
}

// honest returns an error unless each task ran once, in a throttled crew by a grant of Redis.
func honest(starts []start, n int, throttled bool) error {
	ids := make(map[string]bool, n)
	for _, s := range starts {
		if throttled && s.granted.IsZero() {
			return fmt.Errorf("task %s ran without a grant", s.id)
		}
		ids[s.id] = true
	}
	if len(ids) != n || len(starts) != n {
		return fmt.Errorf("%d different tasks ran in %d starts, and %d should have, once each", len(ids), len(starts), n)
	}
	return nil
}

// awaitDone waits until asynq has noted that all handlers have ended.
func (s *site) awaitDone(ctx context.Context) error {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		active, err := s.control.LLen(ctx, "asynq:{default}:active").Result()
		if err != nil || active == 0 {
			return err
		}
	}
	return fmt.Errorf("some tasks are still active 30 s after the last has started")
}

// takenToStart returns the times from sending the take or reserve that granted a task to the start
// of its handler.
func (d *drained) takenToStart(take string) []time.Duration {
	calls := make([][]scriptCall, len(d.calls))
	for i, l := range d.calls {
		calls[i] = l.of(take)
	}
	all := make([]time.Duration, len(d.starts))
	for i, s := range d.starts {
		all[i] = s.at.Sub(sentFor(calls[s.server], s.granted))
	}
	return all
}
