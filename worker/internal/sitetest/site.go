// Package sitetest has what tests of a worker share: servers, clients and logs on a Redis, what they ran, and faults.
package sitetest

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

func init() { logging.Disable() } // connections break on purpose in these tests

// Policy is a policy over every task type, with one window by tenant.
func Policy(limit int64, period time.Duration) throttle.Policy {
	return throttle.Policy{
		Name: "api", Match: []string{"*"},
		Windows: []throttle.Window{{Name: "window", Limit: limit, Period: period}},
	}
}

// Shared is a policy over every task type with one window that all tenants share.
func Shared(limit int64, period time.Duration) throttle.Policy {
	p := Policy(limit, period)
	p.Windows[0].Shared = true
	return p
}

// A Site is a Redis with all that stands around it in a test.
type Site struct {
	testing.TB
	Asynq     asynq.RedisConnOpt
	Inspector *asynq.Inspector
	Limiter   *throttle.Limiter
	Logs      *Logs // of the throttle's logger
	Plain     *asynq.Client
	Redis     *redis.Client

	Ledger // of all its servers

	onFakeTime bool // of NewInBubble

	Reported []error // to the user's ErrorHandler, and
	Asked    []error // of the user's IsFailure: both guarded by Ledger.Mu
}

// New returns a site on the client's Redis, with a limiter of these policies.
func New(t testing.TB, client *redis.Client, policies ...throttle.Policy) *Site {
	t.Helper()
	limits := redis.UniversalClient(client)
	if OnCluster() {
		limits = Connect(SameRedis(client))
		t.Cleanup(func() { limits.Close() })
	}
	log := &Logs{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	limiter := expect.Got(throttle.New(throttle.Config{Client: limits, Logger: logger, Policies: policies}))(t)
	s := &Site{TB: t, Asynq: Dialed{SameRedis(client)}, Limiter: limiter, Logs: log, Redis: client}
	s.Inspector = asynq.NewInspector(s.Asynq)
	s.Plain = asynq.NewClient(s.Asynq)
	t.Cleanup(func() { s.Inspector.Close(); s.Plain.Close() })
	return s
}

// OnRedis is a site on a real Redis of the test's own, by the real clock, while other tests run.
func OnRedis(t *testing.T, policies ...throttle.Policy) *Site {
	t.Helper()
	t.Parallel()
	if OnCluster() {
		return New(t, throttletest.Client(t, Cluster(t)), policies...)
	}
	return New(t, throttletest.Client(t, throttletest.Redis(t)), policies...)
}

// Bubble runs the test on fake time, on a site on a miniredis.
func Bubble(t *testing.T, p throttle.Policy, test func(t *testing.T, s *Site)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { test(t, NewInBubble(t, p)) })
}

// EachBubble runs the test on fake time for each of the cases, by their names.
func EachBubble[Case any](t *testing.T, cases map[string]Case, test func(t *testing.T, c Case)) {
	t.Parallel()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { test(t, c) })
		})
	}
}

// Values are cases that are named by what they are.
func Values[Case any](values ...Case) map[string]Case {
	cases := map[string]Case{}
	for _, v := range values {
		cases[fmt.Sprint(v)] = v
	}
	return cases
}

// NewInBubble is a site in a bubble, on a miniredis.
func NewInBubble(t *testing.T, policies ...throttle.Policy) *Site {
	s := New(t, throttletest.InMemory(t).Client(t), policies...)
	s.onFakeTime = true
	return s
}

// Configs returns configs of a server that records calls of the user's functions. By NewInBubble it asks as seldom as
// by asynq's defaults: on fake time a second of an eager one takes some 50 ms.
func (s *Site) Configs() (asynq.Config, worker.Config) {
	c := asynq.Config{
		Concurrency: 4,
		ErrorHandler: asynq.ErrorHandlerFunc(func(_ context.Context, _ *asynq.Task, err error) {
			s.Mu.Lock()
			defer s.Mu.Unlock()
			s.Reported = append(s.Reported, err)
		}),
		IsFailure: func(err error) bool {
			s.Mu.Lock()
			defer s.Mu.Unlock()
			s.Asked = append(s.Asked, err)
			return true
		},
		LogLevel:       asynq.FatalLevel,
		RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return 0 },
	}
	if !s.onFakeTime {
		c.DelayedTaskCheckInterval, c.TaskCheckInterval = 100*time.Millisecond, 20*time.Millisecond
	}
	return c, worker.Config{Limiter: s.Limiter, Logger: slog.New(slog.NewTextHandler(s.Logs, nil)), OnDecision: s.Note}
}

// Serve starts a server of ours that ends with the test.
func (s *Site) Serve(handler asynq.HandlerFunc, change ...func(*asynq.Config, *worker.Config)) *worker.Server {
	s.Helper()
	theirs, ours := s.Configs()
	for _, f := range change {
		f(&theirs, &ours)
	}
	server := expect.Got(worker.NewServer(s.Asynq, theirs, ours))(s)
	expect.Must(s, server.Start(handler))
	s.Cleanup(server.Shutdown)
	return server
}

// Idle returns a server that is not started.
func (s *Site) Idle() *worker.Server {
	s.Helper()
	theirs, ours := s.Configs()
	server := expect.Got(worker.NewServer(s.Asynq, theirs, ours))(s)
	s.Cleanup(server.Shutdown)
	return server
}

