package worker_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Shutdown closes what NewServer opened, also of a server that never started.
func TestShutdownClosesTheConnection(t *testing.T) {
	m := throttletest.Miniredis(t)
	client := redis.NewClient(&redis.Options{Addr: m.Addr()})
	s := sitetest.New(t, client, sitetest.Policy(1, time.Hour))
	s.Fill("acme")
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"))
	server := s.Serve(s.Ok)
	s.WaitState(asynq.TaskStateScheduled, "a")
	theirs, ours := s.Configs()
	idle := expect.Got(worker.NewServer(s.Asynq, theirs, ours))(t)
	err := idle.Ping()
	expect.That(t, err == nil, err)
	err = server.Ping()
	expect.That(t, err == nil, err)
	err = idle.Start(nil)
	expect.That(t, err != nil, "started without a handler")
	server.Stop()
	server.Shutdown()
	idle.Shutdown()
	idle.Shutdown()
	expect.Err(t, server.Start(asynq.HandlerFunc(s.Ok)), asynq.ErrServerClosed, "started again after Shutdown:")
	expect.Err(t, idle.Start(asynq.HandlerFunc(s.Ok)), asynq.ErrServerClosed, "started after Shutdown:")
	expect.Err(t, idle.Run(asynq.HandlerFunc(s.Ok)), asynq.ErrServerClosed, "run after Shutdown:")
	s.Inspector.Close()
	s.Plain.Close()
	client.Close()
	s.Wait("all connections are closed", func() bool { return m.CurrentConnectionCount() == 0 })
}

// A limiter's Redis that hangs is unavailable to a probe, too.
func TestAProbeOfARedisThatHangs(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		hangs := hooktest.Hook(func(ctx context.Context, _ redis.Cmder, _ redis.ProcessHook) error { <-ctx.Done(); return ctx.Err() })
		expect.Err(t, s.Client(s.AnotherLimiter(hangs)).Ping(), throttle.ErrUnavailable)
	})
}

// A server says at its start, once, how the Redis of both is not set up.
func TestAServerChecksItsRedis(t *testing.T) {
	t.Parallel()
	client := throttletest.Client(t, throttletest.Redis(t, "--maxmemory-policy", "allkeys-lru"))
	s := sitetest.New(t, client, sitetest.Policy(100, time.Hour))
	s.Serve(s.Ok)
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"))
	s.WaitGone("a")
	s.Wait("it is logged", func() bool { return s.Logs.Count("maxmemory-policy is allkeys-lru") > 0 })
	expect.That(t, s.Logs.Count("worker: Redis is not set up for throttling") == 1, "want it logged once:", s.Logs)
	findings, err := s.Client(s.Limiter).CheckRedis(t.Context())
	expect.That(t, err == nil && len(findings) == 1 && strings.Contains(findings[0], "allkeys-lru"), findings, err)
}

// What keeps asynq's own Redis from being checked has the kinds of the limiter's errors.
func TestChecksOfAsynqsRedisHaveKinds(t *testing.T) {
	t.Parallel()
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Policy(1, time.Hour))
	locked := throttletest.Redis(t, "--requirepass", "secret")
	check := func(ctx context.Context, addr string) error {
		t.Helper()
		client := expect.Got(worker.NewClient(asynq.RedisClientOpt{Addr: addr}, worker.ClientConfig{Limiter: s.Limiter, LimiterTimeout: time.Minute}))(t)
		defer client.Close()
		findings, err := client.CheckRedis(ctx)
		expect.Require(t, err != nil && len(findings) == 0, addr, findings, err)
		expect.Contains(t, err.Error(), "asynq's Redis")
		expect.That(t, !strings.Contains(err.Error(), "limiter's"), addr, err)
		return err
	}
	err := check(t.Context(), locked)
	expect.That(t, errors.Is(err, throttle.ErrUnavailable) && errors.Is(err, throttle.ErrForbidden), "a user that Redis does not know", err)
	err = check(t.Context(), "127.0.0.1:1")
	expect.That(t, errors.Is(err, throttle.ErrUnavailable) && !errors.Is(err, throttle.ErrForbidden), "no Redis", err)
}

// Asynq says of a task without retries that these are used up, before it hears of the denial. Its log does not.
func TestAsynqsLogKnowsNoDenials(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1, time.Hour))
	s.Fill("acme")
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("denied"), asynq.MaxRetry(0))
	s.Enqueue(sitetest.Task("zeta"), asynq.TaskID("fails"), asynq.MaxRetry(0))
	log := &sitetest.Logs{}
	s.Serve(func(context.Context, *asynq.Task) error { return errors.New("boom") }, func(theirs *asynq.Config, _ *worker.Config) {
		theirs.Logger, theirs.LogLevel = sitetest.AsynqLog{Logs: log}, asynq.WarnLevel
	})
	s.WaitState(asynq.TaskStateScheduled, "denied")
	s.WaitState(asynq.TaskStateArchived, "fails")
	expect.That(t, log.Count("Retry exhausted for task id=denied") == 0 && log.Count("Retry exhausted for task id=fails") == 1, "it says", log)
}

// A limit below zero is refused, or what it says.
func TestOptionsBelowZero(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Policy(1, time.Hour))
	client := expect.Got(worker.NewClient(s.Asynq, worker.ClientConfig{Limiter: s.Limiter, LimiterTimeout: time.Minute}))(t)
	defer client.Close()
	expect.Err(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask(), worker.Backlog(-1))), new(*throttle.RequestError),
		"a backlog of -1:")
	expect.Must(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask(), worker.MaxWait(-1), worker.ReportStart(nil)))) // it fits at once
	expect.Err(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask(), worker.MaxWait(-1))), new(*throttle.DeniedError), "it does not fit:")
	_, err := client.Enqueue(sitetest.AcmeTask(), worker.MaxWait(-1), asynq.Group("g"))
	expect.That(t, err != nil, "a task of a group never joins")
}

