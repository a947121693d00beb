package worker_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A ledger notes how tasks got through, over all servers of a site.
type ledger struct {
	mu     sync.Mutex
	begun  time.Time
	wakes  map[string]int // decisions about a task
	grants []granted      // in the order of their time
	told   map[string]time.Time
}

type granted struct {
	id, tenant string
	at         time.Time
	late       time.Duration // after the time that the task was told last
}

func newLedger() *ledger {
	return &ledger{begun: time.Now(), wakes: map[string]int{}, told: map[string]time.Time{}}
}

// watch is a change for site.serve.
func (l *ledger) watch(_ *asynq.Config, c *worker.Config) {
	c.OnDecision = func(ctx context.Context, _ *asynq.Task, d throttle.Decision) {
		id, _ := asynq.GetTaskID(ctx)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.wakes[id]++
		if !d.Granted {
			l.told[id] = d.At.Add(d.RetryIn)
			return
		}
		g := granted{id: id, tenant: d.Tenant, at: d.At}
		if told, ok := l.told[id]; ok {
			g.late = d.At.Sub(told)
		}
		l.grants = append(l.grants, g)
	}
}

// sorted returns the grants so far, in the order of their time.
func (l *ledger) sorted() []granted {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.SortStableFunc(l.grants, func(a, b granted) int { return a.at.Compare(b.at) })
	return slices.Clone(l.grants)
}

// got returns the IDs of the tasks granted so far, in the order of their grants.
func (l *ledger) got() (ids []string) {
	for _, g := range l.sorted() {
		ids = append(ids, g.id)
	}
	return ids
}

func (l *ledger) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.grants)
}

// wakesOf counts the decisions about a task.
func (l *ledger) wakesOf(id string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.wakes[id]
}

func (l *ledger) wakesPerTask() (mean float64, most int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	total := 0
	for _, n := range l.wakes {
		total += n
		most = max(most, n)
	}
	return float64(total) / float64(len(l.wakes)), most
}

// excess is the most that was granted in any window of that period, over the limit.
func (l *ledger) excess(limit int, period time.Duration) int {
	grants := l.sorted()
	excess, first := 0, 0
	for i := range grants {
		for grants[i].at.Sub(grants[first].at) >= period {
			first++
		}
		excess = max(excess, i-first+1-limit)
	}
	return excess
}

// utilization is the part of what the window allows that was granted, from the first grant to
// the last.
func (l *ledger) utilization(limit int, period time.Duration) float64 {
	grants := l.sorted()
	n := len(grants)
	ideal := time.Duration(n-limit) * period / time.Duration(limit)
	return ideal.Seconds() / grants[n-1].at.Sub(grants[0].at).Seconds()
}

// late returns how long after what it was told last a task was granted, at the 50th and the 99th
// percentile of those that were told.
func (l *ledger) late() (half, most time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var late []time.Duration
	for _, g := range l.grants {
		if _, ok := l.told[g.id]; ok {
			late = append(late, g.late)
		}
	}
	slices.Sort(late)
	return late[len(late)/2], late[len(late)*99/100]
}

// quick is for servers that look for work as often as the project's figures are stated for.
func quick(c *asynq.Config, _ *worker.Config) {
	c.Concurrency, c.DelayedTaskCheckInterval, c.TaskCheckInterval = 8, time.Second, 20*time.Millisecond
}

// brisk is for those where it matters less, as each look takes its time in a bubble.
func brisk(c *asynq.Config, w *worker.Config) {
	quick(c, w)
	c.TaskCheckInterval = 100 * time.Millisecond
}

// apart is a change that gives a server a limiter of its own, as that of another process.
func (s *site) apart(_ *asynq.Config, c *worker.Config) { c.Limiter = s.anotherLimiter(s.redis) }

func (s *site) anotherLimiter(client *redis.Client) *throttle.Limiter {
	s.Helper()
	own := redis.NewClient(like(client))
	s.Cleanup(func() { own.Close() })
	limiter, err := throttle.New(throttle.Config{Client: own, Policies: s.limiter.Policies()})
	if err != nil {
		s.Fatal(err)
	}
	return limiter
}

// planner is a client of ours, as in a process of its own.
func (s *site) planner(limiter *throttle.Limiter) *worker.Client {
	s.Helper()
	client, err := worker.NewClient(s.asynq, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { client.Close() })
	return client
}

// sleepUntil lets time pass until n tasks were granted, but not for longer than that.
func (s *site) sleepUntil(l *ledger, n int, most time.Duration) {
	s.Helper()
	for end := time.Now().Add(most); l.count() < n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			s.Fatalf("after %v %d of %d tasks were granted: %v\nin the line: %v\n%s", most, l.count(), n, l.got(), s.inLine(), s.log)
		}
	}
	time.Sleep(time.Second) // for those that were granted to end
}

// inLine returns the tickets that have a place in some line.
func (s *site) inLine() (tickets []string) {
	ctx := context.Background()
	for _, key := range s.redis.Keys(ctx, "sluice:{*}:t").Val() {
		for _, field := range s.redis.HKeys(ctx, key).Val() {
			ticket, err := url.PathUnescape(field)
			if err != nil {
				s.Fatal(err)
			}
			tickets = append(tickets, ticket)
		}
	}
	slices.Sort(tickets)
	return tickets
}

