package worker_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

// limitThrough lets the limiter reach its Redis, the same or another, through the cable.
func (s *site) limitThrough(c *cable, client *redis.Client) {
	s.Helper()
	through := connect(c.options(like(client)))
	s.Cleanup(func() { through.Close() })
	limiter, err := throttle.New(throttle.Config{Client: through, Policies: s.limiter.Policies()})
	if err != nil {
		s.Fatal(err)
	}
	s.limiter = limiter
}

// The limiter has a Redis of its own here, which goes away: nothing runs, nothing is lost.
func TestFailsClosedWithoutTheLimitersRedis(t *testing.T) {
	each(t, []throttle.Policy{policy(100, time.Hour)}, func(t *testing.T, s *site) {
		var c cable
		s.limitThrough(&c, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
		c.cut()
		ids := []string{"a", "b", "c"}
		for _, id := range ids {
			s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID(id), asynq.MaxRetry(0))
		}
		s.serve(s.ok)
		for _, id := range ids {
			s.wait("it is requeued", func() bool {
				task := s.task(id)
				return task.State == asynq.TaskStateScheduled && strings.HasPrefix(task.LastErr, "throttled: api, tenant acme, ") &&
					strings.Contains(task.LastErr, ": throttle: redis is unavailable: ") && task.Retried == 0
			})
		}
		if len(s.runs()) != 0 {
			t.Errorf("ran unthrottled: %q", s.runs())
		}
		c.mend()
		for _, id := range ids {
			s.inspector.RunTask("default", id) // unless it has run already
		}
		s.waitGone(ids...)
		if len(s.runs()) != 3 {
			t.Errorf("ran %q, want each once", s.runs())
		}
		s.wantCounters(counters{Processed: 3})
		s.wantReported(nil, nil)
		if s.log.count("worker: the limiter is unavailable") != 1 {
			t.Errorf("want the outage logged once:\n%s", s.log)
		}
	})
}

// An outage is logged once when it begins, every minute while it lasts, and once when it is over, for
// any number of tasks, even while others succeed.
func TestOutagesAreLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(1000, time.Hour))
		var c cable
		s.limitThrough(&c, s.redis)
		lookup := errors.New("the database of plans: \xff")
		var failing atomic.Bool
		failing.Store(true)
		limiter, err := throttle.New(throttle.Config{
			Client: s.redis, Policies: s.limiter.Policies(),
			Tenants: func(_ context.Context, _, tenant string) (throttle.Tenant, bool, error) {
				if failing.Load() && tenant == "unlucky" {
					return throttle.Tenant{}, false, lookup
				}
				return throttle.Tenant{}, false, nil
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		enqueue := func(n int, tenant string) {
			for range n {
				s.enqueue(worker.NewTask(worker.Identity{Tenant: tenant}, "x", nil), asynq.MaxRetry(0))
			}
		}
		logged := func(undecided, again int) {
			t.Helper()
			if s.log.count("worker: the limiter is unavailable") != undecided || s.log.count("worker: the limiter is available again") != again {
				t.Errorf("want %d outages begun and %d over in the log:\n%s", undecided, again, s.log)
			}
		}

		server := s.serve(s.ok, calm)
		enqueue(5, "acme")
		time.Sleep(10 * time.Second)
		logged(0, 0)
		for range 2 {
			c.cut()
			enqueue(20, "acme")
			time.Sleep(time.Minute)
			c.mend()
			time.Sleep(time.Minute)
			enqueue(5, "acme")
			time.Sleep(time.Minute)
		}
		if len(s.runs()) != 55 {
			t.Errorf("%d runs, want 55", len(s.runs()))
		}
		logged(2, 2)
		still := s.log.count("worker: the limiter is still unavailable")
		c.cut()
		enqueue(1, "acme")
		time.Sleep(3*time.Minute + 30*time.Second)
		if n := s.log.count("worker: the limiter is still unavailable") - still; n != 3 {
			t.Errorf("in three and a half minutes it is said %d times that an outage lasts\n%s", n, s.log)
		}
		c.mend()
		time.Sleep(time.Minute)
		enqueue(1, "acme")
		time.Sleep(time.Minute)
		logged(3, 3)
		server.Shutdown()

		s.limiter = limiter
		s.serve(s.ok, calm)
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "unlucky"}, "x", nil), asynq.TaskID("unlucky"), asynq.MaxRetry(0))
		for range 60 {
			enqueue(1, "acme")
			time.Sleep(time.Second)
		}
		logged(4, 3)
		if task := s.task("unlucky"); task.Retried != 0 || !strings.HasSuffix(task.LastErr, "the database of plans: \uFFFD") {
			t.Errorf("want the unlucky task to wait: %v after %d retries, last error %q", task.State, task.Retried, task.LastErr)
		}
		failing.Store(false)
		time.Sleep(time.Minute)
		enqueue(1, "acme")
		time.Sleep(time.Minute)
		logged(4, 4)
		s.wantCounters(counters{Processed: 119})
		s.wantReported(nil, nil)
	})
}

