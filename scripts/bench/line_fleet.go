package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// stalledAfter is how long a case waits for the next task to start before it gives up. It is longer
// than a task waits whose ticket was lost.
const stalledAfter = 100 * time.Second

// A fleet is a Redis, asynq servers at default settings under one policy, and a log of what they
// do.
type fleet struct {
	o      scenarioOptions
	policy throttle.Policy
	redis  *server
	stalls *stallWatch
	plain  *asynq.Client
	crew   []*crewman
	clean  []func()
	work   time.Duration // of every handler
	call   func()        // by every handler, if not nil

	mu        sync.Mutex
	tasks     map[string]*logged // by ID
	started   int
	startedAt time.Time     // when the newest task started
	waited    time.Duration // of slots, for the limiter
}

// logged is what the fleet saw of one task.
type logged struct {
	id, tenant string
	region     string // if the task says one
	wakes      int
	came       time.Time // joined, or first decided about, by the clock of Redis
	granted    time.Time // by the clock of Redis
	picked     time.Time // picked up last
	promised   time.Time // said last; zero if it never waited
	started    time.Time // of the handler, by the clock of this machine, which is that of Redis
	ended      time.Time
}

type crewman struct {
	client   *redis.Client
	server   *asynq.Server
	throttle *worker.Adapter
}

func newFleet(o scenarioOptions, windows ...throttle.Window) (*fleet, error) {
	return newFleetOf(o, throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows})
}

func newFleetOf(o scenarioOptions, policy throttle.Policy) (*fleet, error) {
	s, err := startServer(64)
	if err != nil {
		return nil, err
	}
	f := &fleet{o: o, policy: policy, redis: s, tasks: map[string]*logged{}}
	f.plain = asynq.NewClient(f.opt())
	f.stalls = watchStalls(s.control)
	f.clean = append(f.clean, f.stalls.end)
	return f, nil
}

func (f *fleet) opt() asynq.RedisClientOpt {
	return asynq.RedisClientOpt{Addr: f.redis.process.Addr, PoolSize: 64}
}

func (f *fleet) close() {
	f.stop()
	for _, clean := range f.clean {
		clean()
	}
	f.plain.Close()
	f.redis.stop()
}

func (f *fleet) limiter(client redis.UniversalClient) (*throttle.Limiter, error) {
	return throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{f.policy}})
}

// start starts the servers, each with a limiter and connections of its own.
func (f *fleet) start() error {
	for range f.o.servers {
		client := redis.NewClient(&redis.Options{Addr: f.redis.process.Addr})
		limiter, err := f.limiter(client)
		if err != nil {
			return err
		}
		t, err := worker.NewAdapter(worker.Config{Limiter: limiter, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), OnDecision: f.decided})
		if err != nil {
			return err
		}
		srv := asynq.NewServer(t.Redis(f.opt()), t.Asynq(asynq.Config{
			Concurrency: f.o.slots, LogLevel: asynq.FatalLevel,
		}))
		guard, err := t.Middleware()
		if err != nil {
			return err
		}
		if err := srv.Start(f.timed(guard)); err != nil {
			return err
		}
		f.crew = append(f.crew, &crewman{client, srv, t})
	}
	return nil
}

// stop shuts the servers down as a deploy does.
func (f *fleet) stop() {
	var all sync.WaitGroup
	for _, c := range f.crew {
		all.Go(func() {
			c.server.Shutdown()
			c.throttle.Close()
			c.client.Close()
		})
	}
	all.Wait()
	f.crew = nil
}

type beganKey struct{}

// timed is the handler of a server: the guard around one that logs.
func (f *fleet) timed(guard asynq.MiddlewareFunc) asynq.Handler {
	inner := guard(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
		now := time.Now()
		*ctx.Value(beganKey{}).(*time.Time) = now
		id, _ := asynq.GetTaskID(ctx)
		f.mu.Lock()
		l := f.tasks[id]
		l.started, f.startedAt = now, now
		l.wakes++
		f.started++
		f.mu.Unlock()
		if f.call != nil {
			f.call()
		}
		time.Sleep(f.work)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.tasks[id].ended = time.Now()
		return nil
	}))
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		came := time.Now()
		var began time.Time
		err := inner.ProcessTask(context.WithValue(ctx, beganKey{}, &began), task)
		if began.IsZero() {
			began = time.Now()
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.waited += began.Sub(came)
		if id, ok := asynq.GetTaskID(ctx); ok && f.tasks[id] != nil {
			f.tasks[id].picked = came
		}
		return err
	})
}