func (s *site) wantNobodyInLine() {
	s.Helper()
	if left := s.inLine(); len(left) > 0 {
		s.Errorf("left in the line: %q", left)
	}
}

// Tasks that two quick servers have in their hands at once, or that are called at one moment, are
// in each other's order by chance.
const (
	inFlight  = 32
	oneMoment = 200 * time.Millisecond
)

// wantInOrder fails unless the tasks of each tenant were granted by their numbers: IDs are TENANT-NUMBER.
func (s *site) wantInOrder(l *ledger) {
	s.Helper()
	grants := l.sorted()
	number := func(g granted) int {
		n, err := strconv.Atoi(strings.TrimPrefix(g.id, g.tenant+"-"))
		if err != nil {
			s.Fatal(err)
		}
		return n
	}
	for i, late := range grants {
		for _, early := range grants[:i] {
			if early.tenant == late.tenant && number(early) > number(late)+inFlight && late.at.Sub(early.at) > oneMoment {
				s.Errorf("%s was granted %v after %s", late.id, late.at.Sub(early.at), early.id)
				break
			}
		}
	}
}

// enqueueMany enqueues tasks TENANT-0000, TENANT-0001, ... by a plain client.
func (s *site) enqueueMany(tenant string, from, n int, opts ...asynq.Option) {
	s.Helper()
	for i := from; i < from+n; i++ {
		s.enqueue(worker.NewTask(worker.Identity{Tenant: tenant}, "x", nil),
			append([]asynq.Option{asynq.TaskID(fmt.Sprintf("%s-%04d", tenant, i))}, opts...)...)
	}
}

// planMany plans tasks TENANT-0000, TENANT-0001, ... by the client.
func (s *site) planMany(client *worker.Client, tenant string, from, n int, opts ...asynq.Option) (infos []*worker.TaskInfo) {
	s.Helper()
	for i := from; i < from+n; i++ {
		info, err := client.EnqueueContext(context.Background(), worker.NewTask(worker.Identity{Tenant: tenant}, "x", nil),
			append([]asynq.Option{asynq.TaskID(fmt.Sprintf("%s-%04d", tenant, i))}, opts...)...)
		if err != nil {
			s.Fatal(err)
		}
		infos = append(infos, info)
	}
	return infos
}

// shared is a policy over every task type with one window that all tenants share.
func shared(limit int64, period time.Duration) throttle.Policy {
	p := policy(limit, period)
	p.Windows[0].Per = []string{}
	return p
}

// A backlog of a plain client drains at the rate of the tightest window, in order, and every task
// wakes twice: to be denied, and to run.
func TestBacklogDrains(t *testing.T) {
	t.Parallel()
	minuteAndBurst := policy(20, time.Minute)
	minuteAndBurst.Windows = append(minuteAndBurst.Windows, throttle.Window{Name: "burst", Limit: 5, Period: 3 * time.Second})
	for _, row := range []struct {
		name        string
		policy      throttle.Policy
		limit       int
		period      time.Duration
		tasks       int
		wakes       float64
		utilization float64
		pace        func(*asynq.Config, *worker.Config)
	}{
		{"20 per second", policy(20, time.Second), 20, time.Second, 200, 2.1, 0.95, quick},
		{"200 per 10 seconds", policy(200, 10*time.Second), 200, 10 * time.Second, 400, 2.1, 0.95, quick},
		{"20 per minute and 5 per 3 seconds", minuteAndBurst, 20, time.Minute, 60, 2.1, 0.9, calm},
		{"5 per 100 ms", policy(5, 100*time.Millisecond), 5, 100 * time.Millisecond, 100, 2.2, 0.85, quick},
		{"20 per second, shared", shared(20, time.Second), 20, time.Second, 200, 2.1, 0.95, quick},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, row.policy)
				l := newLedger()
				s.enqueueMany("acme", 0, row.tasks)
				s.serve(s.ok, l.watch, row.pace, s.apart)
				s.serve(s.ok, l.watch, row.pace, s.apart)
				s.sleepUntil(l, row.tasks, 2*time.Duration(row.tasks/row.limit)*row.period)
				mean, most := l.wakesPerTask()
				if mean > row.wakes || most > 4 {
					t.Errorf("%.2f wakes a task, at most %d: want %.2f, at most 4", mean, most, row.wakes)
				}
				for _, w := range row.policy.Windows {
					if n := l.excess(int(w.Limit), w.Period); n != 0 {
						t.Errorf("%d more than the limit of %d per %v", n, w.Limit, w.Period)
					}
				}
				u := l.utilization(row.limit, row.period)
				if u < row.utilization {
					t.Errorf("utilization %.2f: want %.2f", u, row.utilization)
				}
				half, late := l.late()
				t.Logf("wakes %.3f, at most %d; utilization %.3f; late %v, %v", mean, most, u, half, late)
				s.wantInOrder(l)
				s.wantNobodyInLine()
				s.wantCounters(counters{Processed: int64(row.tasks)})
			})
		})
	}
}