// Calm has a server ask as seldom as by asynq's defaults.
func Calm(c *asynq.Config, _ *worker.Config) { c.DelayedTaskCheckInterval, c.TaskCheckInterval = 0, 0 }

// Brisk is for servers that look for work more often.
func Brisk(c *asynq.Config, _ *worker.Config) {
	c.Concurrency, c.DelayedTaskCheckInterval, c.TaskCheckInterval = 8, time.Second, 100*time.Millisecond
}

// Apart is a change that gives a server a limiter of its own, as that of another process.
func (s *Site) Apart(_ *asynq.Config, c *worker.Config) { c.Limiter = s.AnotherLimiter() }

// By has a server ask this limiter.
func By(l *throttle.Limiter) func(*asynq.Config, *worker.Config) {
	return func(_ *asynq.Config, c *worker.Config) { c.Limiter = l }
}

// Enqueue enqueues by a plain client.
func (s *Site) Enqueue(task *asynq.Task, opts ...asynq.Option) {
	s.Helper()
	expect.Must(s, expect.ErrOf(s.Plain.Enqueue(task, opts...)))
}

// Fill takes all of the tenant's window, whose limit is 1.
func (s *Site) Fill(tenants ...string) {
	s.Helper()
	for _, tenant := range tenants {
		d, err := s.Limiter.Reserve(context.Background(), throttle.Request{Policy: "api", Tenant: tenant})
		expect.Require(s, err == nil && d.Granted, "filling the window: granted", d.Granted, err)
	}
}

// Open lets every task of the policies through from now on, and has the given tasks run at once.
func (s *Site) Open(ids ...string) {
	s.Helper()
	policies := s.Limiter.Policies()
	for i := range policies {
		for j := range policies[i].Windows {
			policies[i].Windows[j].Limit = 1000
		}
	}
	expect.Must(s, s.Limiter.SetPolicies(policies))
	for _, id := range ids { // tasks in line may have been taken, and have run, by now
		_ = s.Inspector.RunTask("default", id)
	}
}

// Wait waits until the condition is true: long, as machines are slow.
func (s *Site) Wait(what string, condition func() bool) {
	s.Helper()
	delay := 2 * time.Millisecond
	for end := time.Now().Add(50 * time.Second); !condition(); time.Sleep(delay) {
		expect.Require(s, !time.Now().After(end), "waited in vain until", what, s.Logs)
		delay = min(2*delay, 50*time.Millisecond) // each look costs as much as a task
	}
}

// WantReported fails unless the user's ErrorHandler and IsFailure were called with just these errors.
func (s *Site) WantReported(reported, asked []string) {
	s.Helper()
	s.Mu.Lock()
	defer s.Mu.Unlock()
	texts := func(errs []error) (texts []string) {
		for _, err := range errs {
			texts = append(texts, err.Error())
		}
		return texts
	}
	expect.Equal(s, texts(s.Reported), reported, "the user's ErrorHandler was told")
	expect.Equal(s, texts(s.Asked), asked, "the user's IsFailure was asked")
}

// LimiterOn returns a limiter with the policies of the site.
func (s *Site) LimiterOn(client redis.UniversalClient) *throttle.Limiter {
	s.Helper()
	return expect.Got(throttle.New(throttle.Config{Client: client, Policies: s.Limiter.Policies()}))(s)
}

// AnotherLimiter returns a limiter as that of another process. The hooks see its calls.
func (s *Site) AnotherLimiter(hooks ...redis.Hook) *throttle.Limiter {
	s.Helper()
	return s.limiter(SameRedis(s.Redis), hooks...)
}

// LimiterThrough is AnotherLimiter through a proxy.
func (s *Site) LimiterThrough(p *BreakableProxy, hooks ...redis.Hook) *throttle.Limiter {
	s.Helper()
	return s.limiter(p.Options(SameRedis(s.Redis)), hooks...)
}

func (s *Site) limiter(o *redis.Options, hooks ...redis.Hook) *throttle.Limiter {
	s.Helper()
	client := Connect(o)
	s.Cleanup(func() { client.Close() })
	for _, h := range hooks {
		client.AddHook(h)
	}
	return s.LimiterOn(client)
}

// Client is a client of ours, as in a process of its own.
func (s *Site) Client(limiter *throttle.Limiter) *worker.Client {
	s.Helper()
	client, err := worker.NewClient(s.Asynq, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute})
	expect.Must(s, err)
	s.Cleanup(func() { client.Close() })
	return client
}

// SetPolicy changes the policy for all limiters given.
func (s *Site) SetPolicy(change func(*throttle.Policy), limiters ...*throttle.Limiter) {
	s.Helper()
	for _, l := range limiters {
		policies := l.Policies()
		change(&policies[0])
		expect.Must(s, l.SetPolicies(policies))
	}
}

// Used is how much of acme's window is used.
func (s *Site) Used() int64 {
	s.Helper()
	d := expect.Got(s.Limiter.Peek(context.Background(), throttle.Request{Policy: "api", Tenant: "acme"}))(s)
	return d.Windows[0].Used
}

// WaitUsed waits until n units of acme's window are used: grants in vain are given back in the background.
func (s *Site) WaitUsed(n int64) {
	s.Helper()
	s.Wait(fmt.Sprintf("%d units are used", n), func() bool { return s.Used() == n })
}
