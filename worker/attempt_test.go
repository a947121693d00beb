package worker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
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

// Waiting costs nothing on a first attempt without retries, and before the last attempt of a task that has failed,
// even if calls fail in the meantime. Real failures are counted as they are without throttling.
func TestFaultsCostNothing(t *testing.T) {
	for name, row := range map[string]struct {
		limiter bool // it is a call of the limiter
		lost    bool
		err     error
	}{
		"asynq's is not sent":   {false, false, io.ErrUnexpectedEOF},
		"asynq's reply lost":    {false, true, io.EOF},
		"asynq's is refused":    {false, false, errors.New("READONLY You can't write against a read only replica.")},
		"limiter's is not sent": {true, false, io.ErrClosedPipe},
		"limiter's reply lost":  {true, true, io.EOF},
		"limiter's is refused":  {true, false, errors.New("OOM command not allowed when used memory > 'maxmemory'.")},
		"limiter's reply wrong": {true, false, redis.Nil},
	} {
		// Before it waits, and all the retries there are: the task is denied, and requeued, or due, and joins.
		for _, failures := range []int{0, 1} {
			t.Run(fmt.Sprintf("%s after %d failures", name, failures), func(t *testing.T) {
				s := sitetest.OnRedis(t, sitetest.Policy(1, time.Hour))
				f := &sitetest.Fault{Is: []func([]any) bool{sitetest.IsRequeue, sitetest.IsForward}[failures], Lost: row.lost, Err: row.err, Hits: func(n int) bool { return n <= 2 }}
				if row.limiter {
					f.Is = sitetest.WithArg([]string{"reserve", "join"}[failures])
					s.Limiter = s.AnotherLimiter(hooktest.Hook(f.See))
				} else {
					s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(f.See))
				}
				if failures == 0 {
					d, err := s.LimiterOn(s.Redis).Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
					expect.Require(t, err == nil && d.Granted, d, err)
				}
				s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(failures))
				server := s.Serve(func(ctx context.Context, task *asynq.Task) error {
					s.Ok(ctx, task)
					if failures > 0 {
						return errors.New("boom")
					}
					return nil
				})
				s.Wait("it waits in line", func() bool {
					return f.Count() > 0 && s.Task("a").State == asynq.TaskStateScheduled && len(s.InLine()) == 1
				})
				last := []string{"throttled: api", "boom"}[failures]
				if task := s.Task("a"); task.Retried != failures || !strings.HasPrefix(task.LastErr, last) || len(s.Runs()) != failures ||
					s.Logs.Count("stood in no line") > 0 {
					t.Errorf("%d retries, last error %q, ran %d times\n%s", task.Retried, task.LastErr, len(s.Runs()), s.Logs)
				}
				s.WantCounters(sitetest.Counters{Processed: int64(failures), Failed: int64(failures), Scheduled: 1})
				s.Open("a")
				if failures == 0 {
					s.WaitGone("a")
					s.WantCounters(sitetest.Counters{Processed: 1})
					s.WantReported(nil, nil)
				} else {
					s.WaitState(asynq.TaskStateArchived, "a")
					s.WantCounters(sitetest.Counters{Processed: 2, Failed: 2, Archived: 1})
					s.WantReported([]string{"boom", "boom"}, []string{"boom"})
					task := s.Task("a")
					expect.That(t, task.Retried == 1 && task.LastErr == "boom", task.Retried, task.LastErr)
				}
				expect.Equal(t, len(s.Runs()), failures+1, "ran", "times")
				s.WaitUsed(2)
				waitForgotten(s, server)
				s.WantNobodyInLine()
			})
		}
	}
}

// waitForgotten waits until no attempt is remembered. That of a denied task ends after its requeue.
func waitForgotten(s *sitetest.Site, server *worker.Server) {
	s.Helper()
	s.Wait("no attempt is remembered", func() bool { return server.Attempts() == 0 })
}

// However an attempt ends that was granted, what it was granted stays granted, once, and its slot is given back when
// the handler returns. The task fails as it does without throttling, and nothing is remembered of it.
func TestAttemptsThatEndBadly(t *testing.T) {
	p := sitetest.Policy(100, time.Hour)
	p.Windows = append(p.Windows, throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 4})
	s := sitetest.OnRedis(t, p)
	end := make(chan struct{})
	server := s.Serve(func(ctx context.Context, task *asynq.Task) error {
		s.Ok(ctx, task)
		switch id, _ := asynq.GetTaskID(ctx); id {
		case "panics":
			panic("oh")
		case "cancelled":
			<-ctx.Done()
			return ctx.Err()
		}
		<-end // it does not look at its context
		return nil
	})
	ids := []string{"cancelled", "ignores", "outlives", "panics"}
	for _, id := range ids {
		opts := []asynq.Option{asynq.TaskID(id), asynq.MaxRetry(0)}
		if id == "outlives" {
			opts = append(opts, asynq.Timeout(time.Second))
		}
		s.Enqueue(sitetest.AcmeTask(), opts...)
	}
	s.Wait("all run", func() bool { return len(s.Runs()) == 4 })
	s.Wait("they are cancelled", func() bool { // asynq may not listen yet
		s.Inspector.CancelProcessing("cancelled")
		s.Inspector.CancelProcessing("ignores")
		return s.Task("cancelled").State == asynq.TaskStateArchived && s.Task("ignores").State == asynq.TaskStateArchived
	})
	s.WaitState(asynq.TaskStateArchived, ids...)
	s.WantCounters(sitetest.Counters{Processed: 4, Failed: 4, Archived: 4})
	expect.Equal(t, len(s.Runs()), 4, "ran", "times")
	waitSlots := func(n int64) {
		s.Wait(fmt.Sprint(n, " slots are taken"), func() bool {
			d, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
			return err == nil && d.Windows[1].Used == n
		})
	}
	waitSlots(2) // of the handlers that go on, which asynq does not wait for
	close(end)
	waitSlots(0)
	s.WaitUsed(4)
	waitForgotten(s, server)
}