// A planned backlog is never denied.
func TestPlannedBacklogDrains(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(20, time.Second))
		l := newLedger()
		client := s.planner(s.anotherLimiter(s.redis))
		s.serve(s.ok, l.watch, quick, s.apart)
		s.serve(s.ok, l.watch, quick, s.apart)
		infos := s.planMany(client, "acme", 0, 200)
		s.sleepUntil(l, 200, 20*time.Second)
		if mean, most := l.wakesPerTask(); mean > 1.1 || most > 2 {
			t.Errorf("%.2f wakes a task, at most %d: want 1.1, at most 2", mean, most)
		} else {
			t.Logf("%.2f wakes a task, at most %d, utilization %.3f", mean, most, l.utilization(20, time.Second))
		}
		if n := l.excess(20, time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		if u := l.utilization(20, time.Second); u < 0.95 {
			t.Errorf("utilization %.2f", u)
		}
		s.wantInOrder(l)
		for i, g := range l.sorted() {
			if off := g.at.Sub(infos[i].StartsAt); off < -time.Second || off > time.Second {
				t.Errorf("%s started %v after it was to", g.id, off)
			}
		}
		s.wantNobodyInLine()
		s.wantCounters(counters{Processed: 200})
	})
}

// Four tenants share a window by weight, two of which come later, and nothing is left idle.
func TestWeightedTenantsShare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := shared(20, time.Minute)
		p.Tenants = map[string]throttle.Tenant{"dune": {Weight: 2}}
		s := synctestSite(t, p)
		l := newLedger()
		s.serve(s.ok, l.watch, calm, s.apart)
		s.serve(s.ok, l.watch, calm, s.apart)
		s.enqueueMany("acme", 0, 130)
		s.enqueueMany("beta", 0, 120)
		time.Sleep(5 * time.Minute)
		s.enqueueMany("chip", 0, 90)
		s.enqueueMany("dune", 0, 140)
		time.Sleep(2 * time.Minute)
		from := time.Now()
		time.Sleep(7 * time.Minute)
		to := time.Now()
		time.Sleep(12 * time.Minute)

		const tasks = 130 + 120 + 90 + 140
		if n := l.count(); n != tasks {
			t.Fatalf("%d of %d tasks were granted", n, tasks)
		}
		share := map[string]float64{}
		total := 0.0
		for _, g := range l.sorted() {
			if g.at.After(from) && g.at.Before(to) {
				share[g.tenant]++
				total++
			}
		}
		for tenant, weight := range map[string]float64{"acme": 1, "beta": 1, "chip": 1, "dune": 2} {
			fair := weight / 5
			if off := share[tenant]/total/fair - 1; off < -0.05 || off > 0.05 {
				t.Errorf("%s had %.3f of what was granted while all waited: want %.3f", tenant, share[tenant]/total, fair)
			}
		}
		// Those that waited before the others came start later than they were told: some of them come
		// by themselves in between.
		mean, most := l.wakesPerTask()
		if mean > 2.6 {
			t.Errorf("%.2f wakes a task", mean)
		}
		u := l.utilization(20, time.Minute)
		if u < 0.95 {
			t.Errorf("utilization %.3f", u)
		}
		if n := l.excess(20, time.Minute); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		t.Logf("wakes %.2f, at most %d, utilization %.3f, shares %v of %v", mean, most, u, share, total)
		s.wantNobodyInLine()
		s.wantCounters(counters{Processed: tasks})
	})
}

// Four tenants, the last of weight 2, one of which has much waiting when the others come.
func TestWeightedTenantsCome(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := shared(50, time.Second)
		p.Tenants = map[string]throttle.Tenant{"dune": {Weight: 2}}
		s := synctestSite(t, p)
		l := newLedger()
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.enqueueMany("acme", 0, 600)
		time.Sleep(4 * time.Second)
		s.enqueueMany("beta", 0, 200)
		s.enqueueMany("chip", 0, 200)
		time.Sleep(4 * time.Second)
		s.enqueueMany("dune", 0, 200)
		s.sleepUntil(l, 1200, 30*time.Second)
		mean, most := l.wakesPerTask()
		if mean > 2.2 || most > 4 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		u := l.utilization(50, time.Second)
		if u < 0.95 {
			t.Errorf("utilization %.3f", u)
		}
		if n := l.excess(50, time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		t.Logf("wakes %.2f, at most %d, utilization %.3f", mean, most, u)
	})
}

