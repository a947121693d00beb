package worker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

func TestMain(m *testing.M) {
	logging.Disable() // connections break on purpose here
	os.Exit(m.Run())
}

// policy is a policy over every task type, with one window by tenant.
func policy(limit int64, period time.Duration) throttle.Policy {
	return throttle.Policy{
		Name: "api", Match: []string{"*"},
		Windows: []throttle.Window{{Name: "window", Limit: limit, Period: period}},
	}
}

// A site is a Redis with all that stands around it in a test.
type site struct {
	testing.TB
	asynq     asynq.RedisConnOpt
	inspector *asynq.Inspector
	limiter   *throttle.Limiter
	log       *journal // of the throttle's logger
	plain     *asynq.Client
	redis     *redis.Client

	mu        sync.Mutex
	decisions []throttle.Decision
	reported  []error // to the user's ErrorHandler
	asked     []error // of the user's IsFailure
	ran       []string
}

func newSite(t testing.TB, client *redis.Client, policies ...throttle.Policy) *site {
	t.Helper()
	limits := redis.UniversalClient(client)
	if onCluster() {
		limits = connect(like(client))
		t.Cleanup(func() { limits.Close() })
	}
	log := &journal{}
	limiter, err := throttle.New(throttle.Config{Client: limits, Logger: slog.New(slog.NewTextHandler(log, nil)), Policies: policies})
	if err != nil {
		t.Fatal(err)
	}
	s := &site{TB: t, asynq: dialed{like(client)}, limiter: limiter, log: log, redis: client}
	s.inspector = asynq.NewInspector(s.asynq)
	s.plain = asynq.NewClient(s.asynq)
	t.Cleanup(func() { s.inspector.Close(); s.plain.Close() })
	return s
}

// onCluster reports whether tests that run on real Redis run on a Redis Cluster instead. It is asked
// for by the environment variable SLUICE_CLUSTER.
func onCluster() bool { return os.Getenv("SLUICE_CLUSTER") != "" }

// each runs the test on a site on real Redis and on one on miniredis.
func each(t *testing.T, policies []throttle.Policy, test func(t *testing.T, s *site)) {
	t.Parallel()
	if onCluster() {
		test(t, newSite(t, throttletest.Client(t, cluster(t)), policies...))
		return
	}
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		test(t, newSite(t, client, policies...))
	})
}

// dialed makes clients with these options.
type dialed struct{ *redis.Options }

func (d dialed) MakeRedisClient() any { return connect(d.Options) }

// clusters holds the addresses of Redis Clusters of one node.
var clusters sync.Map

// connect returns a client with these options.
func connect(o *redis.Options) redis.UniversalClient {
	if _, ok := clusters.Load(o.Addr); !ok {
		own := *o
		return redis.NewClient(&own)
	}
	return redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{o.Addr}, Dialer: o.Dialer, MaintNotificationsConfig: o.MaintNotificationsConfig, ReadTimeout: o.ReadTimeout,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) { // the dialer goes by its own address
			return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: o.Addr}}}}, nil
		},
	})
}

// pipe are the options of clients of a miniredis in memory, for testing/synctest.
func pipe(m *miniredis.Miniredis) *redis.Options {
	return throttletest.Memory{Miniredis: m}.Options()
}

// unnotified keeps a client from asking Redis for notices of its maintenance. Each client needs a
// config of its own, as it writes to it.
func unnotified() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// like are options of new clients of the same Redis.
func like(client *redis.Client) *redis.Options {
	o := client.Options()
	return &redis.Options{Addr: o.Addr, Dialer: o.Dialer, MaintNotificationsConfig: unnotified()}
}

// synctestSite is a site in a bubble, on a miniredis.
func synctestSite(t *testing.T, policies ...throttle.Policy) *site {
	return newSite(t, throttletest.InMemory(t).Client(t), policies...)
}