func TestFailOpenRunsAndIsLogged(t *testing.T) {
	p := policy(1, time.Hour)
	p.Fail = throttle.FailOpen
	each(t, []throttle.Policy{p}, func(t *testing.T, s *site) {
		var c cable
		s.limitThrough(&c, s.redis)
		c.cut()
		for _, id := range []string{"a", "b"} {
			s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID(id))
		}
		s.serve(s.ok)
		s.waitGone("a", "b")
		if s.log.count("worker: the limiter is unavailable") != 1 || s.log.count("fails=open") != 1 {
			t.Errorf("want it logged once:\n%s", s.log)
		}
	})
}

// The limiter takes longer than the task may: asynq does not wait for it, and the task did not
// run. What it was granted too late it gives back.
func TestTimeRunsOutBeforeTheDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(1, 10*time.Minute))
		slow := connect(like(s.redis))
		defer slow.Close()
		var late atomic.Bool
		late.Store(true)
		slow.AddHook(hooktest.Hook(slowReply{&late}.see))
		limiter, err := throttle.New(throttle.Config{Client: slow, Policies: s.limiter.Policies()})
		if err != nil {
			t.Fatal(err)
		}
		s.limiter = limiter
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("a"), asynq.MaxRetry(0), asynq.Timeout(2*time.Second))
		s.serve(s.ok, calm)
		time.Sleep(time.Minute)
		if task := s.task("a"); task.State == asynq.TaskStateArchived || !strings.Contains(task.LastErr, "time ran out before the limiter had answered") {
			t.Errorf("the task is %v, last error %q", task.State, task.LastErr)
		}
		if len(s.runs()) != 0 || s.log.count("time ran out") != 1 {
			t.Errorf("ran %q, log:\n%s", s.runs(), s.log)
		}
		late.Store(false)
		time.Sleep(time.Minute)
		d, err := s.limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		if err != nil || d.Windows[0].Used != int64(len(s.runs())) {
			t.Errorf("%d units are used by %d runs, %v", d.Windows[0].Used, len(s.runs()), err)
		}
		time.Sleep(10 * time.Minute)
		s.wantCounters(counters{Processed: 1})
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.reported) != 0 {
			t.Errorf("the user's ErrorHandler was told %q", s.reported)
		}
	})
}

// slowReply holds replies to scripts back for 5 s.
type slowReply struct{ on *atomic.Bool }

func (s slowReply) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	if s.on.Load() && err == nil && strings.HasPrefix(cmd.Name(), "eval") {
		time.Sleep(5 * time.Second)
	}
	return err
}

// A task that goes back at shutdown is not a denied one any more.
func TestShutdownGivesTasksBack(t *testing.T) {
	each(t, []throttle.Policy{policy(1, time.Hour)}, func(t *testing.T, s *site) {
		theirs, ours := s.configs()
		theirs.ShutdownTimeout = time.Millisecond
		ad, server, middleware := s.adapted(theirs, ours)
		s.fill("denied")
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("granted"), asynq.MaxRetry(0))
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "denied"}, "x", nil), asynq.TaskID("denied"), asynq.MaxRetry(0))
		stuck, denied := make(chan struct{}), make(chan struct{})
		defer close(stuck)
		handler := middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { <-stuck; return nil }))
		if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			err := handler.ProcessTask(ctx, task)
			close(denied)
			<-stuck
			return err
		})); err != nil {
			t.Fatal(err)
		}
		<-denied
		s.waitState(asynq.TaskStateActive, "granted", "denied")
		server.Shutdown()
		s.waitState(asynq.TaskStatePending, "granted", "denied")
		s.wantCounters(counters{})
		if ad.Attempts() != 0 {
			t.Errorf("%d attempts are remembered after their end", ad.Attempts())
		}
	})
}

// Attempts whose end is never seen are forgotten, and others never.
func TestAnAttemptWhoseEndIsNotSeenIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(1, time.Hour))
		_, ours := s.configs()
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		running, stop := context.WithCancel(context.Background())
		defer stop()
		ended, end := context.WithCancel(running)
		end()
		ad.Attempt("before the middleware", nil)
		ad.Attempt("running", running)
		ad.Attempt("ended", ended)
		time.Sleep(worker.ForgetAfter - time.Minute)
		ad.Attempt("new", nil)
		if ad.Attempts() != 4 {
			t.Errorf("%d attempts are remembered, want all 4", ad.Attempts())
		}
		time.Sleep(2 * time.Minute)
		endNew := ad.EndOf("new")
		ad.Attempt("new", nil)
		if ad.Attempts() != 2 {
			t.Errorf("%d attempts are remembered, want the running and the new one", ad.Attempts())
		}
		endNew()
		if ad.Attempts() != 2 {
			t.Error("the end of an attempt was taken for that of the next one")
		}
		ad.EndOf("new")()
		if ad.Attempts() != 1 {
			t.Errorf("%d attempts are remembered, want the running one", ad.Attempts())
		}
	})
}
