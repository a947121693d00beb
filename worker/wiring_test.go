package worker_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

func TestMiddlewareNamesTheMissingHalf(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Policy(1, time.Hour))
	theirs, ours := s.Configs()
	noConnection := "worker: no asynq.Server has the connection that Adapter.Redis returns: " +
		"make the server with it first, or asynq archives tasks that are denied on their last attempt"
	for name, c := range map[string]struct {
		use  func(*worker.Adapter)
		want string
	}{
		"neither": {func(*worker.Adapter) {}, noConnection},
		"config only": {func(ad *worker.Adapter) {
			asynq.NewServer(s.Asynq, ad.Asynq(theirs))
		}, noConnection},
		"connection returned and not used": {func(ad *worker.Adapter) {
			ad.Redis(s.Asynq)
			asynq.NewServer(s.Asynq, ad.Asynq(theirs))
		}, noConnection},
		"connection only": {func(ad *worker.Adapter) {
			asynq.NewServer(ad.Redis(s.Asynq), theirs)
		}, "worker: Adapter.Asynq was not called: make the asynq.Server with Asynq(...), or denials are reported as failures"},
	} {
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		c.use(ad)
		if _, err := ad.Middleware(); err == nil || err.Error() != c.want {
			t.Errorf("%s: got  %v\nwant %s", name, err, c.want)
		}
	}
}

func TestWithoutTheMiddlewareNoTaskIsPickedUp(t *testing.T) {
	sitetest.Each(t, nil, func(t *testing.T, s *sitetest.Site) {
		theirs, ours := s.Configs()
		theirs.Logger, theirs.LogLevel = sitetest.AsynqLog{Journal: s.Journal}, asynq.ErrorLevel
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		s.Enqueue(asynq.NewTask("x", nil), asynq.TaskID("a"))
		server := asynq.NewServer(ad.Redis(s.Asynq), ad.Asynq(theirs))
		if err := server.Start(asynq.HandlerFunc(s.Ok)); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.Wait("asynq logs why", func() bool {
			return s.Journal.Count("worker: no task is picked up, as it would run unthrottled: call Adapter.Middleware") > 0
		})
		if s.Task("a").State != asynq.TaskStatePending {
			t.Errorf("the task is %v, want pending", s.Task("a").State)
		}
		if _, err := ad.Middleware(); err != nil {
			t.Fatal(err)
		}
		s.WaitGone("a") // unmatched: it runs from now on
	})
}

func TestAMiddlewareThatIsLeftOutIsLogged(t *testing.T) {
	sitetest.Each(t, nil, func(t *testing.T, s *sitetest.Site) {
		if err := s.Limiter.SetPolicies(append(s.Limiter.Policies(), sitetest.Policy(1, time.Hour))); err != nil {
			t.Fatal(err)
		}
		theirs, ours := s.Configs()
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		server := asynq.NewServer(ad.Redis(s.Asynq), ad.Asynq(theirs))
		if _, err := ad.Middleware(); err != nil {
			t.Fatal(err)
		}
		s.Enqueue(asynq.NewTask("x", nil), asynq.TaskID("a"))
		s.Enqueue(asynq.NewTask("x", nil), asynq.TaskID("b"))
		if err := server.Start(asynq.HandlerFunc(s.Ok)); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.WaitGone("a", "b")
		if s.Journal.Count("worker: a task ran unthrottled: put what Adapter.Middleware returns into the handler") != 1 {
			t.Errorf("want it logged once:\n%s", s.Journal)
		}
	})
}

// A server that was made with our connection and another config runs nothing unthrottled, and loses
// nothing.
func TestServerWithoutOurConfigLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, sitetest.Policy(100, time.Hour))
		theirs, ours := s.Configs()
		sitetest.Calm(&theirs, &ours)
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		ad.Asynq(theirs)
		server := asynq.NewServer(ad.Redis(s.Asynq), theirs)
		var attempts atomic.Int64
		startBy(s, ad, server, &attempts)
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		time.Sleep(55 * time.Second) // after a minute it would be logged again
		const want = "worker: the asynq.Server was not made with the config that Adapter.Asynq returned"
		task := s.Task("a")
		if !strings.HasPrefix(task.LastErr, "throttled: api, tenant acme, ") || !strings.HasSuffix(task.LastErr, want) || task.Retried != 0 {
			t.Errorf("last error %q after %d retries, want %q", task.LastErr, task.Retried, want)
		}
		// A task waits for 1 to 5 s, and asynq rounds that up to a second.
		if n := attempts.Load(); n < 55/6 || n > 55/1 {
			t.Errorf("%d attempts in 55 s, want one every 1 to 6 s", n)
		}
		if len(s.Runs()) != 0 || s.Journal.Count(want) != 1 {
			t.Errorf("ran %q, want it logged once:\n%s", s.Runs(), s.Journal)
		}
	})
}

