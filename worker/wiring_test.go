package worker_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

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
	idle, err := worker.NewServer(s.Asynq, theirs, ours)
	sitetest.Must(t, err)
	if err := idle.Ping(); err != nil {
		t.Error(err)
	}
	if err := server.Ping(); err != nil {
		t.Error(err)
	}
	if err := idle.Start(nil); err == nil {
		t.Error("started without a handler")
	}
	server.Stop()
	server.Shutdown()
	idle.Shutdown()
	idle.Shutdown()
	if err := server.Start(asynq.HandlerFunc(s.Ok)); !errors.Is(err, asynq.ErrServerClosed) {
		t.Errorf("started again after Shutdown: %v", err)
	}
	s.Inspector.Close()
	s.Plain.Close()
	client.Close()
	s.Wait("all connections are closed", func() bool { return m.CurrentConnectionCount() == 0 })
}

// A server says at its start, once, how the Redis of both is not set up.
func TestAServerChecksItsRedis(t *testing.T) {
	t.Parallel()
	client := throttletest.Client(t, throttletest.Redis(t, "--maxmemory-policy", "allkeys-lru"))
	s := sitetest.New(t, client, sitetest.Policy(100, time.Hour))
	server := s.Serve(s.Ok)
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"))
	s.WaitGone("a")
	s.Wait("it is logged", func() bool { return s.Journal.Count("maxmemory-policy is allkeys-lru") > 0 })
	if s.Journal.Count("worker: Redis is not set up for throttling") != 1 {
		t.Errorf("want it logged once:\n%s", s.Journal)
	}
	for _, check := range []func(context.Context) ([]string, error){server.CheckRedis, s.Client(s.Limiter).CheckRedis} {
		if findings, err := check(t.Context()); err != nil || len(findings) != 1 || !strings.Contains(findings[0], "allkeys-lru") {
			t.Errorf("%q, %v", findings, err)
		}
	}
}

// What keeps asynq's own Redis from being checked has the classes of the limiter's errors.
func TestChecksOfAsynqsRedisHaveClasses(t *testing.T) {
	t.Parallel()
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Policy(1, time.Hour))
	locked := throttletest.Redis(t, "--requirepass", "secret")
	check := func(ctx context.Context, addr string) error {
		t.Helper()
		client, err := worker.NewClient(asynq.RedisClientOpt{Addr: addr}, worker.ClientConfig{Limiter: s.Limiter})
		sitetest.Must(t, err)
		defer client.Close()
		findings, err := client.CheckRedis(ctx)
		if err == nil || !strings.Contains(err.Error(), "asynq's Redis") || strings.Contains(err.Error(), "limiter's") || len(findings) > 0 {
			t.Errorf("%s: %q, %v", addr, findings, err)
		}
		return err
	}
	if err := check(t.Context(), locked); !errors.Is(err, throttle.ErrUnavailable) || !errors.Is(err, throttle.ErrForbidden) {
		t.Errorf("a user that Redis does not know: %v", err)
	}
	if err := check(t.Context(), "127.0.0.1:1"); !errors.Is(err, throttle.ErrUnavailable) || errors.Is(err, throttle.ErrForbidden) {
		t.Errorf("no Redis: %v", err)
	}
}

// Asynq says of a task without retries that these are used up, before anybody can tell it that the
// task was denied. Its log does not.
func TestAsynqsLogKnowsNoDenials(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{sitetest.Policy(1, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("denied"), asynq.MaxRetry(0))
		s.Enqueue(sitetest.Task("zeta"), asynq.TaskID("fails"), asynq.MaxRetry(0))
		log := &sitetest.Journal{}
		s.Serve(func(context.Context, *asynq.Task) error { return errors.New("boom") }, func(theirs *asynq.Config, _ *worker.Config) {
			theirs.Logger, theirs.LogLevel = sitetest.AsynqLog{Journal: log}, asynq.WarnLevel
		})
		s.WaitState(asynq.TaskStateScheduled, "denied")
		s.WaitState(asynq.TaskStateArchived, "fails")
		if log.Count("Retry exhausted for task id=denied") > 0 || log.Count("Retry exhausted for task id=fails") != 1 {
			t.Errorf("it says:\n%s", log)
		}
	})
}
