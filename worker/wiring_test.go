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
	for name, c := range map[string]struct {
		use  func(*worker.Throttle)
		want string
	}{
		"neither": {func(*worker.Throttle) {}, "worker: Throttle.Redis was not called: make the asynq.Server with Redis(...), or tasks that are denied on their last attempt are archived"},
		"Redis":   {func(th *worker.Throttle) { th.Redis(s.asynq) }, "worker: Throttle.Asynq was not called: make the asynq.Server with Asynq(...), or denials are reported as failures"},
		"Asynq":   {func(th *worker.Throttle) { th.Asynq(theirs) }, "worker: Throttle.Redis was not called: make the asynq.Server with Redis(...), or tasks that are denied on their last attempt are archived"},
	} {
		th, err := worker.New(ours)
		if err != nil {
			t.Fatal(err)
		}
		c.use(th)
		if _, err := th.Middleware(); err == nil || err.Error() != c.want {
			t.Errorf("%s: got  %v\nwant %s", name, err, c.want)
		}
	}
}

func TestNoMiddlewareNoTask(t *testing.T) {
	each(t, nil, func(t *testing.T, s *site) {
		theirs, ours := s.configs()
		theirs.Logger, theirs.LogLevel = asynqLog{s.log}, asynq.ErrorLevel
		th, err := worker.New(ours)
		if err != nil {
			t.Fatal(err)
		}
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("a"))
		server := asynq.NewServer(th.Redis(s.asynq), th.Asynq(theirs))
		if err := server.Start(asynq.HandlerFunc(s.ok)); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.wait("asynq logs why", func() bool {
			return s.log.count("worker: no task is picked up, as it would run unthrottled: call Throttle.Middleware") > 0
		})
		if s.task("a").State != asynq.TaskStatePending {
			t.Errorf("the task is %v, want pending", s.task("a").State)
		}
		if _, err := th.Middleware(); err != nil {
			t.Fatal(err)
		}
		s.waitGone("a") // unmatched: it runs from now on
	})
}

func TestMiddlewareLeftOutIsLogged(t *testing.T) {
	each(t, nil, func(t *testing.T, s *site) {
		if err := s.limiter.SetPolicies(append(s.limiter.Policies(), policy(1, time.Hour))); err != nil {
			t.Fatal(err)
		}
		theirs, ours := s.configs()
		th, err := worker.New(ours)
		if err != nil {
			t.Fatal(err)
		}
		server := asynq.NewServer(th.Redis(s.asynq), th.Asynq(theirs))
		if _, err := th.Middleware(); err != nil {
			t.Fatal(err)
		}
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("a"))
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("b"))
		if err := server.Start(asynq.HandlerFunc(s.ok)); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.waitGone("a", "b")
		if s.log.count("worker: a task ran unthrottled: put what Throttle.Middleware returns into the handler") != 1 {
			t.Errorf("want it logged once:\n%s", s.log)
		}
	})
}

// A server that was made, but with something else, runs nothing unthrottled. The half that is
// there saves what it can.
func TestServerWithoutOneHalf(t *testing.T) {
	for name, c := range map[string]struct {
		server func(*site, *worker.Throttle, asynq.Config) *asynq.Server
		want   string
		opts   []asynq.Option
	}{
		"config": {
			func(s *site, th *worker.Throttle, c asynq.Config) *asynq.Server {
				th.Asynq(c)
				return asynq.NewServer(th.Redis(s.asynq), c)
			},
			"worker: the asynq.Server was not made with the config that Throttle.Asynq returned",
			[]asynq.Option{asynq.MaxRetry(0)},
		},
		"connection": {
			func(s *site, th *worker.Throttle, c asynq.Config) *asynq.Server {
				th.Redis(s.asynq)
				c = th.Asynq(c)
				c.TaskCheckInterval = time.Second // it would ask a thousand times a second, as nobody waits in its place
				return asynq.NewServer(s.asynq, c)
			},
			"worker: the asynq.Server was not made with the connection that Throttle.Redis returned",
			[]asynq.Option{asynq.MaxRetry(1)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, policy(100, time.Hour))
				theirs, ours := s.configs()
				calm(&theirs, &ours)
				th, err := worker.New(ours)
				if err != nil {
					t.Fatal(err)
				}
				server := c.server(s, th, theirs)
				middleware, err := th.Middleware()
				if err != nil {
					t.Fatal(err)
				}
				s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), append(c.opts, asynq.TaskID("a"))...)
				var attempts atomic.Int64
				handler := middleware(asynq.HandlerFunc(s.ok))
				if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
					attempts.Add(1)
					return handler.ProcessTask(ctx, task)
				})); err != nil {
					t.Fatal(err)
				}
				defer th.Close()
				defer server.Shutdown()
				time.Sleep(time.Minute)
				if len(s.runs()) != 0 {
					t.Errorf("ran %q", s.runs())
				}
				task := s.task("a")
				if !strings.HasPrefix(task.LastErr, "throttled: api, tenant acme, ") || !strings.HasSuffix(task.LastErr, c.want) || task.Retried != 0 {
					t.Errorf("last error %q after %d retries, want %q", task.LastErr, task.Retried, c.want)
				}
				if n := attempts.Load(); n < 10 || n > 35 {
					t.Errorf("%d attempts in a minute, want one every 2 to 5 s", n)
				}
				if s.log.count(c.want) != 1 {
					t.Errorf("want it logged once:\n%s", s.log)
				}
			})
		})
	}
}

func TestContextOfAnotherServer(t *testing.T) {
	s := newSite(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), policy(1, time.Hour))
	theirs, ours := s.configs()
	th, err := worker.New(ours)
	if err != nil {
		t.Fatal(err)
	}
	th.Redis(s.asynq)
	th.Asynq(theirs)
	middleware, err := th.Middleware()
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

// synctestSite is a site on a miniredis in memory, for use within a bubble.
// Servers and clients that were shut down leave no connection to Redis behind, whatever their tasks met.
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
					if _, err := worker.Reserve(ctx, throttle.Request{Policy: "slots"}, 0); err != nil {
						return err
					}
				}
				return s.ok(ctx, task)
			})); err != nil {
				t.Fatal(err)
			}
			servers = append(servers, server)
		}
		planner, err := worker.NewClient(s.asynq, worker.ClientConfig{Limiter: s.limiter})
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
