package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// stalledAfter is how long a case waits for the next task to start before it gives up: longer
// than the fallback behind a lost call.
const stalledAfter = 100 * time.Second

// checkEvery is asynq.Config.TaskCheckInterval in all cases.
const checkEvery = 20 * time.Millisecond

// A fleet is a Redis with asynq servers that are throttled by one policy, and a log of what
// they do.
type fleet struct {
	o      lineOptions
	policy throttle.Policy
	redis  *server
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
	stalls    []stall       // in the order of time
}

// A stall is a time in which this process or its Redis was held up by the machine: what a task
// took longer meanwhile is not the line's doing.
type stall struct{ from, to time.Time }

// stallsFrom is how long a stall is at the least, and pulse how often one is looked for.
const (
	stallsFrom = 10 * time.Millisecond
	pulse      = 5 * time.Millisecond
)

// logged is what the fleet saw of one task.
type logged struct {
	id, tenant string
	wakes      int
	came       time.Time // planned, or else decided first, by the clock of Redis
	granted    time.Time // by the clock of Redis
	picked     time.Time // picked up last
	promised   time.Time // said last; zero if it never waited
	started    time.Time // of the handler, by the clock of this machine, which is that of Redis
	ended      time.Time
}

type crewman struct {
	client   *redis.Client
	server   *asynq.Server
	throttle *worker.Throttle
}

func newFleet(o lineOptions, windows ...throttle.Window) (*fleet, error) {
	return newFleetOf(o, throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows})
}

func newFleetOf(o lineOptions, policy throttle.Policy) (*fleet, error) {
	s, err := startServer(64)
	if err != nil {
		return nil, err
	}
	f := &fleet{o: o, policy: policy, redis: s, tasks: map[string]*logged{}}
	f.plain = asynq.NewClient(f.opt())
	ctx, stop := context.WithCancel(context.Background())
	var watch sync.WaitGroup
	watch.Go(func() { f.watchStalls(ctx) })
	f.clean = append(f.clean, func() { stop(); watch.Wait() })
	return f, nil
}

// watchStalls asks Redis for nothing all the time, and notes when the answer took long.
func (f *fleet) watchStalls(ctx context.Context) {
	for from := time.Now(); ctx.Err() == nil; from = time.Now() {
		time.Sleep(pulse)
		f.redis.control.Ping(ctx)
		if to := time.Now(); to.Sub(from) > pulse+stallsFrom {
			f.mu.Lock()
			f.stalls = append(f.stalls, stall{from, to})
			f.mu.Unlock()
		}
	}
}

