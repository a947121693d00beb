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

// A testbed is a redis-server on which plain asynq and Sluice do the same work in turn. It is emptied
// before each measurement.
type testbed struct {
	*server
	o       scenarioOptions
	idleCPU float64 // microseconds of Redis a second when nothing is done: see learnIdle
}

func newTestbed(o scenarioOptions) *testbed { return &testbed{server: startServer(o), o: o} }

func (s *testbed) addr() string { return s.process.Addr }

func (s *testbed) opt() asynq.RedisClientOpt { return asynq.RedisClientOpt{Addr: s.addr()} }

// clear empties Redis, and collects this process's garbage of the previous measurement.
func (s *testbed) clear(ctx context.Context) {
	runtime.GC()
	check(s.control.FlushAll(ctx).Err())
}

// learnIdle measures the idle CPU of Redis, with a plain crew that has nothing to do, or without one.
// This CPU is subtracted on both sides: what our servers cost beyond it while idle counts as theirs.
func (s *testbed) learnIdle(ctx context.Context, c *crew) {
	const settle, watch = 300 * time.Millisecond, 2 * time.Second
	s.clear(ctx)
	var shift shift
	defer shift.end()
	if c != nil {
		shift.start(c.plain(), s.addr(), newStartLog(0))
	}
	time.Sleep(settle)
	s.idleCPU = 0
	took, cpu := s.spent(ctx, func() { time.Sleep(watch) })
	s.idleCPU = cpu / took.Seconds()
}

// spent calls run, and returns how long it took and the CPU of Redis in microseconds, without the
// idle CPU.
func (s *testbed) spent(ctx context.Context, run func()) (took time.Duration, cpu float64) {
	used := s.cpu(ctx)
	begin := time.Now()
	run()
	took = time.Since(begin)
	return took, s.cpu(ctx) - used - s.idleCPU*took.Seconds()
}

// withPlainClient calls use with asynq's client.
func (s *testbed) withPlainClient(use func(*asynq.Client)) {
	client := asynq.NewClient(s.opt())
	defer client.Close()
	use(client)
}

// withOurClient calls use with our client.
func (s *testbed) withOurClient(policy throttle.Policy, use func(*worker.Client)) {
	connection, limiter := newLimiter(s.addr(), policy)
	defer connection.Close()
	client := must(worker.NewClient(s.opt(), worker.ClientConfig{Limiter: limiter}))
	defer client.Close()
	use(client)
}

// A drainRun describes a run over a backlog.
type drainRun struct {
	calls  []*callLog
	cpu    float64 // microseconds of Redis a task
	starts []start
	wakes  float64
}

func (s *testbed) drain(ctx context.Context, c crew, n int) *drainRun {
	j := newStartLog(n)
	runtime.GC()
	var shift shift
	defer shift.end()
	_, cpu := s.spent(ctx, func() {
		shift.start(c, s.addr(), j)
		j.await(ctx, s.o.say)
		s.awaitDone(ctx)
	})
	shift.end()
	starts := j.starts()
	check(eachRanOnce(starts, n, c.policy != nil))
	return &drainRun{shift.calls, cpu / float64(n), starts, j.wakes()}
}

// eachRanOnce returns an error unless each task ran once, in a throttled crew by a grant of Redis.
func eachRanOnce(starts []start, n int, throttled bool) error {
	ids := make(map[string]bool, n)
	for _, s := range starts {
		if throttled && s.granted.IsZero() {
			return fmt.Errorf("task %s ran without a grant", s.id)
		}
		ids[s.id] = true
	}
	if len(ids) != n || len(starts) != n {
		return fmt.Errorf("%d different tasks ran in %d starts, and %d should have, once each",
			len(ids), len(starts), n)
	}
	return nil
}

// awaitDone waits until asynq has noted that all handlers of the queue default have ended.
func (s *testbed) awaitDone(ctx context.Context) {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if must(s.control.LLen(ctx, "asynq:{default}:active").Result()) == 0 {
			return
		}
	}
	fail("some tasks are still active 30 s after the last has started")
}

// takenToStart returns the times from sending the take that granted a task to the start of its
// handler: from the grant itself if a reserve granted it, unless a take was under way.
func (d *drainRun) takenToStart(take string) []time.Duration {
	calls := make([][]scriptCall, len(d.calls))
	for i, l := range d.calls {
		calls[i] = l.callsOf(take)
	}
	all := make([]time.Duration, len(d.starts))
	for i, s := range d.starts {
		all[i] = s.at.Sub(sentFor(calls[s.server], s.granted))
	}
	return all
}
