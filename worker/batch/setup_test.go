package batch_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

func TestMain(m *testing.M) {
	redis.SetLogger(quiet{}) // connections break on purpose here
	os.Exit(m.Run())
}

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// A site is a Redis with what stands around it in a test.
type site struct {
	testing.TB
	limiter *throttle.Limiter
	options *redis.Options
	redis   *redis.Client
	seen    *asynq.Inspector

	mu  sync.Mutex
	ran map[string]int // tasks, by ID
}

// each runs the test on real Redis and on miniredis.
func each(t *testing.T, windows []throttle.Window, test func(s *site)) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		test(newSite(t, &redis.Options{Addr: client.Options().Addr}, windows))
	})
}

// fake returns a site on a miniredis, for a bubble.
func fake(t *testing.T, windows ...throttle.Window) *site {
	return newSite(t, throttletest.InMemory(t).Options(), windows)
}

func newSite(t testing.TB, options *redis.Options, windows []throttle.Window) *site {
	s := &site{TB: t, options: options, ran: map[string]int{}}
	s.redis = s.connect()
	t.Cleanup(func() { s.redis.Close() })
	var err error
	s.limiter, err = throttle.New(throttle.Config{Client: s.redis, Policies: []throttle.Policy{{Name: "api", Match: []string{"call"}, Windows: windows}}})
	s.ok(err)
	s.seen = asynq.NewInspectorFromRedisClient(s.redis)
	return s
}

func (s *site) connect() *redis.Client {
	o := *s.options
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(&o)
}

// MakeRedisClient makes the site an asynq.RedisConnOpt.
func (s *site) MakeRedisClient() any { return s.connect() }

func (s *site) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// many are windows that never bind.
func many() []throttle.Window {
	return []throttle.Window{{Name: "many", Limit: 1_000_000, Period: time.Second}}
}

// calls are Tasks: n for each tenant, with their numbers as payloads.
func calls(n int) batch.Tasks {
	return func(_ context.Context, _ batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
		return func(yield func(*asynq.Task, error) bool) {
			for i := range n {
				if !yield(worker.NewTask(worker.Identity{Tenant: tenant}, "call", fmt.Appendf(nil, "%s %d", tenant, i), asynq.MaxRetry(1)), nil) {
					return
				}
			}
		}
	}
}

// A process is a scheduler that can be killed.
type process struct {
	*batch.Scheduler
	dead    atomic.Bool
	stop    context.CancelFunc
	stopped chan struct{}
}

var errDead = errors.New("the process is dead")

func (p *process) DialHook(next redis.DialHook) redis.DialHook { return next }

func (p *process) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if p.dead.Load() {
			cmd.SetErr(errDead)
			return errDead
		}
		return next(ctx, cmd)
	}
}

func (p *process) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// A mine makes the clients of a process: they fail when it is dead.
type mine struct {
	*site
	*process
}

func (m mine) MakeRedisClient() any {
	client := m.connect()
	client.AddHook(m.process)
	return client
}

// scheduler returns one that runs until the test ends, or it is killed.
func (s *site) scheduler(batches ...batch.Batch) *process {
	s.Helper()
	return s.mortal(0, batches...)
}

// mortal is scheduler with leases of another length than the default.
func (s *site) mortal(lease time.Duration, batches ...batch.Batch) *process {
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
func (s *site) idle(batches ...batch.Batch) *process {
	s.Helper()
	p := &process{stopped: make(chan struct{})}
	limiter, err := throttle.New(throttle.Config{Client: mine{s, p}.MakeRedisClient().(redis.UniversalClient), Policies: s.limiter.Policies()})
	s.ok(err)
	p.Scheduler, err = batch.NewScheduler(mine{s, p}, batch.Config{
		Batches: batches, Client: worker.ClientConfig{Limiter: limiter, LimiterTimeout: 20 * time.Second}, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	s.ok(err)
	return p
}

// kill ends the process without any more calls.
func (p *process) kill() {
	p.dead.Store(true)
	p.stop()
	<-p.stopped
}

// serve starts a server that notes which tasks it runs, and runs them by the handler.
func (s *site) serve(handler asynq.HandlerFunc) *worker.Server {
	s.Helper()
	server, err := worker.NewServer(s, asynq.Config{
		Concurrency: 8, DelayedTaskCheckInterval: time.Second, TaskCheckInterval: time.Second, LogLevel: asynq.FatalLevel,
		RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Second },
	}, worker.Config{Limiter: s.limiter, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	s.ok(err)
	s.ok(server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		id, _ := asynq.GetTaskID(ctx)
		s.mu.Lock()
		s.ran[id]++
		s.mu.Unlock()
		return handler(ctx, task)
	})))
	s.Cleanup(server.Shutdown)
	return server
}

func succeed(context.Context, *asynq.Task) error { return nil }

// wantOnce fails unless exactly n tasks ran, each once.
func (s *site) wantOnce(n int) {
	s.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ran) != n {
		s.Errorf("%d tasks ran, want %d", len(s.ran), n)
	}
	for id, times := range s.ran {
		if times != 1 {
			s.Errorf("task %s ran %d times", id, times)
		}
	}
}

// wait waits until the firing's status is as wanted.
func (s *site) wait(p *process, f batch.Firing, what string, is func(batch.Status) bool) batch.Status {
	s.Helper()
	for end := time.Now().Add(50 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		status, err := p.Status(context.Background(), f)
		if err == nil && is(status) {
			return status
		}
		if time.Now().After(end) {
			s.Fatalf("waited in vain until %s: %+v, %v", what, status, err)
		}
	}
}