// A second server that was made without our connection would archive each task that it denies on
// its last attempt, or whose time runs out. It keeps the tasks, and picks up no more while its slots
// are full. It gives them back when their time ends, or its own.
func TestServerWithoutOurConnectionArchivesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, sitetest.Policy(100, time.Hour))
		theirs, ours := s.Configs()
		sitetest.Calm(&theirs, &ours)
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		config := ad.Asynq(theirs)
		right := asynq.NewServer(ad.Redis(s.Asynq), config) // it is never started
		defer right.Shutdown()
		config.TaskCheckInterval = time.Second // asynq's own pause: no hook waits in its place
		config.ShutdownTimeout = time.Second
		server := asynq.NewServer(s.Asynq, config)
		var attempts atomic.Int64
		startBy(s, ad, server, &attempts)
		n := 2 * theirs.Concurrency
		for i := range n {
			// The first have asynq's own time limit, of 30 minutes.
			opts := []asynq.Option{asynq.TaskID(fmt.Sprint("t", i)), asynq.MaxRetry(0)}
			if i >= theirs.Concurrency {
				opts = append(opts, asynq.Timeout(time.Duration(i)*time.Second))
			}
			s.Enqueue(sitetest.AcmeTask(), opts...)
		}
		time.Sleep(3 * time.Minute)
		s.WantCounters(sitetest.Counters{Active: int64(theirs.Concurrency), Leases: int64(theirs.Concurrency)})
		if n := attempts.Load(); n != int64(theirs.Concurrency) {
			t.Errorf("%d attempts", n)
		}
		time.Sleep(30 * time.Minute)
		s.WantCounters(sitetest.Counters{Active: int64(theirs.Concurrency), Leases: int64(theirs.Concurrency)})
		if attempts.Load() < int64(n) || len(s.Runs()) != 0 {
			t.Errorf("%d attempts, ran %q", attempts.Load(), s.Runs())
		}
		if s.Journal.Count(`unavailable" err="worker: the asynq.Server was not made with the connection that Adapter.Redis returned`) != 1 {
			t.Errorf("want it logged once:\n%s", s.Journal)
		}
		server.Shutdown()
		info, err := s.Inspector.GetQueueInfo("default")
		if err != nil {
			t.Fatal(err)
		}
		s.WantStates("default", n-info.Scheduled, info.Scheduled)
		s.WantReported(nil, nil)
		if err := right.Start(asynq.HandlerFunc(s.Ok)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		s.WantCounters(sitetest.Counters{Processed: int64(n)})
	})
}

// startBy starts a server of asynq's by the adapter's middleware, and counts the attempts.
func startBy(s *sitetest.Site, ad *worker.Adapter, server *asynq.Server, attempts *atomic.Int64) {
	s.Helper()
	middleware, err := ad.Middleware()
	if err != nil {
		s.Fatal(err)
	}
	handler := middleware(asynq.HandlerFunc(s.Ok))
	if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		attempts.Add(1)
		return handler.ProcessTask(ctx, task)
	})); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { server.Shutdown(); ad.Close() })
}

func TestAContextOfNoServerIsAnError(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Policy(1, time.Hour))
	theirs, ours := s.Configs()
	ad, err := worker.NewAdapter(ours)
	if err != nil {
		t.Fatal(err)
	}
	asynq.NewServer(ad.Redis(s.Asynq), ad.Asynq(theirs))
	middleware, err := ad.Middleware()
	if err != nil {
		t.Fatal(err)
	}
	err = middleware(asynq.HandlerFunc(s.Ok)).ProcessTask(context.Background(), asynq.NewTask("x", nil))
	if err == nil || !strings.Contains(err.Error(), "does not come from an asynq.Server") || len(s.Runs()) != 0 {
		t.Errorf("%v, ran %q", err, s.Runs())
	}
}

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
	if err != nil {
		t.Fatal(err)
	}
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

// Servers and clients that were shut down leave no connection to Redis behind, even after failures.
func TestShutdownLeavesNoConnection(t *testing.T) {
	t.Parallel()
	addr := throttletest.Redis(t)
	watch, client := throttletest.Client(t, addr), redis.NewClient(&redis.Options{Addr: addr})
	s := sitetest.New(t, client, sitetest.Policy(2, time.Second), sitetest.AtOnceOf("slots", 1))
	connections := func() int {
		list, err := watch.ClientList(t.Context()).Result()
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(list, "\n")
	}
	var servers []*worker.Server
	for range 2 {
		servers = append(servers, s.Serve(func(ctx context.Context, task *asynq.Task) error {
			switch id, _ := asynq.GetTaskID(ctx); id[0] {
			case 'p':
				panic("on purpose")
			case 'r':
				if _, err := worker.FromContext(ctx).Reserve(ctx, throttle.Request{Policy: "slots"}); err != nil {
					return err
				}
			}
			return s.Ok(ctx, task)
		}))
	}
	planner := s.Client(s.Limiter)
	for _, id := range []string{"a", "p", "r", "b"} {
		if _, err := planner.EnqueueContext(t.Context(), sitetest.AcmeTask(), asynq.TaskID(id), asynq.MaxRetry(0)); err != nil {
			t.Fatal(err)
		}
	}
	s.Wait("some have run", func() bool { return len(s.Runs()) >= 2 })
	for _, server := range servers {
		server.Shutdown()
	}
	if err := planner.Close(); err != nil {
		t.Error(err)
	}
	s.Inspector.Close()
	s.Plain.Close()
	client.Close()
	s.Wait("no connection is left but that which counts them", func() bool { return connections() == 1 })
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
	for _, check := range []func(context.Context) ([]string, error){server.Check, s.Client(s.Limiter).Check} {
		if findings, err := check(t.Context()); err != nil || len(findings) != 1 || !strings.Contains(findings[0], "allkeys-lru") {
			t.Errorf("%q, %v", findings, err)
		}
	}
}

// Asynq says of a task without retries that these are used up, before anybody can tell it that the
// task was denied. Its log does not.
func TestAsynqsLogKnowsNoDenials(t *testing.T) {
	sitetest.Each(t, []throttle.Policy{sitetest.Policy(1, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
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
