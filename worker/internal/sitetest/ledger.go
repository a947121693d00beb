package sitetest

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A Ledger notes how tasks got through, over all servers of a site.
type Ledger struct {
	Mu     sync.Mutex
	Begun  time.Time
	Wakes  map[string]int // decisions about a task
	Grants []Granted      // in the order of their time
	told   map[string]time.Time
}

// A Granted is one grant.
type Granted struct {
	ID, Tenant string
	At         time.Time
	late       time.Duration // after the last expected start
}

// NewLedger returns a ledger that begins now.
func NewLedger() *Ledger {
	return &Ledger{Begun: time.Now(), Wakes: map[string]int{}, told: map[string]time.Time{}}
}

// Watch is a change for Site.Serve.
func (l *Ledger) Watch(_ *asynq.Config, c *worker.Config) {
	c.OnDecision = func(ctx context.Context, _ *asynq.Task, d throttle.Decision) {
		id, _ := asynq.GetTaskID(ctx)
		l.Mu.Lock()
		defer l.Mu.Unlock()
		l.Wakes[id]++
		if !d.Granted {
			l.told[id] = d.At.Add(d.RetryIn)
			return
		}
		g := Granted{ID: id, Tenant: d.Tenant, At: d.At}
		if told, ok := l.told[id]; ok {
			g.late = d.At.Sub(told)
		}
		l.Grants = append(l.Grants, g)
	}
}

// Sorted returns the grants so far, in the order of their time.
func (l *Ledger) Sorted() []Granted {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	slices.SortStableFunc(l.Grants, func(a, b Granted) int { return a.At.Compare(b.At) })
	return slices.Clone(l.Grants)
}

// Got returns the IDs of the tasks granted so far, in the order of their grants.
func (l *Ledger) Got() (ids []string) {
	for _, g := range l.Sorted() {
		ids = append(ids, g.ID)
	}
	return ids
}

// Count returns how many tasks were granted.
func (l *Ledger) Count() int {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	return len(l.Grants)
}

// WakesOf counts the decisions about a task.
func (l *Ledger) WakesOf(id string) int {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	return l.Wakes[id]
}

// WakesPerTask returns how often tasks came to the middleware.
func (l *Ledger) WakesPerTask() (mean float64, most int) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	total := 0
	for _, n := range l.Wakes {
		total += n
		most = max(most, n)
	}
	return float64(total) / float64(len(l.Wakes)), most
}

// Excess is the most that was granted in any window of that period, over the limit.
func (l *Ledger) Excess(limit int, period time.Duration) int {
	grants := l.Sorted()
	excess, first := 0, 0
	for i := range grants {
		for grants[i].At.Sub(grants[first].At) >= period {
			first++
		}
		excess = max(excess, i-first+1-limit)
	}
	return excess
}

// Utilization is the part of what the window allows that was granted, from the first grant to
// the last.
func (l *Ledger) Utilization(limit int, period time.Duration) float64 {
	grants := l.Sorted()
	n := len(grants)
	ideal := time.Duration(n-limit) * period / time.Duration(limit)
	return ideal.Seconds() / grants[n-1].At.Sub(grants[0].At).Seconds()
}

// A task of a plain client wakes to be denied, and to run. One of ours only runs.
const (
	OnlyRuns     = 1
	DeniedAndRun = 2
)

// WantWakes fails if a task came to the middleware more often than that.
func (s *Site) WantWakes(l *Ledger, want int) {
	s.Helper()
	if mean, most := l.WakesPerTask(); most > want {
		s.Errorf("%.2f wakes a task, at most %d: want %d", mean, most, want)
	}
}

// Spacing is the time between two appointments of a line's servers, as line_appointments.lua has it.
const Spacing = 7 * time.Millisecond

// FallbackMin is the shortest time after which workers look at a task in line, as dispatch has it.
const FallbackMin = 2 * time.Minute

// WantPace fails unless each task was granted when the windows had room for it, and at most so much
// later. Tasks of cost 1 wait all the time, for windows that they share.
func (s *Site) WantPace(grants []Granted, late time.Duration, windows ...throttle.Window) {
	s.Helper()
	for i, g := range grants {
		var fits time.Time
		for _, w := range windows {
			if before := i - int(w.Limit); before >= 0 && grants[before].At.Add(w.Period).After(fits) {
				fits = grants[before].At.Add(w.Period)
			}
		}
		if off := g.At.Sub(fits); !fits.IsZero() && (off < 0 || off > late) {
			s.Errorf("%s was granted %v after it fitted: want 0 to %v", g.ID, off, late)
		}
	}
}

// Quick is for servers that look for work as often as the project's figures are stated for.
func Quick(c *asynq.Config, _ *worker.Config) {
	c.Concurrency, c.DelayedTaskCheckInterval, c.TaskCheckInterval = 8, time.Second, 20*time.Millisecond
}

// BriskPoll is how often the servers of Brisk look for pending tasks.
const BriskPoll = 100 * time.Millisecond

// Brisk is for those where it matters less, as each look takes its time in a bubble.
func Brisk(c *asynq.Config, w *worker.Config) {
	Quick(c, w)
	c.TaskCheckInterval = BriskPoll
}

// Apart is a change that gives a server a limiter of its own, as that of another process.
func (s *Site) Apart(_ *asynq.Config, c *worker.Config) { c.Limiter = s.AnotherLimiter() }

// By has a server ask this limiter.
func By(l *throttle.Limiter) func(*asynq.Config, *worker.Config) {
	return func(_ *asynq.Config, c *worker.Config) { c.Limiter = l }
}