// A last attempt that was denied is granted by a take alone, which notes its start, and not when its denial is old.
func TestADeniedLastAttemptStartsByATake(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			expect.That(t, s.Stored("a")["sluice_started"] != "", "its start is not noted")
			return s.Ok(ctx, task)
		}, func(_ *asynq.Config, c *worker.Config) {
			var calls atomic.Int64
			c.Identify = func(task *asynq.Task) (worker.Identity, error) {
				if calls.Add(1) == 2 { // in the middleware
					time.Sleep(time.Second)
					s.Limiter.Reset(t.Context(), "api", "acme")
				}
				return worker.IdentityOf(task)
			}
		})
		time.Sleep(10 * time.Second)
		expect.Equal(t, s.Runs(), []string{"a"}, "ran")
	})
}

// A process stood still, and asynq's recoverer has given the task away meanwhile.
func TestATaskWhoseLeaseWasLostDoesNotRun(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Policy(1, time.Hour))
	err := s.Idle().Process(t.Context(), sitetest.AcmeTask(), s.Ok)
	expect.That(t, err != nil && strings.Contains(err.Error(), "lease was lost") && len(s.Runs()) == 0, err, "ran", s.Runs())
}

// Asynq makes no call for a task whose lease it has lost. The slot is free when the task's context
// ends, and is freed once if asynq makes its call after all.
func TestASlotIsFreeWhenItsTaskHasLostItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := sitetest.NewInBubble(t, sitetest.Policy(1, time.Hour)).Idle()
		var freed atomic.Int64
		server.OnFree(func() { freed.Add(1) })
		ctx, lose := context.WithCancel(t.Context())
		server.Attempt("a", ctx)
		want := func(n int64) {
			t.Helper()
			synctest.Wait()
			expect.Equal(t, freed.Load(), n, "freed")
		}
		want(0)
		lose()
		want(1)
		server.EndOf("a")()
		want(1)
	})
}

// What the middleware says of an attempt whose lease was lost says nothing of the one in which the task runs now.
func TestAttemptsAreKeptApart(t *testing.T) {
	s := sitetest.New(t, redis.NewClient(&redis.Options{}), sitetest.Policy(1, time.Hour))
	server := s.Idle()
	denyOld := server.Enter("a")
	denyNew := server.Enter("a")
	denyOld()
	expect.That(t, !server.Denied("a"), "the new attempt is denied by the old one")
	denyNew()
	expect.That(t, server.Denied("a"), "the new attempt is not denied")
}

// A task that goes back at shutdown is not a denied one any more.
func TestShutdownGivesTasksBack(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1, time.Hour))
	s.Fill("denied")
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("granted"), asynq.MaxRetry(0))
	s.Enqueue(sitetest.Task("denied"), asynq.TaskID("denied"), asynq.MaxRetry(0))
	stuck, denied := make(chan struct{}), make(chan struct{})
	defer close(stuck)
	handler := func(context.Context, *asynq.Task) error { <-stuck; return nil }
	server := s.Serve(handler, func(theirs *asynq.Config, ours *worker.Config) {
		theirs.ShutdownTimeout = time.Millisecond
		ours.OnDecision = func(_ context.Context, _ *asynq.Task, d throttle.Decision) {
			if !d.Granted {
				close(denied)
				<-stuck
			}
		}
	})
	<-denied
	s.WaitState(asynq.TaskStateActive, "granted", "denied")
	server.Shutdown()
	s.WaitState(asynq.TaskStatePending, "granted", "denied")
	s.WantCounters(sitetest.Counters{})
	waitForgotten(s, server)
}

// A task whose handler a shutdown stops waits in front of those that came later: it has had its turn.
func TestAStoppedTaskGoesFirst(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Minute), func(t *testing.T, s *sitetest.Site) {
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("first"))
		stuck := make(chan struct{})
		defer close(stuck)
		handler := func(context.Context, *asynq.Task) error { <-stuck; return nil }
		server := s.Serve(handler, func(c *asynq.Config, _ *worker.Config) { c.ShutdownTimeout = time.Second })
		time.Sleep(5 * time.Second)
		s.JoinMany(s.Client(s.Limiter), "acme", 0, 2)
		server.Shutdown()
		s.Serve(s.Ok)
		s.SleepUntil(4, 10*time.Minute)
		expect.Equal(t, s.Order(), []string{"first", "first", "acme-0000", "acme-0001"}, "granted")
	})
}

// Attempts whose end is never seen are forgotten, and others never.
func TestAnAttemptWhoseEndIsNotSeenIsForgotten(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		server := s.Idle()
		running, stop := context.WithCancel(context.Background())
		defer stop()
		ended, end := context.WithCancel(running)
		end()
		server.Attempt("before the middleware", nil)
		server.Attempt("running", running)
		server.Attempt("ended", ended)
		time.Sleep(worker.ForgetAfter - time.Minute)
		server.Attempt("new", nil)
		expect.Equal(t, server.Attempts(), 4, "attempts are remembered, want all 4")
		time.Sleep(2 * time.Minute)
		endNew := server.EndOf("new")
		server.Attempt("new", nil)
		expect.Equal(t, server.Attempts(), 2, "attempts are remembered, want the running and the new one")
		endNew()
		expect.That(t, server.Attempts() == 2, "the end of an attempt was taken for that of the next one")
		server.EndOf("new")()
		expect.Equal(t, server.Attempts(), 1, "attempts are remembered, want the running one")
	})
}