// configs are those of a server that records the calls of the user's functions.
func (s *site) configs() (asynq.Config, worker.Config) {
	return asynq.Config{
			Concurrency:              4,
			DelayedTaskCheckInterval: 20 * time.Millisecond,
			ErrorHandler: asynq.ErrorHandlerFunc(func(_ context.Context, _ *asynq.Task, err error) {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.reported = append(s.reported, err)
			}),
			IsFailure: func(err error) bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.asked = append(s.asked, err)
				return true
			},
			LogLevel:          asynq.FatalLevel,
			RetryDelayFunc:    func(int, error, *asynq.Task) time.Duration { return 0 },
			TaskCheckInterval: 10 * time.Millisecond,
		}, worker.Config{
			Limiter: s.limiter,
			Logger:  slog.New(slog.NewTextHandler(s.log, nil)),
			OnDecision: func(_ context.Context, _ *asynq.Task, d throttle.Decision) {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.decisions = append(s.decisions, d)
			},
		}
}

// serve starts a server of ours that ends with the test.
func (s *site) serve(handler asynq.HandlerFunc, change ...func(*asynq.Config, *worker.Config)) *worker.Server {
	s.Helper()
	theirs, ours := s.configs()
	for _, f := range change {
		f(&theirs, &ours)
	}
	server, err := worker.NewServer(s.asynq, theirs, ours)
	if err != nil {
		s.Fatal(err)
	}
	if err := server.Start(handler); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(server.Shutdown)
	return server
}

// calm is for servers in a bubble, where hours of asking for work 100 times a second cost time.
func calm(c *asynq.Config, _ *worker.Config) {
	c.DelayedTaskCheckInterval, c.TaskCheckInterval = time.Second, time.Second
}

// ok is a handler that records the tasks it ran, and succeeds.
func (s *site) ok(ctx context.Context, _ *asynq.Task) error {
	id, _ := asynq.GetTaskID(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ran = append(s.ran, id)
	return nil
}

func (s *site) runs() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(slices.Values(s.ran))
}

// denials returns the denials so far, in order.
func (s *site) denials() []throttle.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.decisions), func(d throttle.Decision) bool { return d.Granted })
}

// enqueue enqueues by a plain client.
func (s *site) enqueue(task *asynq.Task, opts ...asynq.Option) {
	s.Helper()
	if _, err := s.plain.Enqueue(task, opts...); err != nil {
		s.Fatal(err)
	}
}

// fill takes all of the tenant's window, whose limit is 1.
func (s *site) fill(tenants ...string) {
	s.Helper()
	for _, tenant := range tenants {
		d, err := s.limiter.Reserve(context.Background(), throttle.Request{Policy: "api", Tenant: tenant})
		if err != nil || !d.Granted {
			s.Fatalf("filling the window: granted %v, %v", d.Granted, err)
		}
	}
}

// open lets every task of the policies through from now on, and has the given ones run at once.
func (s *site) open(ids ...string) {
	s.Helper()
	policies := s.limiter.Policies()
	for i := range policies {
		for j := range policies[i].Windows {
			policies[i].Windows[j].Limit = 1000
		}
	}
	if err := s.limiter.SetPolicies(policies); err != nil {
		s.Fatal(err)
	}
	for _, id := range ids { // those that stand in line may have been taken, and have run, by now
		_ = s.inspector.RunTask("default", id)
	}
}

// wait waits until the condition holds: long, as machines are slow.
func (s *site) wait(what string, condition func() bool) {
	s.Helper()
	pause := 2 * time.Millisecond
	for end := time.Now().Add(50 * time.Second); !condition(); time.Sleep(pause) {
		if time.Now().After(end) {
			s.Fatalf("waited in vain until %s\n%s", what, s.log)
		}
		pause = min(2*pause, 50*time.Millisecond) // each look costs as much as a task
	}
}

// task returns the task, or an empty one if there is none.
func (s *site) task(id string) asynq.TaskInfo {
	info, err := s.inspector.GetTaskInfo("default", id)
	if errors.Is(err, asynq.ErrTaskNotFound) || errors.Is(err, asynq.ErrQueueNotFound) {
		return asynq.TaskInfo{}
	}
	if err != nil {
		s.Error(err)
		return asynq.TaskInfo{}
	}
	return *info
}

