package batch_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A batchSite is a sitetest.Site whose policy is of the tasks of batches.
type batchSite struct {
	*sitetest.Site
	slots int    // of a server; the default is 8
	queue string // that servers serve, too

	tenants throttle.TenantFunc // of the limiters of schedulers
}

// api is the policy of the tests' tasks.
func api(windows ...throttle.Window) throttle.Policy {
	return throttle.Policy{Name: "api", Match: []string{"call"}, Windows: windows}
}

// fake returns a site on a miniredis, for a bubble.
func fake(t *testing.T, windows ...throttle.Window) *batchSite {
	return &batchSite{Site: sitetest.NewInBubble(t, api(windows...))}
}

// inBubble runs the test on fake time, on a site on a miniredis.
func inBubble(t *testing.T, windows []throttle.Window, test func(t *testing.T, s *batchSite)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { test(t, fake(t, windows...)) })
}

// fire fires a batch.
func (s *batchSite) fire(p *schedulerProcess, name string) batch.Firing {
	s.Helper()
	f := expect.Got(p.Fire(context.Background(), name))(s)
	return f
}

// status returns the status of a firing.
func (s *batchSite) status(p *schedulerProcess, f batch.Firing) batch.Status {
	s.Helper()
	status := expect.Got(p.Status(context.Background(), f))(s)
	return status
}

// many are windows that never bind.
func many() []throttle.Window {
	return []throttle.Window{{Name: "many", Limit: 1_000_000, Period: time.Second}}
}

// tenants names n of them.
func tenants(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprint("tenant-", i))
	}
	return names
}

// calls are Tasks: n for each tenant, with their numbers as payloads.
func calls(n int) batch.Tasks {
	return func(_ context.Context, _ batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
		return func(yield func(*asynq.Task, error) bool) {
			for i := range n {
				payload := fmt.Appendf(nil, "%s %d", tenant, i)
				if !yield(worker.NewTask(worker.Identity{Tenant: tenant}, "call", payload, asynq.MaxRetry(1)), nil) {
					return
				}
			}
		}
	}
}

// A schedulerProcess is a scheduler that can be killed.
type schedulerProcess struct {
	*batch.Scheduler
	dead    atomic.Bool
	deaf    atomic.Bool  // to the limiter's Redis
	latency atomic.Int64 // of that Redis
	stalls  atomic.Bool  // it stalls for 350 ms every 3 s
	limiter *throttle.Limiter
	log     sitetest.Logs
	stop    context.CancelFunc
	stopped chan struct{}
}

var errDead = errors.New("the process is dead")

// A processGate is a redis.Limiter of a process's clients, which copies of them keep.
type processGate struct {
	*schedulerProcess
	limiter bool // the client is its limiter's
}

func (g processGate) Allow() error {
	const every, stall = 3 * time.Second, 350 * time.Millisecond
	if g.limiter {
		time.Sleep(time.Duration(g.latency.Load()))
	}
	if since := time.Since(time.Now().Truncate(every)); g.limiter && g.stalls.Load() && since < stall {
		time.Sleep(stall - since)
	}
	if g.dead.Load() || g.limiter && g.deaf.Load() {
		return errDead
	}
	return nil
}

func (processGate) ReportResult(error) {}

// A mortalConn makes the clients of a process: they fail when it is dead.
type mortalConn struct {
	*batchSite
	processGate
}

func (m mortalConn) MakeRedisClient() any {
	o := sitetest.SameRedis(m.Redis)
	o.Limiter = m.processGate
	return sitetest.Connect(o)
}

// scheduler returns one that runs until the test ends, or it is killed.
func (s *batchSite) scheduler(batches ...batch.Batch) *schedulerProcess {
	s.Helper()
	return s.mortal(0, batches...)
}

// mortal is scheduler with leases of another length than the default.
func (s *batchSite) mortal(lease time.Duration, batches ...batch.Batch) *schedulerProcess {
	s.Helper()
	p := s.idle(batches...)
	if lease > 0 {
		p.SetLease(lease)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.stop = cancel
	go func() {
		defer close(p.stopped)
		_ = p.Run(ctx)
		p.Close()
	}()
	s.Cleanup(func() { cancel(); <-p.stopped })
	return p
}

// idle returns a scheduler that does not run.
func (s *batchSite) idle(batches ...batch.Batch) *schedulerProcess {
	s.Helper()
	p := &schedulerProcess{stopped: make(chan struct{})}
	var err error
	client := mortalConn{s, processGate{p, true}}.MakeRedisClient().(redis.UniversalClient)
	p.limiter, err = throttle.New(throttle.Config{Client: client, Policies: s.Limiter.Policies(), Tenants: s.tenants})
	expect.Must(s, err)
	p.Scheduler, err = batch.NewScheduler(mortalConn{s, processGate{p, false}}, batch.Config{
		Batches: batches,
		Client:  worker.ClientConfig{Limiter: p.limiter},
		Logger:  slog.New(slog.NewTextHandler(&p.log, nil)),
	})
	expect.Must(s, err)
	return p
}

// kill ends the process without any more calls.
func (p *schedulerProcess) kill() {
	p.dead.Store(true)
	p.stop()
	<-p.stopped
}

// serve starts a server that notes which tasks it runs, and runs them by the handler.
func (s *batchSite) serve(handler asynq.HandlerFunc) *worker.Server {
	s.Helper()
	return s.Serve(func(ctx context.Context, task *asynq.Task) error {
		expect.Must(s, s.Ok(ctx, task))
		return handler(ctx, task)
	}, sitetest.Calm, func(c *asynq.Config, _ *worker.Config) {
		c.Concurrency, c.DelayedTaskCheckInterval = cmp.Or(s.slots, 8), time.Second
		c.Queues = map[string]int{"default": 1, cmp.Or(s.queue, "default"): 1}
		c.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Second }
	})
}

func succeed(context.Context, *asynq.Task) error { return nil }

// wait waits until the firing's status is as wanted.
func (s *batchSite) wait(p *schedulerProcess, f batch.Firing, what string, is func(batch.Status) bool) batch.Status {
	s.Helper()
	// A task that waits for its fallback is two minutes late.
	for end := time.Now().Add(110 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		status, err := p.Status(context.Background(), f)
		if err == nil && is(status) {
			return status
		}
		expect.Require(s, time.Now().Before(end), "waited in vain until", what, status, err)
	}
}
