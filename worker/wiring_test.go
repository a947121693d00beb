package worker_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
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
)

func TestMiddlewareNamesTheMissingHalf(t *testing.T) {
	s := newSite(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), policy(1, time.Hour))
	theirs, ours := s.configs()
	noConnection := "worker: no asynq.Server has the connection that Adapter.Redis returns: " +
		"make the server with it first, or asynq archives tasks that are denied on their last attempt"
	for name, c := range map[string]struct {
		use  func(*worker.Adapter)
		want string
	}{
		"neither": {func(*worker.Adapter) {}, noConnection},
		"config only": {func(ad *worker.Adapter) {
			asynq.NewServer(s.asynq, ad.Asynq(theirs))
		}, noConnection},
		"connection returned and not used": {func(ad *worker.Adapter) {
			ad.Redis(s.asynq)
			asynq.NewServer(s.asynq, ad.Asynq(theirs))
		}, noConnection},
		"connection only": {func(ad *worker.Adapter) {
			asynq.NewServer(ad.Redis(s.asynq), theirs)
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
	each(t, nil, func(t *testing.T, s *site) {
		theirs, ours := s.configs()
		theirs.Logger, theirs.LogLevel = asynqLog{s.log}, asynq.ErrorLevel
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("a"))
		server := asynq.NewServer(ad.Redis(s.asynq), ad.Asynq(theirs))
		if err := server.Start(asynq.HandlerFunc(s.ok)); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.wait("asynq logs why", func() bool {
			return s.log.count("worker: no task is picked up, as it would run unthrottled: call Adapter.Middleware") > 0
		})
		if s.task("a").State != asynq.TaskStatePending {
			t.Errorf("the task is %v, want pending", s.task("a").State)
		}
		if _, err := ad.Middleware(); err != nil {
			t.Fatal(err)
		}
		s.waitGone("a") // unmatched: it runs from now on
	})
}

func TestAMiddlewareThatIsLeftOutIsLogged(t *testing.T) {
	each(t, nil, func(t *testing.T, s *site) {
		if err := s.limiter.SetPolicies(append(s.limiter.Policies(), policy(1, time.Hour))); err != nil {
			t.Fatal(err)
		}
		theirs, ours := s.configs()
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		server := asynq.NewServer(ad.Redis(s.asynq), ad.Asynq(theirs))
		if _, err := ad.Middleware(); err != nil {
			t.Fatal(err)
		}
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("a"))
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("b"))
		if err := server.Start(asynq.HandlerFunc(s.ok)); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.waitGone("a", "b")
		if s.log.count("worker: a task ran unthrottled: put what Adapter.Middleware returns into the handler") != 1 {
			t.Errorf("want it logged once:\n%s", s.log)
		}
	})
}

// A server that was made with our connection and another config runs nothing unthrottled, and loses
// nothing.
func TestServerWithoutOurConfigLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(100, time.Hour))
		theirs, ours := s.configs()
		calm(&theirs, &ours)
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		ad.Asynq(theirs)
		server := asynq.NewServer(ad.Redis(s.asynq), theirs)
		var attempts atomic.Int64
		s.startBy(ad, server, &attempts)
		s.enqueue(acmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		time.Sleep(time.Minute)
		const want = "worker: the asynq.Server was not made with the config that Adapter.Asynq returned"
		task := s.task("a")
		if !strings.HasPrefix(task.LastErr, "throttled: api, tenant acme, ") || !strings.HasSuffix(task.LastErr, want) || task.Retried != 0 {
			t.Errorf("last error %q after %d retries, want %q", task.LastErr, task.Retried, want)
		}
		if n := attempts.Load(); n < 10 || n > 35 {
			t.Errorf("%d attempts in a minute, want one every 2 to 5 s", n)
		}
		if len(s.runs()) != 0 || s.log.count(want) != 1 {
			t.Errorf("ran %q, want it logged once:\n%s", s.runs(), s.log)
		}
	})
}

