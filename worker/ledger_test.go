package worker_test

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
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
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
	late       time.Duration // after the last expected start
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

// late returns how long after its last expected start a task was granted, at the 50th and the 99th
// percentile of those that had one.
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
	own := connect(like(client))
	s.Cleanup(func() { own.Close() })
	limiter, err := throttle.New(throttle.Config{Client: own, Policies: s.limiter.Policies()})
	if err != nil {
		s.Fatal(err)
	}
	return limiter
}

// client is a client of ours, as in a process of its own.
func (s *site) client(limiter *throttle.Limiter) *worker.Client {
	s.Helper()
	client, err := worker.NewClient(s.asynq, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute})
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

// inLine returns the tickets that have a place in some line, as QUEUE/ID.
func (s *site) inLine() (tickets []string) {
	ctx := context.Background()
	for _, key := range s.redis.Keys(ctx, "sluice:{*}:t").Val() {
		for _, field := range s.redis.HKeys(ctx, key).Val() {
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

func (s *site) wantNobodyInLine() {
	s.Helper()
	if left := s.inLine(); len(left) > 0 {
		s.Errorf("left in the line: %q", left)
	}
}

// Tasks that two quick servers have in their hands at once, or that are called at one moment, are
// in each other's order by chance.
const (
	inFlight  = 2 * throttle.MaxTake
	oneMoment = 200 * time.Millisecond
)

// wantInOrder fails unless the tasks of each tenant were granted by their numbers: IDs are
// TENANT-NUMBER.
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

// joinMany enqueues tasks TENANT-0000, TENANT-0001, ... by our client.
func (s *site) joinMany(client *worker.Client, tenant string, from, n int, opts ...asynq.Option) (all []worker.Enqueued) {
	s.Helper()
	for i := from; i < from+n; i++ {
		var e worker.Enqueued
		e.Info, e.Err = client.EnqueueContext(context.Background(), worker.NewTask(worker.Identity{Tenant: tenant}, "x", nil),
			append([]asynq.Option{asynq.TaskID(fmt.Sprintf("%s-%04d", tenant, i)), worker.ReportStart(&e.Start)}, opts...)...)
		if e.Err != nil {
			s.Fatal(e.Err)
		}
		all = append(all, e)
	}
	return all
}

// shared is a policy over every task type with one window that all tenants share.
func shared(limit int64, period time.Duration) throttle.Policy {
	p := policy(limit, period)
	p.Windows[0].Scope = throttle.Shared
	return p
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

// join has a ticket join the line of the policy "api" under a task's ID, without a task.
func (s *site) join(tenant, id string, task *asynq.Task) {
	s.Helper()
	identity, err := asynqredis.New(s.redis).Identity(context.Background())
	if err != nil {
		s.Fatal(err)
	}
	places, err := s.limiter.Line("api").Join(context.Background(), []throttle.Request{{
		Key:    joinKey(task),
		Tenant: tenant,
		Ticket: throttle.Ticket{Queue: identity + "/default", ID: id},
	}})
	if err != nil || places[0].Err != nil {
		s.Fatal(err, places)
	}
	if err := asynqredis.New(s.redis).Nudge(context.Background(), "default", "api"); err != nil {
		s.Fatal(err)
	}
}

// joinKey is the join key of a task.
func joinKey(task *asynq.Task) string {
	message := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), task.Type())
	message = protowire.AppendBytes(protowire.AppendTag(message, 2, protowire.BytesType), task.Payload())
	return asynqredis.Message(message).JoinKey()
}