func (s *site) waitState(state asynq.TaskState, ids ...string) {
	s.Helper()
	for _, id := range ids {
		s.wait(fmt.Sprintf("task %s is %v", id, state), func() bool { return s.task(id).State == state })
	}
}

func (s *site) waitGone(ids ...string) {
	s.Helper()
	for _, id := range ids {
		s.wait(fmt.Sprintf("task %s is gone", id), func() bool { return s.task(id).ID == "" })
	}
}

// counters are what asynq's tools show of the queue.
type counters struct{ Processed, Failed, Active, Leases, Scheduled, Retry, Archived int64 }

func (s *site) counters() counters {
	s.Helper()
	ctx := context.Background()
	number := func(key string) int64 {
		n, err := s.redis.Get(ctx, "asynq:{default}:"+key).Int64()
		if err != nil && err != redis.Nil {
			s.Fatal(err)
		}
		return n
	}
	return counters{
		Processed: number("processed"),
		Failed:    number("failed"),
		Active:    s.redis.LLen(ctx, "asynq:{default}:active").Val(),
		Leases:    s.redis.ZCard(ctx, "asynq:{default}:lease").Val(),
		Scheduled: s.redis.ZCard(ctx, "asynq:{default}:scheduled").Val(),
		Retry:     s.redis.ZCard(ctx, "asynq:{default}:retry").Val(),
		Archived:  s.redis.ZCard(ctx, "asynq:{default}:archived").Val(),
	}
}

func (s *site) wantCounters(want counters) {
	s.Helper()
	if got := s.counters(); got != want {
		s.Errorf("counters %+v, want %+v", got, want)
	}
}

// wantReported fails unless the user's ErrorHandler and IsFailure were called with just these
// errors.
func (s *site) wantReported(reported, asked []string) {
	s.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	texts := func(errs []error) (texts []string) {
		for _, err := range errs {
			texts = append(texts, err.Error())
		}
		return texts
	}
	if got := texts(s.reported); !slices.Equal(got, reported) {
		s.Errorf("the user's ErrorHandler was told %q, want %q", got, reported)
	}
	if got := texts(s.asked); !slices.Equal(got, asked) {
		s.Errorf("the user's IsFailure was asked %q, want %q", got, asked)
	}
}

// A journal keeps what is logged.
type journal struct {
	mu   sync.Mutex
	text strings.Builder
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

func (j *journal) count(text string) int { return strings.Count(j.String(), text) }

// asynqLog makes a journal of asynq's own log.
type asynqLog struct{ *journal }

func (l asynqLog) Debug(args ...any) { fmt.Fprintln(l, args...) }
func (l asynqLog) Info(args ...any)  { fmt.Fprintln(l, args...) }
func (l asynqLog) Warn(args ...any)  { fmt.Fprintln(l, args...) }
func (l asynqLog) Error(args ...any) { fmt.Fprintln(l, args...) }
func (l asynqLog) Fatal(args ...any) { fmt.Fprintln(l, args...) }

func (s *site) limiterOn(client redis.UniversalClient) *throttle.Limiter {
	s.Helper()
	limiter, err := throttle.New(throttle.Config{Client: client, Policies: s.limiter.Policies()})
	if err != nil {
		s.Fatal(err)
	}
	return limiter
}

// used is how much of acme's window is used.
func (s *site) used() int64 {
	s.Helper()
	d, err := s.limiter.Peek(context.Background(), throttle.Request{Policy: "api", Tenant: "acme"})
	if err != nil {
		s.Fatal(err)
	}
	return d.Windows[0].Used
}

// stored returns the fields by which asynq keeps a task.
func (s *site) stored(id string) map[string]string {
	s.Helper()
	fields, err := s.redis.HGetAll(context.Background(), "asynq:{default}:t:"+id).Result()
	if err != nil {
		s.Fatal(err)
	}
	return fields
}