// A second server that was made without our connection would archive each task that it denies on
// its last attempt, or whose time runs out. It keeps the tasks, and picks up no more while its slots
// are full. It gives them back when their time ends, or its own.
func TestServerWithoutOurConnectionArchivesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(100, time.Hour))
		theirs, ours := s.configs()
		calm(&theirs, &ours)
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		config := ad.Asynq(theirs)
		right := asynq.NewServer(ad.Redis(s.asynq), config) // it is never started
		defer right.Shutdown()
		config.TaskCheckInterval = time.Second // asynq's own pause: no hook waits in its place
		config.ShutdownTimeout = time.Second
		server := asynq.NewServer(s.asynq, config)
		var attempts atomic.Int64
		s.startBy(ad, server, &attempts)
		n := 2 * theirs.Concurrency
		for i := range n {
			// The first have asynq's own time limit, of 30 minutes.
			opts := []asynq.Option{asynq.TaskID(fmt.Sprint("t", i)), asynq.MaxRetry(0)}
			if i >= theirs.Concurrency {
				opts = append(opts, asynq.Timeout(time.Duration(i)*time.Second))
			}
			s.enqueue(acmeTask(), opts...)
		}
		time.Sleep(3 * time.Minute)
		s.wantCounters(counters{Active: int64(theirs.Concurrency), Leases: int64(theirs.Concurrency)})
		if n := attempts.Load(); n != int64(theirs.Concurrency) {
			t.Errorf("%d attempts", n)
		}
		time.Sleep(30 * time.Minute)
		s.wantCounters(counters{Active: int64(theirs.Concurrency), Leases: int64(theirs.Concurrency)})
		if attempts.Load() < int64(n) || len(s.runs()) != 0 {
			t.Errorf("%d attempts, ran %q", attempts.Load(), s.runs())
		}
		if s.log.count(`unavailable" err="worker: the asynq.Server was not made with the connection that Adapter.Redis returned`) != 1 {
			t.Errorf("want it logged once:\n%s", s.log)
		}
		server.Shutdown()
		info, err := s.inspector.GetQueueInfo("default")
		if err != nil {
			t.Fatal(err)
		}
		s.wantStates("default", n-info.Scheduled, info.Scheduled)
		s.wantReported(nil, nil)
		if err := right.Start(asynq.HandlerFunc(s.ok)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		s.wantCounters(counters{Processed: int64(n)})
	})
}

// startBy starts a server of asynq's by the adapter's middleware, and counts the attempts.
func (s *site) startBy(ad *worker.Adapter, server *asynq.Server, attempts *atomic.Int64) {
	s.Helper()
	middleware, err := ad.Middleware()
	if err != nil {
		s.Fatal(err)
	}
	handler := middleware(asynq.HandlerFunc(s.ok))
	if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		attempts.Add(1)
		return handler.ProcessTask(ctx, task)
	})); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { server.Shutdown(); ad.Close() })
}

func TestAContextOfNoServerIsAnError(t *testing.T) {
	s := newSite(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), policy(1, time.Hour))
	theirs, ours := s.configs()
	ad, err := worker.NewAdapter(ours)
	if err != nil {
		t.Fatal(err)
	}
	asynq.NewServer(ad.Redis(s.asynq), ad.Asynq(theirs))
	middleware, err := ad.Middleware()
	if err != nil {
		t.Fatal(err)
	}
	err = middleware(asynq.HandlerFunc(s.ok)).ProcessTask(context.Background(), asynq.NewTask("x", nil))
	if err == nil || !strings.Contains(err.Error(), "does not come from an asynq.Server") || len(s.runs()) != 0 {
		t.Errorf("%v, ran %q", err, s.runs())
	}
}

// Shutdown closes what NewServer opened, also of a server that never started.
func TestShutdownClosesTheConnection(t *testing.T) {
	m := throttletest.Miniredis(t)
	client := redis.NewClient(&redis.Options{Addr: m.Addr()})
	s := newSite(t, client, policy(1, time.Hour))
	s.fill("acme")
	s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("a"))
	server := s.serve(s.ok)
	s.waitState(asynq.TaskStateScheduled, "a")
	theirs, ours := s.configs()
	idle, err := worker.NewServer(s.asynq, theirs, ours)
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
	if err := server.Start(asynq.HandlerFunc(s.ok)); !errors.Is(err, asynq.ErrServerClosed) {
		t.Errorf("started again after Shutdown: %v", err)
	}
	s.inspector.Close()
	s.plain.Close()
	client.Close()
	s.wait("all connections are closed", func() bool { return m.CurrentConnectionCount() == 0 })
}

