package worker_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Middlewares may make the same text of a denial and of a failure. IsFailure is called for the
// failure and not for the denial, though asynq does not tell it which task it is about.
func TestADenialIsNotTakenForAFailureOfTheSameText(t *testing.T) {
	sitetest.Each(t, []throttle.Policy{sitetest.Policy(1, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
		theirs, ours := s.Configs()
		failing, denied := make(chan struct{}), make(chan struct{})
		record := theirs.ErrorHandler
		theirs.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
		theirs.ErrorHandler = asynq.ErrorHandlerFunc(func(ctx context.Context, task *asynq.Task, err error) {
			record.HandleError(ctx, task, err)
			close(failing)
			<-denied
		})
		_, server, middleware := s.Adapted(theirs, ours)
		handler := middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return errors.New("boom") }))
		if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			if err := handler.ProcessTask(ctx, task); err != nil {
				return errors.New("try later")
			}
			return nil
		})); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("fails"), asynq.MaxRetry(1))
		<-failing
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("waits"), asynq.MaxRetry(1))
		s.WaitState(asynq.TaskStateScheduled, "waits")
		s.Mu.Lock()
		asked := len(s.Asked)
		s.Mu.Unlock()
		close(denied)
		if asked != 0 {
			t.Errorf("IsFailure was called %d times for the denial", asked)
		}
		s.WaitState(asynq.TaskStateRetry, "fails")
		s.WantReported([]string{"try later"}, []string{"try later"})
		s.WantCounters(sitetest.Counters{Processed: 1, Failed: 1, Scheduled: 1, Retry: 1})
	})
}

