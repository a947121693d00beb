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

// github is a policy that matches some task types only.
func github() throttle.Policy {
	p := sitetest.Policy(100, time.Hour)
	p.Match = []string{"github:*"}
	return p
}

// A task type may be misspelt. Each is logged once, with either value of Unmatched, and every
// attempt is counted.
func TestUnmatchedTypesAreLoggedOnceAndCounted(t *testing.T) {
	for unmatched, want := range map[worker.Unmatched]string{
		worker.UnmatchedRun:    "its tasks run unthrottled\" type=",
		worker.UnmatchedReject: "its tasks fail\" type=",
	} {
		t.Run(string(unmatched), func(t *testing.T) {
			sitetest.OnRedis(t, []throttle.Policy{github()}, func(t *testing.T, s *sitetest.Site) {
				server := s.Serve(s.Ok, func(_ *asynq.Config, c *worker.Config) { c.Unmatched = unmatched })
				for i := range 6 {
					s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, []string{"githib:star", "gitbuh:star", "github:star"}[i%3], nil),
						asynq.MaxRetry(0), asynq.TaskID(fmt.Sprint(i)))
				}
				s.Wait("all are processed", func() bool { return s.Counters().Processed == 6 })
				if n := server.UnmatchedCount(); n != 4 {
					t.Errorf("%d unmatched tasks are counted, want 4", n)
				}
				if s.Journal.Count(want) != 2 || s.Journal.Count("type=githib:star") != 1 || s.Journal.Count("type=gitbuh:star") != 1 {
					t.Errorf("want each type logged once:\n%s", s.Journal)
				}
				rejected := unmatched == worker.UnmatchedReject
				if n := len(s.Runs()); n != 6 && !rejected || n != 2 && rejected {
					t.Errorf("%d tasks ran", n)
				}
				s.Mu.Lock()
				defer s.Mu.Unlock()
				for _, err := range s.Reported {
					var typo *worker.UnmatchedError
					if !errors.As(err, &typo) || !strings.HasPrefix(typo.TaskType, "git") {
						t.Errorf("a task failed by %v", err)
					}
				}
			})
		})
	}
}

// Task types may be made up for each task: those that are logged, and remembered for it, are
// bounded.
func TestUnmatchedTypesThatAreLoggedAreBounded(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{github()}, func(t *testing.T, s *sitetest.Site) {
		server := s.Serve(s.Ok)
		for i := range 250 {
			s.Enqueue(asynq.NewTask(fmt.Sprint("made-up-", i), nil))
		}
		s.Wait("all are counted", func() bool { return server.UnmatchedCount() == 250 })
		if n := s.Journal.Count("its tasks run unthrottled"); n != 100 {
			t.Errorf("%d types are logged, want 100", n)
		}
		if n := s.Journal.Count("no more of them are logged"); n != 1 {
			t.Errorf("the end is logged %d times", n)
		}
	})
}

// In a task that no policy matches, RetryAfter is an error like any other: there is nothing to
// pause, and nothing bounds how often the task would come back.
func TestRetryAfterInAnUnmatchedTaskIsAFailure(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{github()}, func(t *testing.T, s *sitetest.Site) {
		s.Serve(func(context.Context, *asynq.Task) error { return worker.RetryAfter(time.Hour) })
		s.Enqueue(asynq.NewTask("githib:star", nil), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.WaitState(asynq.TaskStateArchived, "a")
		s.WantCounters(sitetest.Counters{Processed: 1, Failed: 1, Archived: 1})
		s.WantReported([]string{"worker: the upstream refuses calls for 1h0m0s"}, nil)
		if s.Journal.Count("worker: RetryAfter in a task that no policy matches") != 1 {
			t.Errorf("want it logged:\n%s", s.Journal)
		}
	})
}

// A policy that observes denies nothing: a task that it cannot count is enqueued and runs, and its type is
// logged once.
func TestAPolicyThatObservesFailsNoTask(t *testing.T) {
	observes := sitetest.Policy(100, time.Hour)
	observes.Mode = throttle.ModeObserve
	sitetest.OnRedis(t, []throttle.Policy{observes}, func(t *testing.T, s *sitetest.Site) {
		s.Serve(s.Ok)
		for _, enqueue := range []func(*asynq.Task, ...asynq.Option) (*asynq.TaskInfo, error){s.Client(s.Limiter).Enqueue, s.Plain.Enqueue} {
			for _, task := range []*asynq.Task{
				asynq.NewTask("anonymous", nil), worker.NewTask(worker.Identity{Tenant: "acme", Cost: map[string]int64{"requests": -1}}, "odd", nil),
			} {
				if _, err := enqueue(task, asynq.MaxRetry(0)); err != nil {
					t.Errorf("%s: %v", task.Type(), err)
				}
			}
		}
		s.Wait("all ran", func() bool { return len(s.Runs()) == 4 })
		if s.Journal.Count("it runs, and would fail") != 2 || s.Journal.Count("no tenant") != 1 {
			t.Errorf("want each type logged once:\n%s", s.Journal)
		}
	})
}
