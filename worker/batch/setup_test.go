package batch_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
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
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A site is a Redis with what stands around it in a test.
type site struct {
	testing.TB
	limiter *throttle.Limiter
	options *redis.Options
	redis   redis.UniversalClient
	seen    *asynq.Inspector
	slots   int    // of a server; the default is 8
	queue   string // that servers serve, too

	log sitetest.Journal // of its servers
	mu  sync.Mutex
	ran map[string]int // tasks, by ID
}

// each runs the test on real Redis and on miniredis.
func each(t *testing.T, windows []throttle.Window, test func(s *site)) {
	t.Parallel()
	if sitetest.OnCluster() {
		test(newSite(t, &redis.Options{Addr: sitetest.Cluster(t)}, windows))
		return
	}
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
	api := throttle.Policy{Name: "api", Match: []string{"call"}, Windows: windows}
	s.limiter, err = throttle.New(throttle.Config{Client: s.redis, Policies: []throttle.Policy{api}})
	s.ok(err)
	s.seen = asynq.NewInspectorFromRedisClient(s.redis)
	return s
}

func (s *site) connect(change ...func(*redis.Options)) redis.UniversalClient {
	o := *s.options
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	for _, c := range change {
		c(&o)
	}
	return sitetest.Connect(&o)
}

// MakeRedisClient makes the site an asynq.RedisConnOpt.
func (s *site) MakeRedisClient() any { return s.connect() }

func (s *site) ok(err error) {
	s.Helper()
	sitetest.Must(s, err)
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

// A process is a scheduler that can be killed.
type process struct {
	*batch.Scheduler
	dead    atomic.Bool
	deaf    atomic.Bool  // to the limiter's Redis
	latency atomic.Int64 // of that Redis
	stalls  atomic.Bool  // it stalls for 350 ms every 3 s
	limiter *throttle.Limiter
	log     sitetest.Journal
	stop    context.CancelFunc
	stopped chan struct{}
}

var errDead = errors.New("the process is dead")

// A line is a redis.Limiter of a process's clients, which copies of them keep.
type line struct {
	*process
	limiter bool // the client is its limiter's
}

func (l line) Allow() error {
	const every, stall = 3 * time.Second, 350 * time.Millisecond
	if l.limiter {
		time.Sleep(time.Duration(l.latency.Load()))
	}
	if since := time.Since(time.Now().Truncate(every)); l.limiter && l.stalls.Load() && since < stall {
		time.Sleep(stall - since)
	}
	if l.dead.Load() || l.limiter && l.deaf.Load() {
		return errDead
	}
	return nil
}

func (l line) ReportResult(error) {}

// A mine makes the clients of a process: they fail when it is dead.
type mine struct {
	*site
	line
}

func (m mine) MakeRedisClient() any {
	return m.connect(func(o *redis.Options) { o.Limiter = m.line })
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
	var err error
	client := mine{s, line{p, true}}.MakeRedisClient().(redis.UniversalClient)
	p.limiter, err = throttle.New(throttle.Config{Client: client, Policies: s.limiter.Policies()})
	s.ok(err)
	p.Scheduler, err = batch.NewScheduler(mine{s, line{p, false}}, batch.Config{
		Batches: batches,
		Client:  worker.ClientConfig{Limiter: p.limiter},
		Logger:  slog.New(slog.NewTextHandler(&p.log, nil)),
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
		Concurrency: cmp.Or(s.slots, 8), Queues: map[string]int{"default": 1, cmp.Or(s.queue, "default"): 1},
		DelayedTaskCheckInterval: time.Second, LogLevel: asynq.FatalLevel,
		RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Second },
	}, worker.Config{Limiter: s.limiter, Logger: slog.New(slog.NewTextHandler(&s.log, nil))})
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
	// A task that waits for its fallback is two minutes late.
	for end := time.Now().Add(110 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		status, err := p.Status(context.Background(), f)
		if err == nil && is(status) {
			return status
		}
		if time.Now().After(end) {
			s.Fatalf("waited in vain until %s: %+v, %v", what, status, err)
		}
	}
}