// A denied task waits, even if a middleware around ours wraps, replaces or swallows the error.
func TestATaskWaitsWhateverAMiddlewareMakesOfItsDenial(t *testing.T) {
	around := map[string]struct {
		do       func(error) error
		opts     []asynq.Option
		reported string // to the user's ErrorHandler
	}{
		"none":          {do: func(err error) error { return err }},
		"wrapped":       {do: func(err error) error { return fmt.Errorf("outer: %w", err) }},
		"as text":       {do: func(err error) error { return fmt.Errorf("outer: %v", err) }},
		"replaced":      {do: func(error) error { return errors.New("outer: try later") }},
		"skip retry":    {do: func(err error) error { return fmt.Errorf("%w: %w", err, asynq.SkipRetry) }},
		"revoked":       {do: func(err error) error { return fmt.Errorf("%w: %w", err, asynq.RevokeTask) }},
		"swallowed":     {do: func(error) error { return nil }},
		"kept":          {do: func(error) error { return nil }, opts: []asynq.Option{asynq.Retention(time.Hour)}},
		"unique":        {do: func(error) error { return nil }, opts: []asynq.Option{asynq.Unique(time.Hour)}},
		"kept, unique":  {do: func(error) error { return nil }, opts: []asynq.Option{asynq.Unique(time.Hour), asynq.Retention(time.Hour)}},
		"panic":         {do: func(error) error { panic("outer") }, reported: "outer"},
		"with deadline": {do: func(err error) error { return err }, opts: []asynq.Option{asynq.Deadline(time.Now().Add(3 * time.Hour)), asynq.Timeout(time.Minute)}},
	}
	for _, retries := range []int{0, 3} {
		t.Run(fmt.Sprint("MaxRetry ", retries), func(t *testing.T) {
			sitetest.Each(t, []throttle.Policy{sitetest.Policy(1, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
				theirs, ours := s.Configs()
				promised := map[string]time.Time{}
				onDecision := ours.OnDecision
				ours.OnDecision = func(ctx context.Context, task *asynq.Task, d throttle.Decision) {
					onDecision(ctx, task, d)
					s.Mu.Lock()
					defer s.Mu.Unlock()
					if !d.Granted {
						promised[task.Type()] = time.Now().Add(d.RetryIn)
					}
				}
				ad, server, middleware := s.Adapted(theirs, ours)
				mux := asynq.NewServeMux()
				mux.Use(func(next asynq.Handler) asynq.Handler {
					return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
						err := next.ProcessTask(ctx, task)
						if err != nil {
							return around[task.Type()].do(err)
						}
						return nil
					})
				}, middleware)
				for name := range around {
					mux.HandleFunc(name, s.Ok)
				}

				var ids []string
				before := map[string]asynq.TaskInfo{}
				for name, c := range around {
					s.Fill(name)
					opts := append([]asynq.Option{asynq.TaskID(name), asynq.MaxRetry(retries)}, c.opts...)
					s.Enqueue(worker.NewTask(worker.Identity{Tenant: name}, name, []byte("payload of "+name)), opts...)
					ids = append(ids, name)
					before[name] = s.Task(name)
				}
				if err := server.Start(mux); err != nil {
					t.Fatal(err)
				}
				defer server.Shutdown()

				s.WaitState(asynq.TaskStateScheduled, ids...)
				reason := map[string]string{}
				for _, d := range s.Denials() {
					reason[d.Tenant] = d.Reason()
				}
				for _, id := range ids {
					task := s.Task(id)
					text, start, _ := strings.Cut(task.LastErr, ": expected to start at ")
					if text != reason[id] || !strings.HasPrefix(reason[id], "throttled: api/window, tenant ") {
						t.Errorf("%s: last error %q, want %q", id, task.LastErr, reason[id])
					}
					if at, err := time.Parse(time.RFC3339, start); err != nil || sitetest.Off(at, time.Now().Add(time.Hour)) {
						t.Errorf("%s: last error %q, want the time of the start, in an hour", id, task.LastErr)
					}
					s.Mu.Lock()
					promise := promised[id]
					s.Mu.Unlock()
					// RetryIn is from just before; the task is seen just after.
					if at := task.NextProcessAt; at.Before(promise) || at.After(time.Now().Add(time.Hour+time.Hour/2+time.Second)) {
						t.Errorf("%s: comes back at %v, promised was %v", id, at, promise)
					}
					if since := time.Since(task.LastFailedAt); since < 0 || since > time.Minute {
						t.Errorf("%s: last error %v ago", id, since)
					}
					task.State, task.LastErr, task.LastFailedAt, task.NextProcessAt = before[id].State, "", time.Time{}, before[id].NextProcessAt
					if got, want := fmt.Sprint(task), fmt.Sprint(before[id]); got != want {
						t.Errorf("the task has changed:\n%v\nwas\n%v", got, want)
					}
				}
				s.WantCounters(sitetest.Counters{Scheduled: int64(len(ids))})
				if _, err := s.Plain.Enqueue(worker.NewTask(worker.Identity{}, "unique", []byte("payload of unique")), asynq.Unique(time.Hour)); !errors.Is(err, asynq.ErrDuplicateTask) {
					t.Errorf("the unique task has lost its lock: %v", err)
				}
				waitForgotten(s, ad)

				s.Open(ids...)
				s.Wait("all have run", func() bool { return s.Counters().Processed == int64(len(ids)) })
				if got := s.Runs(); len(got) != len(ids) {
					t.Errorf("ran %q, want each once", got)
				}
				s.WantCounters(sitetest.Counters{Processed: int64(len(ids))})
				s.Mu.Lock()
				defer s.Mu.Unlock()
				if len(s.Reported) != 1 || !asynq.IsPanicError(s.Reported[0]) {
					t.Errorf("the user's ErrorHandler was told %q, want the panic", s.Reported)
				}
				if len(s.Asked) != 0 {
					t.Errorf("the user's IsFailure was asked about %q", s.Asked)
				}
			})
		})
	}
}

// A middleware may call ours again within one attempt: its last answer counts.
func TestTheMiddlewaresLastAnswerCounts(t *testing.T) {
	sitetest.Each(t, []throttle.Policy{sitetest.Policy(1, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
		theirs, ours := s.Configs()
		_, server, middleware := s.Adapted(theirs, ours)
		handler := middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return errors.New("boom") }))
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			if err := handler.ProcessTask(ctx, task); err == nil {
				t.Error("not denied")
			}
			s.Open()
			return handler.ProcessTask(ctx, task)
		})); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.WaitState(asynq.TaskStateArchived, "a")
		s.WantCounters(sitetest.Counters{Processed: 1, Failed: 1, Archived: 1})
		s.WantReported([]string{"boom"}, nil)
	})
}
