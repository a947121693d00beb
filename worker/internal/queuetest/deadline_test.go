package queuetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// wantLate fails unless the task was archived by a DeniedError, told once to the ErrorHandler, and not to IsFailure.
func wantLate(s *sitetest.Site, id string, retries int, reason string) {
	s.Helper()
	s.WaitState(asynq.TaskStateArchived, id)
	task := s.Task(id)
	expect.That(s, strings.HasPrefix(task.LastErr, reason) && strings.Contains(task.LastErr, ": would start 20") &&
		task.Retried == 0 && task.MaxRetry == retries, "archived by", task.LastErr, "after", task.Retried, "of",
		task.MaxRetry, "retries")
	s.Mu.Lock()
	defer s.Mu.Unlock()
	expect.Require(s, len(s.Reported) == 1 && len(s.Asked) == 0, "ErrorHandler was told", s.Reported, "IsFailure asked of", s.Asked)
	var late *throttle.DeniedError
	expect.Require(s, errors.As(s.Reported[0], &late), "the user's ErrorHandler was told", s.Reported[0])
	expect.That(s, late.Request.Deadline.Equal(task.Deadline) && !late.StartsAt.Before(task.Deadline) &&
		late.Error() == task.LastErr && late.Decision.Tenant == "acme", "told", late, "of", task)
}

// A task that can only start after its deadline fails once, at its denial, and leaves nothing
// behind. A Timeout does not count: it begins again at every attempt.
func TestADeniedTaskThatIsTooLateFailsOnce(t *testing.T) {
	for _, retries := range []int{0, 5} {
		t.Run(fmt.Sprint("MaxRetry ", retries), func(t *testing.T) {
			s := sitetest.OnRedis(t, sitetest.Policy(1, time.Hour))
			s.Fill("acme")
			keys := s.Redis.Keys(t.Context(), "sluice:*").Val()
			deadline := time.Now().Add(30 * time.Minute).Truncate(time.Second)
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("late"), asynq.MaxRetry(retries), asynq.Deadline(deadline))
			s.Serve(s.Ok)
			wantLate(s, "late", retries, "throttled: api/window, tenant acme, ")
			s.WantCounters(sitetest.Counters{Processed: 1, Failed: 1, Archived: 1})
			s.WantNobodyInLine()
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("hasty"), asynq.MaxRetry(retries), asynq.Timeout(time.Second))
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("in time"), asynq.MaxRetry(retries), asynq.Deadline(deadline.Add(3*time.Hour)))
			s.WaitState(asynq.TaskStateScheduled, "hasty", "in time")
			expect.That(t, len(s.Runs()) == 0 && len(s.Denials()) == 3, "ran", s.Runs(), len(s.Denials()), "denials")
			s.WaitUsed(1)
			for _, key := range keys { // of windows; a line's keys came with the two
				expect.That(t, s.Redis.Exists(t.Context(), key).Val() == 1, key, "is gone")
			}
			s.Open("hasty", "in time")
			s.WaitGone("hasty", "in time")
			s.WantCounters(sitetest.Counters{Processed: 3, Failed: 1, Archived: 1})
		})
	}
}

// The expected start was in time, but no worker took the task before its deadline. asynq fails such
// a task before any middleware sees it, and would go on until its retries are used up.
func TestATaskWhoseDeadlinePassesInLineFailsOnce(t *testing.T) {
	sitetest.EachBubble(t, map[string]bool{"denied": false, "planned": true}, func(t *testing.T, planned bool) {
		s := sitetest.NewInBubble(t, sitetest.Policy(1, 10*time.Minute))
		s.Fill("acme")
		opts := []asynq.Option{asynq.TaskID("late"), asynq.MaxRetry(5), asynq.Deadline(time.Now().Add(12 * time.Minute))}
		if planned {
			expect.Must(t, expect.ErrOf(s.Client(s.Limiter).EnqueueContext(t.Context(), sitetest.AcmeTask(), opts...)))
		} else {
			s.Enqueue(sitetest.AcmeTask(), opts...)
			server := s.Serve(s.Ok)
			time.Sleep(10 * time.Second)
			server.Shutdown()
		}
		got := s.InLine()
		expect.Require(t, slices.Equal(got, []string{"default/late"}), "in line:", got)
		time.Sleep(20 * time.Minute) // all workers are away
		s.Serve(s.Ok)
		time.Sleep(10 * time.Second)
		wantLate(s, "late", 5, "throttled: api, tenant acme: would start ")
		time.Sleep(5 * time.Minute)
		s.WantNobodyInLine()
		s.WantCounters(sitetest.Counters{Processed: 1, Failed: 1, Archived: 1})
		expect.That(t, len(s.Runs()) == 0 && s.Used() == 0, "ran", s.Runs(), s.Used(), "used")
	})
}