// What one process alone knows of a line, its leader hears of in time; and for what comes sooner that
// process looks itself.
func TestWhoLeadsHearsOfNews(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		period  time.Duration
		planned bool
		tasks   int
		most    time.Duration
	}{
		{"denied by another worker", 3 * time.Second, false, 3, 8 * time.Second},
		{"denied by another worker, and due soon", 300 * time.Millisecond, false, 2, 380 * time.Millisecond},
		{"planned by a client", 3 * time.Second, true, 3, 8 * time.Second},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := policy(1, row.period)
				p.Windows = append(p.Windows,
					throttle.Window{Name: "tokens", Limit: 1, Period: time.Minute, Unit: "tokens"},
					throttle.Window{Name: "all", Limit: 1000, Period: time.Minute, Per: []string{}})
				s := synctestSite(t, p)
				l := newLedger()
				s.serve(s.ok, l.watch, quick, s.apart)
				for range 2 { // one runs, one waits for a minute
					s.enqueue(worker.NewTask(worker.Identity{Tenant: "slow", Cost: map[string]int64{"tokens": 1}}, "x", nil))
				}
				time.Sleep(5 * time.Second)
				if row.planned {
					client := s.planner(s.anotherLimiter(s.redis))
					s.planMany(client, "quick", 0, row.tasks)
					client.Close()
				} else {
					// The leader picks nothing up that the other could.
					s.serve(s.ok, l.watch, quick, s.apart, func(c *asynq.Config, _ *worker.Config) { c.Queues = map[string]int{"other": 1} })
					s.enqueueMany("quick", 0, row.tasks, asynq.Queue("other"))
				}
				s.sleepUntil(l, 1+row.tasks, 20*time.Second)
				grants := l.sorted()
				if took := grants[row.tasks].at.Sub(grants[1].at); took > row.most {
					t.Errorf("%d tasks at one per %v took %v", row.tasks, row.period, took)
				}
				s.sleepUntil(l, 2+row.tasks, 70*time.Second)
				s.wantNobodyInLine()
			})
		})
	}
}

// A client alone, whose process ends before any worker's begins, leaves a line that is found.
func TestLineOfAClientAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(1, 10*time.Second))
		s.fill("acme") // so that none is pending, and only the line tells of them
		client := s.planner(s.anotherLimiter(s.redis))
		infos := s.planMany(client, "acme", 0, 3)
		client.Close()
		l := newLedger()
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.sleepUntil(l, 3, 35*time.Second)
		for i, g := range l.sorted() {
			if off := g.at.Sub(infos[i].StartsAt); off < -time.Millisecond || off > 2*time.Second {
				t.Errorf("%s started %v after it was to", g.id, off)
			}
			if n := l.wakesOf(g.id); n != 1 {
				t.Errorf("%s woke %d times", g.id, n)
			}
		}
		s.wantNobodyInLine()
	})
}

// Servers and clients may share a limiter: whoever ends leaves the line to those that are left.
func TestOneLimiterForAll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(2, 2*time.Second))
		l := newLedger()
		first := s.planner(s.limiter)
		s.planMany(first, "acme", 0, 4) // the client listens, as nobody else does
		one := s.serve(s.ok, l.watch, brisk)
		two := s.serve(s.ok, l.watch, brisk)
		s.planMany(first, "acme", 4, 4)
		s.sleepUntil(l, 8, 10*time.Second)
		first.Close()
		s.planMany(s.planner(s.limiter), "acme", 8, 6)
		s.sleepUntil(l, 14, 10*time.Second)
		two.Shutdown() // who listened last
		s.enqueueMany("acme", 14, 6)
		s.sleepUntil(l, 20, 10*time.Second)
		if u := l.utilization(2, 2*time.Second); u < 0.6 {
			t.Errorf("utilization %.2f", u)
		}
		s.wantNobodyInLine()
		one.Shutdown()
		if s.limiter.Listening() {
			t.Error("who has ended listens")
		}
		s.planMany(s.planner(s.limiter), "acme", 20, 4) // again there is no server
		if !s.limiter.Listening() {
			t.Error("a client that plans does not listen")
		}
		s.serve(s.ok, l.watch, brisk)
		s.sleepUntil(l, 24, 10*time.Second)
		if mean, most := l.wakesPerTask(); most > 2 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
	})
}

// A worker that stops gives its lines to another, one that dies leaves them by the end of its lease.
func TestLinesChangeHands(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		dies bool
	}{{"stopped", false}, {"died", true}} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, shared(20, 2*time.Second))
				l := newLedger()
				var c cable
				through := redis.NewClient(c.options(like(s.redis)))
				defer through.Close()
				own := s.anotherLimiter(through)
				s.enqueueMany("acme", 0, 300)
				leading := s.asynq
				s.asynq = dialed{c.options(like(s.redis))}
				server := s.serve(s.ok, l.watch, brisk, func(_ *asynq.Config, c *worker.Config) { c.Limiter = own })
				s.asynq = leading
				time.Sleep(5 * time.Second) // it leads
				s.serve(s.ok, l.watch, brisk, s.apart)
				time.Sleep(5 * time.Second)
				if row.dies {
					c.cut()
				} else {
					server.Shutdown()
				}
				s.sleepUntil(l, 300, 35*time.Second)
				mean, most := l.wakesPerTask()
				if mean > 2.2 || most > 4 {
					t.Errorf("%.2f wakes a task, at most %d", mean, most)
				}
				if n := l.excess(20, 2*time.Second); n != 0 {
					t.Errorf("%d more than the limit", n)
				}
				u := l.utilization(20, 2*time.Second)
				if !row.dies && u < 0.93 || u < 0.8 { // looking for work every 100 ms takes up to 0.05
					t.Errorf("utilization %.3f", u)
				}
				t.Logf("wakes %.2f, at most %d, utilization %.3f", mean, most, u)
				s.wantInOrder(l)
				if row.dies {
					c.mend()
					server.Shutdown()
					time.Sleep(2 * time.Second) // go-redis tries to connect in the background
				}
			})
		})
	}
}