func (f *fleet) task(id, tenant string) *logged {
	l := f.tasks[id]
	if l == nil {
		l = &logged{id: id, tenant: tenant}
		f.tasks[id] = l
	}
	return l
}

func (f *fleet) decided(ctx context.Context, task *asynq.Task, d throttle.Decision) {
	id, _ := asynq.GetTaskID(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.task(id, d.Tenant)
	if id, err := worker.IdentityOf(task); err == nil {
		l.region = id.Attributes["region"]
	}
	if l.came.IsZero() {
		l.came = d.At
	}
	if d.Granted {
		l.granted = d.At
		return
	}
	l.wakes++ // the others are counted when the handler starts
	l.promised = d.At.Add(d.RetryIn)
}

// enqueue enqueues n tasks of a tenant by asynq's client, and returns their IDs.
func (f *fleet) enqueue(tenant string, n int) ([]string, error) {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = tenant + "-" + strconv.Itoa(i)
	}
	return ids, inParallel(n, 8, func(i int) error {
		_, err := f.plain.Enqueue(worker.NewTask(worker.Identity{Tenant: tenant}, "call", nil), asynq.TaskID(ids[i]))
		return err
	})
}

func (f *fleet) planner() (*worker.Client, error) {
	client := redis.NewClient(&redis.Options{Addr: f.redis.process.Addr, PoolSize: 64})
	limiter, err := f.limiter(client)
	if err != nil {
		return nil, err
	}
	c, err := worker.NewClient(f.opt(), worker.ClientConfig{Limiter: limiter})
	if err != nil {
		return nil, err
	}
	f.clean = append(f.clean, func() { c.Close(); client.Close() })
	return c, nil
}

// join enqueues by our client. The tasks join the line at once.
func (f *fleet) join(ctx context.Context, c *worker.Client, tenant string, n, goroutines int) error {
	return inParallel(n, goroutines, func(i int) error {
		id := tenant + "-" + strconv.Itoa(i)
		asked := time.Now()
		var start worker.ExpectedStart
		task := worker.NewTask(worker.Identity{Tenant: tenant}, "call", nil)
		if _, err := c.EnqueueContext(ctx, task, asynq.TaskID(id), worker.ReportStart(&start)); err != nil {
			return err
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if start.Joined {
			l := f.task(id, tenant)
			l.came, l.promised = asked, start.At
		}
		return nil
	})
}

// await waits until so many tasks have started.
func (f *fleet) await(ctx context.Context, n int) error {
	begin, told := time.Now(), time.Now()
	for {
		f.mu.Lock()
		started, last := f.started, f.startedAt
		f.mu.Unlock()
		if started >= n {
			return nil
		}
		if last.Before(begin) {
			last = begin
		}
		if time.Since(last) > stalledAfter {
			return fmt.Errorf("no task has started for %v: %d of %d have", stalledAfter, started, n)
		}
		if time.Since(told) > 5*time.Second {
			told = time.Now()
			f.o.say("%d of %d tasks have started", started, n)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (f *fleet) awaitTenant(ctx context.Context, tenant string, n int) error {
	for told := time.Now(); ; {
		ran := 0
		f.mu.Lock()
		for _, l := range f.tasks {
			if l.tenant == tenant && !l.started.IsZero() {
				ran++
			}
		}
		last := f.startedAt
		f.mu.Unlock()
		if ran >= n {
			return nil
		}
		if time.Since(told) > 5*time.Second {
			told = time.Now()
			f.o.say("%d of %d tasks of %s have started", ran, n, tenant)
		}
		if !last.IsZero() && time.Since(last) > stalledAfter {
			return fmt.Errorf("no task has started for %v", stalledAfter)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// awaitSeen waits until so many tasks were decided about.
func (f *fleet) awaitSeen(ctx context.Context, n int) error {
	for ctx.Err() == nil {
		f.mu.Lock()
		seen := 0
		for _, l := range f.tasks {
			if l.wakes > 0 {
				seen++
			}
		}
		f.mu.Unlock()
		if seen >= n {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return ctx.Err()
}
