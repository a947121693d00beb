package main

import (
	"context"
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
	shift  shift
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

func newFleet(o scenarioOptions, windows ...throttle.Window) *fleet {
	return newFleetOf(o, policyOf(windows...))
}

func newFleetOf(o scenarioOptions, policy throttle.Policy) *fleet {
	s := startServer(o, 64)
	f := &fleet{o: o, policy: policy, redis: s, tasks: map[string]*logged{}}
	f.plain = asynq.NewClient(f.opt())
	f.stalls = watchStalls(s.control)
	o.atEnd(func() { f.stalls.end(); f.plain.Close() })
	o.atEnd(f.shift.end)
	return f
}

func (f *fleet) opt() asynq.RedisClientOpt {
	return asynq.RedisClientOpt{Addr: f.redis.process.Addr, PoolSize: 64}
}

// start starts the servers, each with a limiter and connections of its own.
func (f *fleet) start() {
	for range f.o.servers {
		client, limiter := newLimiter(f.redis.process.Addr, f.policy)
		srv := must(worker.NewServer(f.opt(), asynq.Config{
			BaseContext: func() context.Context {
				return context.WithValue(context.Background(), cameKey{}, time.Now())
			},
			Concurrency: f.o.slots,
			LogLevel:    asynq.FatalLevel,
		}, worker.Config{
			Limiter: limiter, Logger: slog.New(slog.DiscardHandler), OnDecision: f.decided,
		}))
		check(srv.Start(asynq.HandlerFunc(f.handle)))
		f.shift.ends = append(f.shift.ends, func() { srv.Shutdown(); client.Close() })
	}
}

// cameKey is the key of the time at which the server began with a task, in the task's context.
type cameKey struct{}

// came returns when the server began with the task of the context.
func came(ctx context.Context) time.Time { return ctx.Value(cameKey{}).(time.Time) }

// handle is the handler of a server.
func (f *fleet) handle(ctx context.Context, _ *asynq.Task) error {
	now := time.Now()
	id, _ := asynq.GetTaskID(ctx)
	f.mu.Lock()
	l := f.tasks[id]
	l.picked = came(ctx)
	l.started, f.startedAt = now, now
	l.wakes++
	f.started++
	f.waited += now.Sub(l.picked)
	f.mu.Unlock()
	if f.call != nil {
		f.call()
	}
	time.Sleep(f.work)
	f.mu.Lock()
	defer f.mu.Unlock()
	l.ended = time.Now()
	return nil
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
	l.picked = came(ctx)
	l.wakes++ // the others are counted when the handler starts
	f.waited += time.Since(l.picked)
	l.promised = d.At.Add(d.RetryIn)
}

// put enqueues a task by asynq's client.
func (f *fleet) put(id string, of worker.Identity) {
	must(f.plain.Enqueue(worker.NewTask(of, "call", nil), asynq.TaskID(id)))
}

// enqueue enqueues n tasks of a tenant by asynq's client, and returns their IDs.
func (f *fleet) enqueue(tenant string, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = tenant + "-" + strconv.Itoa(i)
	}
	inParallel(n, 8, func(i int) { f.put(ids[i], worker.Identity{Tenant: tenant}) })
	return ids
}

func (f *fleet) planner() *worker.Client {
	client := redis.NewClient(&redis.Options{Addr: f.redis.process.Addr, PoolSize: 64})
	limiter := must(throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{f.policy}}))
	c := must(worker.NewClient(f.opt(), worker.ClientConfig{Limiter: limiter}))
	f.o.atEnd(func() { c.Close(); client.Close() })
	return c
}

// join enqueues by our client. The tasks join the line at once.
func (f *fleet) join(ctx context.Context, c *worker.Client, tenant string, n, goroutines int) {
	inParallel(n, goroutines, func(i int) {
		id := tenant + "-" + strconv.Itoa(i)
		asked := time.Now()
		var start worker.ExpectedStart
		task := worker.NewTask(worker.Identity{Tenant: tenant}, "call", nil)
		must(c.EnqueueContext(ctx, task, asynq.TaskID(id), worker.ReportStart(&start)))
		f.mu.Lock()
		defer f.mu.Unlock()
		if start.Joined {
			l := f.task(id, tenant)
			l.came, l.promised = asked, start.At
		}
	})
}

// workOff starts the servers, counts Redis calls from then on, and waits until so many tasks have
// started.
func (f *fleet) workOff(ctx context.Context, n int) {
	f.redis.reset(ctx)
	f.start()
	f.await(ctx, n)
}

// await waits until so many tasks have started.
func (f *fleet) await(ctx context.Context, n int) {
	f.awaitCount(ctx, n, "have started", 10*time.Millisecond, func() int { return f.started })
}

func (f *fleet) awaitTenant(ctx context.Context, tenant string, n int) {
	f.awaitTasks(ctx, n, "of "+tenant+" have started", func(l *logged) bool {
		return l.tenant == tenant && !l.started.IsZero()
	})
}

// awaitSeen waits until so many tasks were decided about.
func (f *fleet) awaitSeen(ctx context.Context, n int) {
	f.awaitTasks(ctx, n, "were seen", func(l *logged) bool { return l.wakes > 0 })
}

func (f *fleet) awaitTasks(ctx context.Context, n int, what string, counts func(*logged) bool) {
	f.awaitCount(ctx, n, what, 50*time.Millisecond, func() (found int) {
		for _, l := range f.tasks {
			if counts(l) {
				found++
			}
		}
		return found
	})
}

// awaitCount waits until as many tasks are counted. The lock is held while they are.
func (f *fleet) awaitCount(ctx context.Context, n int, what string, every time.Duration, count func() int) {
	last, told := time.Now(), time.Now()
	for ; ; time.Sleep(every) {
		check(ctx.Err())
		f.mu.Lock()
		found := count()
		if f.startedAt.After(last) {
			last = f.startedAt
		}
		f.mu.Unlock()
		if found >= n {
			return
		}
		if time.Since(last) > stalledAfter {
			fail("no task has started for %v: %d of %d %s", stalledAfter, found, n, what)
		}
		if time.Since(told) > 5*time.Second {
			told = time.Now()
			f.o.say("%d of %d tasks %s", found, n, what)
		}
	}
}