// Without any worker for a minute the line keeps its order, and drains at its rate afterwards.
func TestWorkersStopped(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(20, time.Second))
		l := newLedger()
		s.enqueueMany("acme", 0, 300)
		server := s.serve(s.ok, l.watch, brisk, s.apart)
		time.Sleep(5 * time.Second)
		server.Shutdown()
		done := l.count()
		time.Sleep(time.Minute)
		begun := time.Now()
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.sleepUntil(l, 300, time.Minute)
		ideal := time.Duration(300-done) * time.Second / 20
		if took := l.sorted()[299].at.Sub(begun); took > ideal*11/10 {
			t.Errorf("drained in %v: want %v", took, ideal)
		}
		if mean, most := l.wakesPerTask(); mean > 2.2 || most > 4 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		if n := l.excess(20, time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		s.wantInOrder(l)
		s.wantNobodyInLine()
	})
}

// setPolicy changes the policy for all limiters given.
func (s *site) setPolicy(change func(*throttle.Policy), limiters ...*throttle.Limiter) {
	s.Helper()
	for _, l := range limiters {
		policies := l.Policies()
		change(&policies[0])
		if err := l.SetPolicies(policies); err != nil {
			s.Fatal(err)
		}
	}
}

// Limits and weights that are changed hold at once for those that wait, and also if it is a new
// worker that knows them.
func TestChangesActOnTheBacklog(t *testing.T) {
	t.Parallel()
	own := func(limit int64) map[string]throttle.Override {
		return map[string]throttle.Override{"window": {Limit: limit}}
	}
	type counts map[string]int
	for _, row := range []struct {
		name         string
		policy       throttle.Policy
		change       func(*throttle.Policy)
		soon, minute counts // granted in the 10 s and in the minute after
	}{
		{"limit raised", policy(10, time.Minute), func(p *throttle.Policy) { p.Windows[0].Limit = 40 },
			counts{"acme": 30, "beta": 30}, counts{"acme": 30 + 10, "beta": 30 + 10}},
		{"limit cut", policy(10, time.Minute), func(p *throttle.Policy) { p.Windows[0].Limit = 3 },
			counts{}, counts{"acme": 3, "beta": 3}},
		{"limit raised, shared", shared(10, time.Minute), func(p *throttle.Policy) { p.Windows[0].Limit = 40 },
			counts{"acme": 15, "beta": 15}, counts{"acme": 20, "beta": 20}},
		{"tenant's own limit", policy(10, time.Minute), func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Windows: own(30)}} },
			counts{"acme": 20}, counts{"acme": 20 + 10, "beta": 10}},
		{"tenant's own limit, beside a shared window", func() throttle.Policy {
			p := policy(10, time.Minute)
			p.Windows = append(p.Windows, throttle.Window{Name: "all", Limit: 1000, Period: time.Minute, Per: []string{}})
			return p
		}(), func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Windows: own(30)}} },
			counts{"acme": 20}, counts{"acme": 20 + 10, "beta": 10}},
		{"weight", shared(10, time.Minute), func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Weight: 4}} },
			counts{}, counts{"acme": 8, "beta": 2}},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %v", row.name, restart), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := synctestSite(t, row.policy)
					l := newLedger()
					var limiters []*throttle.Limiter
					var servers []*worker.Server
					serve := func() {
						limiter := s.anotherLimiter(s.redis)
						limiters = append(limiters, limiter)
						servers = append(servers, s.serve(s.ok, l.watch, calm, func(_ *asynq.Config, c *worker.Config) { c.Limiter = limiter }))
					}
					serve()
					serve()
					// Nobody who waits wakes by itself in the time of the test: it takes a call.
					s.enqueueMany("acme", 0, 100)
					s.enqueueMany("beta", 0, 100)
					time.Sleep(30 * time.Second)
					before := l.count()
					if restart {
						servers[0].Shutdown()
						servers[1].Shutdown()
						s.setPolicy(row.change, s.limiter)
						serve()
					} else {
						s.setPolicy(row.change, limiters...)
					}
					for _, after := range []struct {
						sleep time.Duration
						want  counts
					}{{10 * time.Second, row.soon}, {50 * time.Second, row.minute}} {
						time.Sleep(after.sleep)
						got := counts{}
						for _, g := range l.sorted()[before:] {
							got[g.tenant]++
						}
						if !maps.Equal(got, after.want) {
							t.Errorf("%v after the last look, granted: %v, want %v", after.sleep, got, after.want)
						}
					}
				})
			})
		}
	}
}

// A trap springs when a client is about to send a script with that key among its first, once.
type trap struct {
	key    string
	once   sync.Once
	spring func() error
}