// AnotherLimiter returns a limiter as that of another process. The hooks see its calls.
func (s *Site) AnotherLimiter(hooks ...redis.Hook) *throttle.Limiter {
	s.Helper()
	return s.limiter(SameRedis(s.Redis), hooks...)
}

// LimiterThrough is AnotherLimiter through a Cable or a Freezer.
func (s *Site) LimiterThrough(w interface {
	Options(o *redis.Options) *redis.Options
}, hooks ...redis.Hook) *throttle.Limiter {
	s.Helper()
	return s.limiter(w.Options(SameRedis(s.Redis)), hooks...)
}

func (s *Site) limiter(o *redis.Options, hooks ...redis.Hook) *throttle.Limiter {
	s.Helper()
	own := Connect(o)
	s.Cleanup(func() { own.Close() })
	for _, h := range hooks {
		own.AddHook(h)
	}
	return s.LimiterOn(own)
}

// Client is a client of ours, as in a process of its own.
func (s *Site) Client(limiter *throttle.Limiter) *worker.Client {
	s.Helper()
	client, err := worker.NewClient(s.Asynq, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute})
	Must(s, err)
	s.Cleanup(func() { client.Close() })
	return client
}

// SleepUntil lets time pass until n tasks were granted, but not for longer than that.
func (s *Site) SleepUntil(l *Ledger, n int, most time.Duration) {
	s.Helper()
	for end := time.Now().Add(most); l.Count() < n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			s.Fatalf("after %v %d of %d tasks were granted: %v\nin the line: %v\n%s",
				most, l.Count(), n, l.Got(), s.InLine(), s.Journal)
		}
	}
	time.Sleep(time.Second) // for those that were granted to end
}

// InLine returns the tickets that have a place in some line, as QUEUE/ID.
func (s *Site) InLine() (tickets []string) {
	ctx := context.Background()
	for _, key := range s.Redis.Keys(ctx, "sluice:{*}:t").Val() {
		for _, field := range s.Redis.HKeys(ctx, key).Val() {
			queue, id, _ := strings.Cut(field, "/")
			queue, err := url.PathUnescape(queue)
			id, wrong := url.PathUnescape(id)
			if err != nil || wrong != nil {
				s.Fatal(err, wrong)
			}
			_, queue, _ = strings.Cut(queue, "/") // behind the identity of asynq's Redis
			tickets = append(tickets, queue+"/"+id)
		}
	}
	slices.Sort(tickets)
	return tickets
}

// WantNobodyInLine fails if tickets wait.
func (s *Site) WantNobodyInLine() {
	s.Helper()
	if left := s.InLine(); len(left) > 0 {
		s.Errorf("left in the line: %q", left)
	}
}

// Tasks that two quick servers have in their hands at once, or that are called at one moment, are
// in each other's order by chance.
const (
	inFlight  = 2 * throttle.MaxTake
	oneMoment = 200 * time.Millisecond
)

// WantInOrder fails unless the tasks of each tenant were granted by their numbers: IDs are
// TENANT-NUMBER.
func (s *Site) WantInOrder(l *Ledger) {
	s.Helper()
	grants := l.Sorted()
	number := func(g Granted) int {
		n, err := strconv.Atoi(strings.TrimPrefix(g.ID, g.Tenant+"-"))
		Must(s, err)
		return n
	}
	for i, late := range grants {
		for _, early := range grants[:i] {
			apart := late.At.Sub(early.At)
			if early.Tenant == late.Tenant && number(early) > number(late)+inFlight && apart > oneMoment {
				s.Errorf("%s was granted %v after %s", late.ID, apart, early.ID)
				break
			}
		}
	}
}

// EnqueueMany enqueues tasks TENANT-0000, TENANT-0001, ... by a plain client.
func (s *Site) EnqueueMany(tenant string, from, n int, opts ...asynq.Option) {
	s.Helper()
	for i := from; i < from+n; i++ {
		s.Enqueue(worker.NewTask(worker.Identity{Tenant: tenant}, "x", nil),
			append([]asynq.Option{asynq.TaskID(fmt.Sprintf("%s-%04d", tenant, i))}, opts...)...)
	}
}

// JoinMany enqueues tasks TENANT-0000, TENANT-0001, ... by our client.
func (s *Site) JoinMany(
	client *worker.Client, tenant string, from, n int, opts ...asynq.Option,
) (all []worker.Enqueued) {
	s.Helper()
	for i := from; i < from+n; i++ {
		var e worker.Enqueued
		task := worker.NewTask(worker.Identity{Tenant: tenant}, "x", nil)
		id := asynq.TaskID(fmt.Sprintf("%s-%04d", tenant, i))
		e.Info, e.Err = client.EnqueueContext(context.Background(), task,
			append([]asynq.Option{id, worker.ReportStart(&e.Start)}, opts...)...)
		if e.Err != nil {
			s.Fatal(e.Err)
		}
		all = append(all, e)
	}
	return all
}

// Shared is a policy over every task type with one window that all tenants share.
func Shared(limit int64, period time.Duration) throttle.Policy {
	p := Policy(limit, period)
	p.Windows[0].Scope = throttle.ScopeShared
	return p
}

// SetPolicy changes the policy for all limiters given.
func (s *Site) SetPolicy(change func(*throttle.Policy), limiters ...*throttle.Limiter) {
	s.Helper()
	for _, l := range limiters {
		policies := l.Policies()
		change(&policies[0])
		Must(s, l.SetPolicies(policies))
	}
}