// So does a task that no policy matches, if a call of its handler is denied until then.
func TestATaskWhoseCallsAreDeniedUntilItsDeadlineFailsOnce(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 10*time.Minute), func(t *testing.T, s *sitetest.Site) {
		s.SetPolicy(func(p *throttle.Policy) { p.Match = nil }, s.Limiter)
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.MaxRetry(3), asynq.Deadline(time.Now().Add(4*time.Minute)))
		s.Serve(func(ctx context.Context, _ *asynq.Task) error {
			return expect.ErrOf(worker.FromContext(ctx).Wait(ctx, throttle.Request{Policy: "api", MaxWait: -1}))
		})
		time.Sleep(12 * time.Minute)
		s.WantCounters(sitetest.Counters{Processed: 1, Failed: 1, Archived: 1})
	})
}

// A task that ran and failed keeps asynq's ways when its deadline passes before it is retried.
func TestAFailedTaskWhoseDeadlinePassesKeepsAsynqsWays(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values("boom", "throttled: by somebody else"), func(t *testing.T, failure string) {
		s := sitetest.NewInBubble(t, sitetest.Policy(1, 5*time.Second))
		s.Fill("acme") // it is denied before it runs and fails
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(2), asynq.Deadline(time.Now().Add(10*time.Second)))
		fail := func(context.Context, *asynq.Task) error { return errors.New(failure) }
		s.Serve(fail, func(c *asynq.Config, _ *worker.Config) {
			c.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return 15 * time.Second }
		})
		time.Sleep(2 * time.Minute)
		const late = "context deadline exceeded"
		s.WantReported([]string{failure, late, late}, []string{failure, late})
		s.WantCounters(sitetest.Counters{Processed: 3, Failed: 3, Archived: 1})
		expect.That(t, len(s.Denials()) != 0, "it was not denied first")
	})
}

// The lock of a unique task of our client outlasts a wait that is longer than promised, and ends with it.
func TestAUniqueLockIsProlongedWhileTheTaskWaits(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, time.Minute), func(t *testing.T, s *sitetest.Site) {
		begun, client := time.Now(), s.Client(s.Limiter)
		s.JoinMany(client, "acme", 0, 2)
		unique := asynq.Unique(10 * time.Second)
		task := sitetest.AcmeTask(asynq.TaskID("unique"), unique)
		expect.Must(t, expect.ErrOf(client.EnqueueContext(t.Context(), task)))
		lock := s.Stored("unique")["unique_key"]
		s.Serve(s.Ok)
		time.Sleep(time.Second)
		// What was expected does not hold: workers look after the task, and it waits on.
		s.SetPolicy(func(p *throttle.Policy) { p.Windows[0].Period = 5 * time.Minute }, s.Limiter)
		for range 20 {
			_, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(unique))
			expect.Require(t, errors.Is(err, asynq.ErrDuplicateTask),
				"after", time.Since(begun), "the lock is open, and the task waits:", err)
			time.Sleep(20 * time.Second)
		}
		in := time.Until(s.Task("unique").NextProcessAt)
		expect.That(t, in >= sitetest.FallbackMin && s.WakesOf("unique") == 0, "workers look after the task in", in)
		s.SetPolicy(func(p *throttle.Policy) { p.Windows[0].Limit = 1000 }, s.Limiter)
		time.Sleep(time.Minute)
		n := s.Redis.Exists(t.Context(), lock).Val()
		expect.That(t, n == 0 && slices.Contains(s.Runs(), "unique"), "the task ran", s.Runs(), "its lock is there", n)
	})
}

// A job may settle again and again while it runs, however long that is.
func TestAJobSettlesAgainAfterMinutes(t *testing.T) {
	p := sitetest.Policy(10_000, 10*time.Second)
	p.Windows[0].Unit = "tokens"
	sitetest.Bubble(t, p, func(t *testing.T, s *sitetest.Site) {
		var charged []int64
		s.Serve(func(ctx context.Context, _ *asynq.Task) error {
			for _, tokens := range []int64{1000, 2000, 3000, 3000} {
				time.Sleep(2 * time.Minute)
				expect.Must(t, worker.FromContext(ctx).Settle(ctx, "tokens", tokens))
				charged = append(charged, s.Used())
			}
			return nil
		})
		s.Enqueue(sitetest.Task("acme", map[string]int64{"tokens": 500}), asynq.Timeout(time.Hour))
		time.Sleep(10 * time.Minute)
		synctest.Wait() // for the race detector: a sleep orders nothing
		expect.Equal(t, charged, []int64{500, 1000, 1000, 0}, "charged")
	})
}

// The lock of a unique task holds while the task waits in line, also if it joined later.
func TestALockHoldsForATaskThatJoinsLater(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 10*time.Minute), func(t *testing.T, s *sitetest.Site) {
		client, unique := s.Client(s.Limiter), asynq.Unique(time.Minute)
		s.Fill("acme")
		expect.Must(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask(unique, asynq.ProcessIn(10*time.Second)))))
		s.Serve(s.Ok)
		for range 25 {
			time.Sleep(20 * time.Second)
			_, err := client.Enqueue(sitetest.AcmeTask(unique))
			expect.Require(t, errors.Is(err, asynq.ErrDuplicateTask), "it waits, and its lock is open:", err)
		}
	})
}