func (*trap) DialHook(next redis.DialHook) redis.DialHook { return next }
func (*trap) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (tr *trap) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) (err error) {
		if slices.Contains(cmd.Args(), any(tr.key)) {
			tr.once.Do(func() { err = tr.spring() })
		}
		if err != nil {
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

// A worker that dies between the script's reply and the wake takes nobody with it: what it was to
// wake is called again when the holds have run out.
func TestWorkerDiesBeforeItWakes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(10, 2*time.Second))
		l := newLedger()
		var c cable
		through := redis.NewClient(c.options(like(s.redis)))
		defer through.Close()
		own := s.anotherLimiter(through)
		dead := &trap{key: "asynq:{default}:sluice:woken", spring: func() error { c.cut(); return errors.New("it died") }}
		theirs, ours := s.configs()
		l.watch(&theirs, &ours)
		brisk(&theirs, &ours)
		ours.Limiter = own
		server, err := worker.NewServer(withHook{dialed{c.options(like(s.redis))}, dead}, theirs, ours)
		if err != nil {
			t.Fatal(err)
		}
		s.enqueueMany("acme", 0, 60)
		if err := server.Start(asynq.HandlerFunc(s.ok)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1500 * time.Millisecond) // ten ran, the others wait, and it leads
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.sleepUntil(l, 60, 25*time.Second) // instead of 12 s, for a hold and a lease
		if _, most := l.wakesPerTask(); most > 3 {
			t.Errorf("a task woke %d times", most)
		}
		if n := l.excess(10, 2*time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		s.wantInOrder(l)
		s.wantNobodyInLine()
		c.mend()
		server.Shutdown()
		time.Sleep(2 * time.Second)
	})
}

// A worker that reaches the limiter's Redis and not asynq's leaves the leading to one that can wake.
func TestWhoCannotWakeDoesNotLead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(10, 2*time.Second))
		l := newLedger()
		var c cable
		whole := s.asynq
		s.asynq = dialed{c.options(like(s.redis))}
		server := s.serve(s.ok, l.watch, brisk, s.apart)
		s.asynq = whole
		s.enqueueMany("acme", 0, 60)
		time.Sleep(1500 * time.Millisecond)
		s.serve(s.ok, l.watch, brisk, s.apart)
		c.cut()
		s.sleepUntil(l, 60, 30*time.Second)
		s.wantNobodyInLine()
		c.mend()
		server.Shutdown()
		time.Sleep(2 * time.Second)
	})
}

// Tasks deleted with asynq's Inspector leave the line when their turn comes, and their room is for the next.
func TestDeletedTasksLeave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(20, time.Second))
		l := newLedger()
		s.planMany(s.planner(s.anotherLimiter(s.redis)), "acme", 0, 400)
		for i := range 400 {
			if i >= 20 && i%2 == 0 {
				if err := s.inspector.DeleteTask("default", fmt.Sprintf("acme-%04d", i)); err != nil {
					t.Fatal(err)
				}
			}
		}
		s.serve(s.ok, l.watch, quick, s.apart)
		s.sleepUntil(l, 210, 20*time.Second)
		if u := l.utilization(20, time.Second); u < 0.93 { // 0.95 is all that 210 tasks in twenties can have
			t.Errorf("utilization %.3f", u)
		} else {
			t.Logf("utilization %.3f", u)
		}
		if mean, most := l.wakesPerTask(); most > 2 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		s.wantNobodyInLine()
		s.wantCounters(counters{Processed: 210})
	})
}

// A task may be called between its planning and its enqueueing: it is woken shortly after, and
// keeps its place.
func TestCalledBeforeEnqueued(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, time.Second))
		limiter := s.anotherLimiter(s.redis)
		client, l := s.planner(limiter), newLedger()
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.planMany(client, "acme", 0, 2)
		late := throttle.Request{Policy: "api", Tenant: "acme", Ticket: "default/late"}
		if _, err := limiter.Plan(t.Context(), late, 0, 0); err != nil {
			t.Fatal(err)
		}
		s.planMany(client, "acme", 2, 2)
		// It is called with the next look at the line, and there at the last try to wake it.
		for calls := 0; calls < 3; calls = int(s.redis.ZCard(t.Context(), "sluice:{api}:c").Val()) + l.count() {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(20 * time.Millisecond)
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("late"), asynq.ProcessIn(time.Hour))
		s.sleepUntil(l, 5, 8*time.Second)
		if order := l.got(); order[3] != "late" || l.wakesOf("late") != 2 {
			t.Errorf("they ran in the order %q, and late woke %d times", order, l.wakesOf("late"))
		}
		s.wantNobodyInLine()
	})
}

// A call never runs a task again that has run: neither one that is retained nor one in the archive.
func TestCallsRunNothingAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(2, time.Second))
		l := newLedger()
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			if task.Type() == "bad" {
				return errors.New("boom")
			}
			return s.ok(ctx, task)
		}, l.watch, brisk)
		acme := worker.Identity{Tenant: "acme"}
		s.enqueue(worker.NewTask(acme, "x", nil), asynq.TaskID("retained"), asynq.Retention(time.Hour))
		s.enqueue(worker.NewTask(acme, "bad", nil), asynq.TaskID("archived"), asynq.MaxRetry(0))
		time.Sleep(time.Second)
		s.waitState(asynq.TaskStateCompleted, "retained")
		s.waitState(asynq.TaskStateArchived, "archived")
		for range 2 {
			for _, id := range []string{"retained", "archived", "never was"} {
				if _, err := s.limiter.Plan(t.Context(), throttle.Request{Policy: "api", Tenant: "acme", Ticket: "default/" + id}, 0, 0); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(5 * time.Second)
			s.wantNobodyInLine()
		}
		// One that waits is archived by hand.
		s.enqueueMany("acme", 0, 6)
		time.Sleep(100 * time.Millisecond)
		if err := s.inspector.ArchiveTask("default", "acme-0005"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		s.wantNobodyInLine()
		s.waitState(asynq.TaskStateCompleted, "retained")
		s.waitState(asynq.TaskStateArchived, "archived", "acme-0005")
		if n := l.count(); n != 7 {
			t.Errorf("%d tasks were granted, want 7: %q", n, l.got())
		}
		for _, id := range []string{"retained", "archived"} {
			if n := l.wakesOf(id); n != 1 {
				t.Errorf("%s woke %d times", id, n)
			}
		}
	})
}

