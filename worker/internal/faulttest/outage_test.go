package faulttest

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// The limiter's Redis goes away, and asynq's does not: nothing runs, nothing is lost.
func TestFailsClosedWithoutTheLimitersRedis(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(100, time.Hour))
	var proxy sitetest.BreakableProxy
	s.Limiter = s.LimiterThrough(&proxy)
	proxy.Cut()
	ids := []string{"a", "b", "c"}
	for _, id := range ids {
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(id), asynq.MaxRetry(0))
	}
	s.Serve(s.Ok)
	for _, id := range ids {
		s.Wait("it is requeued", func() bool {
			task := s.Task(id)
			return task.State == asynq.TaskStateScheduled && strings.HasPrefix(task.LastErr, "throttled: api, tenant acme, ") &&
				strings.Contains(task.LastErr, ": throttle: redis is unavailable: ") && task.Retried == 0
		})
	}
	expect.That(t, len(s.Runs()) == 0, "ran unthrottled:", s.Runs())
	proxy.Mend()
	for _, id := range ids {
		s.Inspector.RunTask("default", id) // unless it has run already
	}
	s.WaitGone(ids...)
	expect.That(t, len(s.Runs()) == 3, "ran", s.Runs(), ", want each once")
	s.WantCounters(sitetest.Counters{Processed: 3})
	s.WantReported(nil, nil)
	expect.That(t, s.Logs.Count("worker: the limiter is unavailable") == 1, "want the outage logged once:", s.Logs)
}

// An outage is logged once when it begins and once when it is over, for any number of tasks, even if others succeed.
func TestOutagesAreLoggedOnce(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1000, time.Hour), func(t *testing.T, s *sitetest.Site) {
		var proxy sitetest.BreakableProxy
		s.Limiter = s.LimiterThrough(&proxy)
		lookup := errors.New("the database of plans: \xff")
		var failing atomic.Bool
		failing.Store(true)
		limiter := expect.Got(throttle.New(throttle.Config{
			Client: s.Redis, Policies: s.Limiter.Policies(),
			Tenants: func(_ context.Context, _, tenant string) (throttle.Tenant, bool, error) {
				if failing.Load() && tenant == "unlucky" {
					return throttle.Tenant{}, false, lookup
				}
				return throttle.Tenant{}, false, nil
			},
		}))(t)
		enqueue := func(n int, tenant string) {
			for range n {
				s.Enqueue(sitetest.Task(tenant), asynq.MaxRetry(0))
			}
		}
		logged := func(begun, again int) {
			t.Helper()
			expect.That(t, s.Logs.Count("worker: the limiter is unavailable") == begun &&
				s.Logs.Count("worker: the limiter is available again") == again, "want", begun, "outages begun and",
				again, "over in the log:", s.Logs)
		}

		server := s.Serve(s.Ok)
		enqueue(5, "acme")
		time.Sleep(10 * time.Second)
		logged(0, 0)
		for range 2 {
			proxy.Cut()
			enqueue(20, "acme")
			time.Sleep(time.Minute)
			proxy.Mend()
			time.Sleep(30 * time.Second)
			enqueue(5, "acme")
			time.Sleep(30 * time.Second)
		}
		expect.Equal(t, len(s.Runs()), 55, "runs, want 55")
		logged(2, 2)
		server.Shutdown()

		s.Limiter = limiter
		s.Serve(s.Ok)
		s.Enqueue(sitetest.Task("unlucky"), asynq.TaskID("unlucky"), asynq.MaxRetry(0))
		for range 60 {
			enqueue(1, "acme")
			time.Sleep(time.Second)
		}
		logged(3, 2)
		task := s.Task("unlucky")
		expect.That(t, task.Retried == 0 && strings.HasSuffix(task.LastErr, "the database of plans: \uFFFD"), task)
		failing.Store(false)
		time.Sleep(time.Minute)
		enqueue(1, "acme")
		time.Sleep(10 * time.Second)
		logged(3, 3)
		s.WantCounters(sitetest.Counters{Processed: 117})
		s.WantReported(nil, nil)
	})
}

// The limiter takes longer than the task may, which is less than the 2 s that a task waits for a limiter. Asynq does
// not wait for it, and the task did not run. What it was granted too late it gives back.
func TestTimeRunsOutBeforeTheDecision(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, 10*time.Minute), func(t *testing.T, s *sitetest.Site) {
		var late atomic.Bool
		late.Store(true)
		s.Limiter = s.AnotherLimiter(hooktest.Hook(slowReplies(&late).See))
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0), asynq.Timeout(time.Second))
		s.Serve(s.Ok)
		time.Sleep(time.Minute)
		if task := s.Task("a"); task.State == asynq.TaskStateArchived ||
			!strings.Contains(task.LastErr, "time ran out before the limiter had answered") {
			t.Errorf("the task is %v, last error %q", task.State, task.LastErr)
		}
		expect.That(t, len(s.Runs()) == 0 && s.Logs.Count("time ran out") == 1, "ran", s.Runs(), ", log:", s.Logs)
		late.Store(false)
		time.Sleep(time.Minute)
		d, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		expect.That(t, err == nil && d.Windows[0].Used == int64(len(s.Runs())), d.Windows[0].Used, "units are used by", len(s.Runs()), "runs", err)
		time.Sleep(10 * time.Minute)
		s.WantCounters(sitetest.Counters{Processed: 1})
		s.Mu.Lock()
		defer s.Mu.Unlock()
		expect.That(t, len(s.Reported) == 0, "the user's ErrorHandler was told", s.Reported)
	})
}

// slowReplies holds replies to scripts back for 5 s.
func slowReplies(on *atomic.Bool) *sitetest.Fault {
	return &sitetest.Fault{
		Is: sitetest.IsScript, Lost: true,
		Hits:      func(int) bool { return on.Load() },
		Meanwhile: func() { time.Sleep(5 * time.Second) },
	}
}