// stalled is for how much of that time the machine held everything up.
func (f *fleet) stalled(from, to time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	var sum time.Duration
	for _, s := range f.stalls {
		if s.to.After(from) && s.from.Before(to) {
			sum += min(to.Sub(s.from), to.Sub(from), s.to.Sub(from), s.to.Sub(s.from))
		}
	}
	return sum
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
		t, err := worker.New(worker.Config{Limiter: limiter, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), OnDecision: f.decided})
		if err != nil {
			return err
		}
		srv := asynq.NewServer(t.Redis(f.opt()), t.Asynq(asynq.Config{
			Concurrency: f.o.slots, LogLevel: asynq.FatalLevel, TaskCheckInterval: checkEvery,
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
		f.tasks[id].started, f.startedAt = now, now
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

func (f *fleet) decided(ctx context.Context, _ *asynq.Task, d throttle.Decision) {
	id, _ := asynq.GetTaskID(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.task(id, d.Tenant)
	l.wakes++
	if l.came.IsZero() {
		l.came = d.At
	}
	if d.Granted {
		l.granted = d.At
	} else {
		l.promised = d.At.Add(d.RetryIn)
	}
}

// enqueue enqueues n tasks of a tenant as any client of asynq's does, and returns their IDs.
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

// plan enqueues as our client does, which takes the place in line at once.
func (f *fleet) plan(ctx context.Context, c *worker.Client, tenant string, n, goroutines int) error {
	return inParallel(n, goroutines, func(i int) error {
		id := tenant + "-" + strconv.Itoa(i)
		asked := time.Now()
		info, err := c.EnqueueContext(ctx, worker.NewTask(worker.Identity{Tenant: tenant}, "call", nil), asynq.TaskID(id))
		if err != nil {
			return err
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if info.State == asynq.TaskStateScheduled {
			l := f.task(id, tenant)
			l.came, l.promised = asked, info.StartsAt
		}
		return nil
	})
}

// inParallel does n things in order on several goroutines, and returns the first error.
func inParallel(n, goroutines int, do func(i int) error) error {
	var wg sync.WaitGroup
	next := make(chan int)
	errs := make(chan error, goroutines)
	for range goroutines {
		wg.Go(func() {
			var first error
			for i := range next {
				if first == nil {
					first = do(i)
				}
			}
			errs <- first
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
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

// grants are the tasks that ran, in the order of their grants.
func (f *fleet) grants() []*logged {
	f.mu.Lock()
	defer f.mu.Unlock()
	ran := slices.DeleteFunc(slices.Collect(maps.Values(f.tasks)), func(l *logged) bool { return l.started.IsZero() })
	slices.SortFunc(ran, func(a, b *logged) int { return a.granted.Compare(b.granted) })
	return ran
}

// excess is by how much any window was exceeded at the most.
func (f *fleet) excess(at func(*logged) time.Time) int {
	worst := math.MinInt
	for _, w := range f.policy.Windows {
		for _, ran := range f.by(w) {
			times := make([]time.Time, len(ran))
			for i, l := range ran {
				times[i] = at(l)
			}
			slices.SortFunc(times, time.Time.Compare)
			from := 0
			for i, t := range times {
				for t.Sub(times[from]) >= w.Period {
					from++
				}
				worst = max(worst, i-from+1-int(w.Limit))
			}
		}
	}
	return worst
}

// ideal is the time from the first to the last of n grants if none is late: of a single window
// (n - limit) x period / limit, with several the last one's place in a walk through them.
func (f *fleet) ideal(n int) time.Duration {
	windows := f.policy.Windows
	if len(windows) == 1 {
		w := windows[0]
		return time.Duration(float64(n-int(w.Limit)) / float64(w.Limit) * float64(w.Period))
	}
	at := make([]time.Duration, n)
	for k := range at {
		for _, w := range windows {
			if i := k - int(w.Limit); i >= 0 {
				at[k] = max(at[k], at[i]+w.Period)
			}
		}
	}
	return at[n-1]
}

func (f *fleet) utilization() float64 {
	ran := f.grants()
	return f.ideal(len(ran)).Seconds() / ran[len(ran)-1].granted.Sub(ran[0].granted).Seconds()
}

// wakes are the mean and the most per task.
func (f *fleet) wakes() (mean float64, most int) {
	ran, sum := f.grants(), 0
	for _, l := range ran {
		sum += l.wakes
		most = max(most, l.wakes)
	}
	return float64(sum) / float64(len(ran)), most
}

// A ride is how a task got from the moment at which the next in line fits to its handler.
type ride struct {
	of   *logged
	fits time.Time
	took time.Duration
}

// fitToRunning are the rides of those that waited: grant number k of a window with a backlog fits
// one period after number k - limit. Only for policies all of whose windows have the same scope.
func (f *fleet) fitToRunning() []ride {
	var rides []ride
	for _, ran := range f.by(f.policy.Windows[0]) {
		for k, l := range ran {
			fits := time.Time{}
			for _, w := range f.policy.Windows {
				if i := k - int(w.Limit); i >= 0 {
					if at := ran[i].granted.Add(w.Period); at.After(fits) {
						fits = at
					}
				}
			}
			// One that came after that did not wait for it.
			if !fits.IsZero() && !l.promised.IsZero() && !l.came.After(fits) {
				rides = append(rides, ride{l, fits, l.started.Sub(fits)})
			}
		}
	}
	return rides
}

// by are the grants that each value of the window's scope counts, in order.
func (f *fleet) by(w throttle.Window) map[string][]*logged {
	by := map[string][]*logged{}
	for _, l := range f.grants() {
		key := l.tenant
		if w.Per != nil && len(w.Per) == 0 {
			key = ""
		}
		by[key] = append(by[key], l)
	}
	return by
}

// lateness is how long after the time promised last the handlers started; below 0 before it.
func (f *fleet) lateness() []time.Duration {
	var late []time.Duration
	for _, l := range f.grants() {
		if !l.promised.IsZero() {
			late = append(late, l.started.Sub(l.promised))
		}
	}
	return late
}

// busy is the part of their time that handler slots spent in the limiter's calls.
func (f *fleet) busy() float64 {
	ran := f.grants()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.waited.Seconds() / (ran[len(ran)-1].granted.Sub(ran[0].granted).Seconds() * float64(f.o.servers*f.o.slots))
}

// drained are the figures of a backlog that was drained. Every case has them; the bars are its own.
func (f *fleet) drained(ctx context.Context, wakes, wakesMost, utilization *float64) ([]figure, error) {
	mean, most := f.wakes()
	calls, err := f.calls(ctx)
	if err != nil {
		return nil, err
	}
	late := f.lateness()
	figures := []figure{
		{Name: "wakes per task", Value: mean, AtMost: wakes},
		{Name: "wakes of one task, most", Value: float64(most), AtMost: wakesMost},
	}
	if utilization != nil {
		figures = append(figures, figure{Name: "utilization", Value: f.utilization(), AtLeast: utilization})
	}
	return append(figures,
		figure{Name: "excess", Value: float64(f.excess(func(l *logged) time.Time { return l.granted })), Unit: "units", AtMost: new(0.)},
		figure{Name: "excess by arrival", Value: float64(f.excess(func(l *logged) time.Time { return l.started })), Unit: "units"},
		figure{Name: "Redis calls per task", Value: calls / float64(len(f.grants()))},
		figure{Name: "lateness p50", Value: milliseconds(quantile(late, 0.5)), Unit: "ms"},
		figure{Name: "lateness p99", Value: milliseconds(quantile(late, 0.99)), Unit: "ms"},
		figure{Name: "slots waiting for the limiter", Value: f.busy(), AtMost: new(0.05)},
	), nil
}

// reaction is fitToRunning beside its bars, and it tells of the slowest.
func (f *fleet) reaction() []figure {
	rides := f.fitToRunning()
	slices.SortFunc(rides, func(a, b ride) int { return cmp.Compare(b.took, a.took) })
	var took, own []time.Duration
	for i, r := range rides {
		held := f.stalled(r.fits, r.of.started)
		took, own = append(took, r.took), append(own, r.took-held)
		if i < 3 {
			f.o.say("%s: room at %s, picked up %v later, granted %v, running %v; the machine stood still for %v of it",
				r.of.id, r.fits.Format("15:04:05.000"), r.of.picked.Sub(r.fits), r.of.granted.Sub(r.fits), r.took, held)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	longest := time.Duration(0)
	for _, s := range f.stalls {
		longest = max(longest, s.to.Sub(s.from))
	}
	return []figure{
		{Name: "room to running p50", Value: milliseconds(quantile(took, 0.5)), Unit: "ms", AtMost: new(30.)},
		{Name: "room to running p99", Value: milliseconds(quantile(took, 0.99)), Unit: "ms", AtMost: new(100.)},
		{Name: "the same without the machine's stalls, p99", Value: milliseconds(quantile(own, 0.99)), Unit: "ms"},
		{Name: "the same, longest", Value: milliseconds(quantile(own, 1)), Unit: "ms"},
		{Name: "stall of this machine, longest", Value: milliseconds(longest), Unit: "ms"},
	}
}

// calls are the commands that Redis has processed since the last reset, those in scripts included.
func (f *fleet) calls(ctx context.Context) (float64, error) {
	stats, err := f.redis.info(ctx, "commandstats")
	if err != nil {
		return 0, err
	}
	var sum int64
	for command, line := range stats {
		if command == "cmdstat_ping" {
			continue // our own, to see stalls
		}
		var calls int64
		if _, err := fmt.Sscanf(line, "calls=%d", &calls); err != nil {
			return 0, fmt.Errorf("INFO commandstats: %s: %q: %w", command, line, err)
		}
		sum += calls
	}
	return float64(sum), nil
}

// shareError is the largest deviation of a tenant's part of the grants from its weight's part,
// between two times.
func (f *fleet) shareError(from, to time.Time) float64 {
	grants, all, weights := map[string]float64{}, 0., 0.
	for _, l := range f.grants() {
		if _, ok := grants[l.tenant]; !ok {
			grants[l.tenant] = 0
			weights += f.weight(l.tenant)
		}
		if !l.granted.Before(from) && l.granted.Before(to) {
			grants[l.tenant]++
			all++
		}
	}
	worst := 0.
	for tenant, n := range grants {
		due := f.weight(tenant) / weights
		worst = max(worst, math.Abs(n/all-due)/due)
	}
	return worst
}

func (f *fleet) weight(tenant string) float64 {
	if t, ok := f.policy.Tenants[tenant]; ok && t.Weight > 0 {
		return t.Weight
	}
	return 1
}