// A task may be called before asynq has put it down: it is woken shortly after.
func TestCalledWhileActive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, 200*time.Millisecond))
		l := newLedger()
		s.serve(s.ok, l.watch, brisk, func(_ *asynq.Config, c *worker.Config) {
			watched := c.OnDecision
			c.OnDecision = func(ctx context.Context, task *asynq.Task, d throttle.Decision) {
				watched(ctx, task, d)
				if !d.Granted {
					time.Sleep(500 * time.Millisecond) // its turn comes before it is put down
				}
			}
		})
		s.enqueueMany("acme", 0, 2)
		s.sleepUntil(l, 2, 1500*time.Millisecond)
		if n := l.wakesOf(l.got()[1]); n != 2 {
			t.Errorf("it woke %d times", n)
		}
		s.wantNobodyInLine()
	})
}

// While a queue is paused, the line goes on without those of its tasks that are called, and they
// wake at most once in vain afterwards.
func TestPausedQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(10, time.Second))
		l := newLedger()
		s.serve(s.ok, l.watch, brisk, func(c *asynq.Config, _ *worker.Config) { c.Queues = map[string]int{"default": 1, "other": 1} })
		s.enqueueMany("acme", 0, 100)
		time.Sleep(1500 * time.Millisecond)
		if err := s.inspector.PauseQueue("default"); err != nil {
			t.Fatal(err)
		}
		before := l.count()
		s.enqueueMany("beta", 0, 100, asynq.Queue("other"))
		time.Sleep(30 * time.Second)
		others := l.count() - before
		if others < 60 {
			t.Errorf("%d of 100 tasks of the other queue were granted in the meantime", others)
		}
		if err := s.inspector.UnpauseQueue("default"); err != nil {
			t.Fatal(err)
		}
		s.sleepUntil(l, 200, 30*time.Second)
		mean, most := l.wakesPerTask()
		if most > 3 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		t.Logf("%d of the other queue; %.2f wakes a task, at most %d", others, mean, most)
		if n := l.excess(10, time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		s.wantNobodyInLine()
	})
}

// Tasks that asynq itself enqueues, or holds back, take their place when they are denied.
func TestTasksOfAsynqsOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(10, 20*time.Second))
		l := newLedger()
		scheduler := asynq.NewScheduler(s.asynq, &asynq.SchedulerOpts{LogLevel: asynq.FatalLevel})
		acme := worker.Identity{Tenant: "acme"}
		if _, err := scheduler.Register("@every 1s", worker.NewTask(acme, "scheduled", nil)); err != nil {
			t.Fatal(err)
		}
		if err := scheduler.Start(); err != nil {
			t.Fatal(err)
		}
		periodic, err := asynq.NewPeriodicTaskManager(asynq.PeriodicTaskManagerOpts{
			PeriodicTaskConfigProvider: provider{{Cronspec: "@every 2s", Task: worker.NewTask(acme, "periodic", nil)}},
			RedisConnOpt:               s.asynq, SyncInterval: time.Minute, SchedulerOpts: &asynq.SchedulerOpts{LogLevel: asynq.FatalLevel},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := periodic.Start(); err != nil {
			t.Fatal(err)
		}
		s.serve(s.ok, l.watch, brisk)
		s.enqueueMany("acme", 0, 5, asynq.ProcessIn(5*time.Second))
		s.enqueueMany("acme", 5, 5, asynq.ProcessAt(time.Now().Add(10*time.Second)))
		time.Sleep(20500 * time.Millisecond)
		scheduler.Shutdown()
		periodic.Shutdown()
		time.Sleep(80 * time.Second)
		mean, most := l.wakesPerTask()
		if n := l.count(); n != 20+10+10 || most > 2 {
			t.Errorf("%d tasks were granted of 40, %.2f wakes a task, at most %d", n, mean, most)
		}
		if n := l.excess(10, 20*time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		s.wantNobodyInLine()
	})
}

type provider []*asynq.PeriodicTaskConfig

func (p provider) GetConfigs() ([]*asynq.PeriodicTaskConfig, error) { return p, nil }

// A group is throttled as the task that it becomes.
func TestGroups(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, 5*time.Second))
		l := newLedger()
		s.serve(s.ok, l.watch, brisk, func(c *asynq.Config, _ *worker.Config) {
			c.GroupAggregator = asynq.GroupAggregatorFunc(func(group string, tasks []*asynq.Task) *asynq.Task {
				return worker.NewTask(worker.Identity{Tenant: group}, "group", nil)
			})
			c.GroupGracePeriod, c.GroupMaxSize = time.Second, 5
		})
		client := s.planner(s.limiter)
		for i := range 20 {
			info, err := client.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "acme"}, "part", nil, asynq.Group("acme")))
			if err != nil || info.State != asynq.TaskStateAggregating {
				t.Fatalf("part %d: %v, %v", i, info, err)
			}
		}
		if tickets := s.inLine(); len(tickets) != 0 {
			t.Errorf("parts of a group stand in line: %q", tickets)
		}
		s.sleepUntil(l, 4, 25*time.Second)
		if mean, most := l.wakesPerTask(); most > 2 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		s.wantNobodyInLine()
		if ids := l.got(); len(ids) != 4 {
			t.Errorf("granted: %q", ids)
		}
	})
}