func TestPackageKnowsNoYAML(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, out)
	}
	if !strings.Contains(string(out), "hibiken/asynq") || strings.Contains(string(out), "yaml") {
		t.Errorf("package worker depends on:\n%s", out)
	}
}

// Servers and clients that were shut down leave no connection to Redis behind, even after failures.
func TestShutdownLeavesNoConnection(t *testing.T) {
	t.Parallel()
	client := throttletest.Client(t, throttletest.Redis(t))
	s := newSite(t, client, policy(2, time.Second), atOnceOf("slots", 1))
	connections := func() int {
		list, err := client.ClientList(t.Context()).Result()
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(list, "\n")
	}
	before := 0
	for round := range 4 {
		var servers []*worker.Server
		for range 2 {
			theirs, ours := s.configs()
			server, err := worker.NewServer(s.asynq, theirs, ours)
			if err != nil {
				t.Fatal(err)
			}
			if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
				switch id, _ := asynq.GetTaskID(ctx); id[0] {
				case 'p':
					panic("on purpose")
				case 'r':
					if _, err := worker.FromContext(ctx).Reserve(ctx, throttle.Request{Policy: "slots"}); err != nil {
						return err
					}
				}
				return s.ok(ctx, task)
			})); err != nil {
				t.Fatal(err)
			}
			servers = append(servers, server)
		}
		planner, err := worker.NewClient(s.asynq, worker.ClientConfig{Limiter: s.limiter, LimiterTimeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{"a", "p", "r", "b"} {
			if _, err := planner.EnqueueContext(t.Context(), task("acme"), asynq.TaskID(fmt.Sprint(id, round)), asynq.MaxRetry(0)); err != nil {
				t.Fatal(err)
			}
		}
		s.wait("some have run", func() bool { return len(s.runs()) >= 2*(round+1) })
		for _, server := range servers {
			server.Shutdown()
		}
		if err := planner.Close(); err != nil {
			t.Error(err)
		}
		if round == 0 {
			time.Sleep(100 * time.Millisecond) // until Redis has heard of the ends
			before = connections()             // those of the limiter and of the test itself, which stay
		}
	}
	s.wait("no connection is left over", func() bool { return connections() <= before+3 })
}

// adapted returns a server as asynq makes it, by an adapter.
func (s *site) adapted(theirs asynq.Config, ours worker.Config) (*worker.Adapter, *asynq.Server, asynq.MiddlewareFunc) {
	s.Helper()
	ad, err := worker.NewAdapter(ours)
	if err != nil {
		s.Fatal(err)
	}
	server := asynq.NewServer(ad.Redis(s.asynq), ad.Asynq(theirs))
	middleware, err := ad.Middleware()
	if err != nil {
		s.Fatal(err)
	}
	return ad, server, middleware
}

// Asynq says of a task without retries that these are used up, before anybody can tell it that the
// task was denied. Its log does not.
func TestAsynqsLogKnowsNoDenials(t *testing.T) {
	each(t, []throttle.Policy{policy(1, time.Hour)}, func(t *testing.T, s *site) {
		s.fill("acme")
		s.enqueue(acmeTask(), asynq.TaskID("denied"), asynq.MaxRetry(0))
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "zeta"}, "x", nil), asynq.TaskID("fails"), asynq.MaxRetry(0))
		log := &journal{}
		s.serve(func(context.Context, *asynq.Task) error { return errors.New("boom") }, func(theirs *asynq.Config, _ *worker.Config) {
			theirs.Logger, theirs.LogLevel = asynqLog{log}, asynq.WarnLevel
		})
		s.waitState(asynq.TaskStateScheduled, "denied")
		s.waitState(asynq.TaskStateArchived, "fails")
		if log.count("Retry exhausted for task id=denied") > 0 || log.count("Retry exhausted for task id=fails") != 1 {
			t.Errorf("it says:\n%s", log)
		}
	})
}
