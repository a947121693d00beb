package queuetest

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A group is throttled as the task that it becomes.
func TestGroupsAreThrottledAfterAggregation(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 5*time.Second), func(t *testing.T, s *sitetest.Site) {
		s.Serve(s.Ok, sitetest.Brisk, func(c *asynq.Config, _ *worker.Config) {
			c.GroupAggregator = asynq.GroupAggregatorFunc(func(group string, tasks []*asynq.Task) *asynq.Task {
				return worker.NewTask(worker.Identity{Tenant: group}, "group", nil)
			})
			c.GroupGracePeriod, c.GroupMaxSize = time.Second, 5
		})
		client := s.Client(s.Limiter)
		for i := range 20 {
			part := worker.NewTask(worker.Identity{Tenant: "acme"}, "part", nil, asynq.Group("acme"))
			info, err := client.EnqueueContext(t.Context(), part)
			expect.Require(t, err == nil && info.State == asynq.TaskStateAggregating, "part", i, info, err)
		}
		tickets := s.InLine()
		expect.That(t, len(tickets) == 0, "parts of a group stand in line:", tickets)
		s.SleepUntil(4, 25*time.Second)
		s.WantWakes(sitetest.DeniedAndRun)
		s.WantNobodyInLine()
		ids := s.Order()
		expect.That(t, len(ids) == 4, "granted:", ids)
	})
}

// With earliest_reset nobody stands in line, and a denied task comes back at the first reset.
func TestEarliestResetKnowsNoLine(t *testing.T) {
	p := sitetest.Shared(5, 10*time.Second)
	p.EarliestReset = true
	p.Windows = append(p.Windows, throttle.Window{Name: "long", Limit: 5, Period: time.Minute})
	sitetest.Bubble(t, p, func(t *testing.T, s *sitetest.Site) {
		s.Serve(s.Ok)
		s.EnqueueMany("acme", 0, 15)
		begun := time.Now()
		e := s.JoinMany(s.Client(s.Limiter), "acme", 15, 1)[0]
		expect.That(t, e.Info.State == asynq.TaskStatePending && !e.Start.Joined, "enqueued as", e.Info.State)
		time.Sleep(5 * time.Second)
		s.WantNobodyInLine()
		tasks, err := s.Inspector.ListScheduledTasks("default")
		expect.That(t, err == nil && len(tasks) == 11 && tasks[0].NextProcessAt.Sub(begun) >= 10*time.Second &&
			tasks[0].NextProcessAt.Sub(begun) <= 12*time.Second, len(tasks), "wait,", err)
		s.SleepUntil(16, 5*time.Minute)
	})
}

// A task whose handler returned an error comes back after asynq's own delay, at the front of its tenant's
// waiters, whether or not the error counts as a failure.
func TestAFailedTaskComesBackInFront(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(true, false), func(t *testing.T, failure bool) {
		s := sitetest.NewInBubble(t, sitetest.Shared(1, 10*time.Second))
		failed := false
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			if !failed {
				failed = true
				return errors.New("boom")
			}
			return s.Ok(ctx, task)
		}, func(c *asynq.Config, _ *worker.Config) {
			c.IsFailure = func(error) bool { return failure }
			c.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return 12 * time.Second }
		})
		s.EnqueueMany("acme", 0, 6)
		s.SleepUntil(7, 90*time.Second) // it is back before the third of them starts, at 20 s
		expect.Equal(t, s.Order()[:3], []string{"acme-0000", "acme-0001", "acme-0000"}, "granted")
		want := sitetest.Counters{Processed: 6}
		if failure {
			want = sitetest.Counters{Processed: 7, Failed: 1}
		}
		s.WantCounters(want)
		s.WantNobodyInLine()
	})
}

// The limiter puts a pending task in line, and its reply is lost. The task waits for a second or
// more, and its ticket may be taken before. It keeps its place.
func TestTaskThatJoinedUnknownKeepsItsPlace(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 900*time.Millisecond), func(t *testing.T, s *sitetest.Site) {
		s.Fill("other")
		var loses atomic.Bool
		loses.Store(true)
		s.Limiter = s.AnotherLimiter(hooktest.Hook((&sitetest.Fault{
			Is: sitetest.WithArg("reserve"), Lost: true, Err: context.DeadlineExceeded, Hits: func(int) bool { return loses.Load() },
		}).See))
		s.Serve(s.Ok, sitetest.Brisk)
		s.EnqueueMany("acme", 0, 1)
		time.Sleep(200 * time.Millisecond)
		loses.Store(false)
		s.EnqueueMany("acme", 1, 1)
		time.Sleep(10 * time.Second)
		got := s.Order()
		expect.That(t, slices.Equal(got, []string{"acme-0000", "acme-0001"}), "ran", got)
	})
}