// What is missing is named.
func TestNilIsAnError(t *testing.T) {
	observes := sitetest.Policy(1, time.Hour)
	observes.Observe = true
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), observes)
	_, noTenant := s.Client(s.Limiter).RequestOf(asynq.NewTask("x", nil))
	_, dropped := s.Client(s.Limiter).Drop(t.Context(), worker.DropOptions{Policy: "api"})
	_, identity := worker.IdentityOf(nil)
	_, request := s.Client(s.Limiter).RequestOf(nil)
	for want, err := range map[string]error{
		"worker: DropOptions.Tenant is empty: must be the name of a tenant": dropped,
		"worker: IdentityOf: task is nil":                                   identity,
		"worker: the task is nil":                                           request,
		`worker: task type "x": no tenant, and policy "api" matches it: make the task with worker.NewTask, or set Config.Identify`: noTenant,
	} {
		expect.That(t, err != nil && err.Error() == want, err, ", want", want)
	}
}

// github is a policy that matches some task types only.
func github() throttle.Policy {
	p := sitetest.Policy(100, time.Hour)
	p.Match = []string{"github:*"}
	return p
}

// A task type may be misspelt. Each is logged once, whether it is rejected or runs.
func TestUnmatchedTypesAreLoggedOnce(t *testing.T) {
	for _, rejected := range []bool{false, true} {
		t.Run(fmt.Sprint("rejected: ", rejected), func(t *testing.T) {
			s := sitetest.OnRedis(t, github())
			s.Serve(s.Ok, func(_ *asynq.Config, c *worker.Config) { c.RejectUnmatched = rejected })
			for i := range 6 {
				s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, []string{"githib:star", "gitbuh:star", "github:star"}[i%3], nil),
					asynq.MaxRetry(0), asynq.TaskID(fmt.Sprint(i)))
			}
			s.Wait("all are processed", func() bool { return s.Counters().Processed == 6 })
			expect.Equal(t, s.Logs.Count(fmt.Sprint("fails=", rejected)), 2, "types are logged")
			expect.That(t, s.Logs.Count("type=githib:star") == 1 && s.Logs.Count("type=gitbuh:star") == 1, s.Logs)
			n := len(s.Runs())
			expect.That(t, !(n != 6 && !rejected) && !(n != 2 && rejected), n, "tasks ran")
			s.Mu.Lock()
			defer s.Mu.Unlock()
			for _, err := range s.Reported {
				expect.Err(t, err, worker.ErrUnmatched, "a task failed by")
			}
		})
	}
}

// Task types may be made up for each task: those that are logged, and remembered for it, are bounded.
func TestUnmatchedTypesThatAreLoggedAreBounded(t *testing.T) {
	s := sitetest.OnRedis(t, github())
	s.Serve(s.Ok)
	for i := range 250 {
		s.Enqueue(asynq.NewTask(fmt.Sprint("made-up-", i), nil))
	}
	s.Wait("all ran", func() bool { return s.Counters().Processed == 250 })
	expect.Equal(t, s.Logs.Count("no policy counts a task"), 100, "types are logged, want 100")
}

// In a task that no policy matches, RetryAfter is an error like any other: there is nothing to
// pause, and nothing bounds how often the task would come back.
func TestRetryAfterInAnUnmatchedTaskIsAFailure(t *testing.T) {
	s := sitetest.OnRedis(t, github())
	s.Serve(func(context.Context, *asynq.Task) error { return worker.RetryAfter(time.Hour) })
	s.Enqueue(asynq.NewTask("githib:star", nil), asynq.TaskID("a"), asynq.MaxRetry(0))
	s.WaitState(asynq.TaskStateArchived, "a")
	s.WantCounters(sitetest.Counters{Processed: 1, Failed: 1, Archived: 1})
	s.WantReported([]string{"worker: the upstream refuses calls for 1h0m0s"}, nil)
}

// A policy that observes denies nothing: a task that it cannot count is enqueued and runs. Its type is logged once.
func TestAPolicyThatObservesFailsNoTask(t *testing.T) {
	observes := sitetest.Policy(100, time.Hour)
	observes.Observe = true
	s := sitetest.OnRedis(t, observes)
	s.Serve(s.Ok)
	for _, enqueue := range []func(*asynq.Task, ...asynq.Option) (*asynq.TaskInfo, error){s.Client(s.Limiter).Enqueue, s.Plain.Enqueue} {
		for _, task := range []*asynq.Task{
			asynq.NewTask("anonymous", nil), worker.NewTask(worker.Identity{Tenant: "acme", Cost: map[string]int64{"requests": -1}}, "odd", nil),
		} {
			_, err := enqueue(task, asynq.MaxRetry(0))
			expect.That(t, err == nil, task.Type(), err)
		}
	}
	s.Wait("all ran", func() bool { return len(s.Runs()) == 4 })
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("late"), asynq.Deadline(time.Now().Add(-time.Second)), asynq.MaxRetry(3))
	s.WaitState(asynq.TaskStateRetry, "late") // as asynq has it
	expect.That(t, s.Logs.Count("fails=false") == 2 && s.Logs.Count("no tenant") == 1,
		"want each type logged once:", s.Logs)
}