// Tasks whose policy is gone run when they come by themselves.
func TestPolicyRemovedWhileTasksWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, 5*time.Minute))
		s.serve(s.ok, calm)
		s.enqueueMany("acme", 0, 3)
		time.Sleep(5 * time.Second)
		if err := s.limiter.SetPolicies(nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(16 * time.Minute)
		if got := s.runs(); !slices.Equal(got, []string{"acme-0000", "acme-0001", "acme-0002"}) {
			t.Errorf("ran: %q", got)
		}
		s.wantCounters(counters{Processed: 3})
	})
}

// A tenant that becomes exempt while its tasks wait leaves nothing in the line.
func TestExemptWhileTasksWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, time.Minute))
		l := newLedger()
		s.serve(s.ok, l.watch, calm)
		s.enqueueMany("acme", 0, 5)
		time.Sleep(5 * time.Second)
		s.setPolicy(func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Exempt: true}} }, s.limiter)
		s.sleepUntil(l, 5, 5*time.Minute)
		s.wantNobodyInLine()
	})
}

// Where a policy fails open, tasks that wait run when they come by themselves, and the places that they
// leave behind while Redis is away are found to be empty.
func TestFailOpenWhileTasksWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := shared(1, 2*time.Minute)
		p.Fail = throttle.FailOpen
		s := synctestSite(t, p)
		l := newLedger()
		var c cable
		through := redis.NewClient(c.options(like(s.redis)))
		defer through.Close()
		limiter := s.anotherLimiter(through)
		s.serve(s.ok, l.watch, calm, func(_ *asynq.Config, c *worker.Config) { c.Limiter = limiter })
		s.enqueueMany("acme", 0, 3)
		time.Sleep(5 * time.Second)
		c.cut()
		time.Sleep(10 * time.Minute)
		if got := s.runs(); !slices.Equal(got, []string{"acme-0000", "acme-0001", "acme-0002"}) {
			t.Errorf("ran while Redis is away: %q", got)
		}
		if n := len(s.inLine()); n != 2 {
			t.Errorf("%d stand in line: want those two that could not leave it", n)
		}
		c.mend()
		time.Sleep(3 * time.Minute)
		s.wantNobodyInLine()
		s.wantCounters(counters{Processed: 3})
	})
}

// With requeue: earliest-reset nobody stands in line.
func TestEarliestResetKnowsNoLine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := shared(5, 2*time.Second)
		p.Requeue = throttle.RequeueEarliestReset
		s := synctestSite(t, p)
		l := newLedger()
		s.serve(s.ok, l.watch, brisk)
		s.enqueueMany("acme", 0, 15)
		info := s.planMany(s.planner(s.limiter), "acme", 15, 1)[0]
		if info.State != asynq.TaskStatePending {
			t.Errorf("planned as %v", info.State)
		}
		time.Sleep(time.Second)
		s.wantNobodyInLine()
		s.sleepUntil(l, 16, 20*time.Second)
		if keys := s.redis.Keys(t.Context(), "sluice:{*}:lines").Val(); len(keys) != 0 {
			t.Errorf("somebody leads a line: %q", keys)
		}
	})
}

// A task that really failed comes back after asynq's own delay, at the front of its tenant's waiters; its
// retries are counted, and it ends in the archive.
func TestFailedTaskComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, 10*time.Second))
		l := newLedger()
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			if task.Type() == "bad" {
				return errors.New("boom")
			}
			return s.ok(ctx, task)
		}, l.watch, brisk, func(c *asynq.Config, _ *worker.Config) {
			c.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return 15 * time.Second }
		})
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "bad", nil), asynq.TaskID("bad"), asynq.MaxRetry(2))
		time.Sleep(time.Second)
		s.enqueueMany("acme", 0, 6)
		time.Sleep(22 * time.Second) // 0 and 10 and 20 s: bad, and two others; bad is back and waits since 15 s
		if task := s.task("bad"); task.Retried != 1 && !(task.Retried == 2) {
			t.Errorf("bad is %v, retried %d", task.State, task.Retried)
		}
		s.sleepUntil(l, 9, 90*time.Second)
		got := l.got()
		want := []string{"bad", "acme-0000", "bad", "acme-0001", "bad"}
		if !slices.Equal(got[:1], want[:1]) || got[2] != "bad" || got[4] != "bad" {
			t.Errorf("granted: %q", got)
		}
		if task := s.task("bad"); task.State != asynq.TaskStateArchived || task.Retried != 2 || task.LastErr != "boom" {
			t.Errorf("bad is %v, retried %d: %s", task.State, task.Retried, task.LastErr)
		}
		s.wantCounters(counters{Processed: 9, Failed: 3, Archived: 1})
		s.wantNobodyInLine()
	})
}
