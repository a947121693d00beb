package worker_test

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

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// wantLate fails unless the task was archived by a TooLateError, for which the user's ErrorHandler
// was called once and the user's IsFailure was not.
func (s *site) wantLate(id string, retries int, reason string) {
	s.Helper()
	s.waitState(asynq.TaskStateArchived, id)
	task := s.task(id)
	if !strings.HasPrefix(task.LastErr, reason) || !strings.Contains(task.LastErr, ": would start 20") || task.Retried != 0 || task.MaxRetry != retries {
		s.Errorf("archived by %q after %d of %d retries", task.LastErr, task.Retried, task.MaxRetry)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.reported) != 1 || len(s.asked) != 0 {
		s.Fatalf("the user's ErrorHandler was told %q, and IsFailure asked about %q", s.reported, s.asked)
	}
	var late *throttle.TooLateError
	if !errors.As(s.reported[0], &late) {
		s.Fatalf("the user's ErrorHandler was told %#v", s.reported[0])
	}
	if !late.Deadline.Equal(task.Deadline) || late.StartsAt.Before(late.Deadline) || late.Error() != task.LastErr || late.Decision.Tenant != "acme" {
		s.Errorf("told %+v of %+v", late, task)
	}
}

// A task that can only start after its deadline fails once, at its denial, and leaves nothing
// behind. A Timeout does not count: it begins again at every attempt.
func TestADeniedTaskThatIsTooLateFailsOnce(t *testing.T) {
	for _, retries := range []int{0, 5} {
		t.Run(fmt.Sprint("MaxRetry ", retries), func(t *testing.T) {
			each(t, []throttle.Policy{policy(1, time.Hour)}, func(t *testing.T, s *site) {
				s.fill("acme")
				keys := s.redis.Keys(t.Context(), "sluice:*").Val()
				deadline := time.Now().Add(30 * time.Minute).Truncate(time.Second)
				s.enqueue(acmeTask(), asynq.TaskID("late"), asynq.MaxRetry(retries), asynq.Deadline(deadline))
				s.serve(s.ok)
				s.wantLate("late", retries, "throttled: api/window, tenant acme, ")
				s.wantCounters(counters{Processed: 1, Failed: 1, Archived: 1})
				s.wantNobodyInLine()
				s.enqueue(acmeTask(), asynq.TaskID("hasty"), asynq.MaxRetry(retries), asynq.Timeout(time.Second))
				s.enqueue(acmeTask(), asynq.TaskID("in time"), asynq.MaxRetry(retries), asynq.Deadline(deadline.Add(3*time.Hour)))
				s.waitState(asynq.TaskStateScheduled, "hasty", "in time")
				if len(s.runs()) != 0 || s.used() != 1 || len(s.denials()) != 3 {
					t.Errorf("ran %q, %d used, %d denials", s.runs(), s.used(), len(s.denials()))
				}
				for _, key := range keys { // of windows; a line's keys came with the two
					if s.redis.Exists(t.Context(), key).Val() != 1 {
						t.Errorf("%s is gone", key)
					}
				}
				s.open("hasty", "in time")
				s.waitGone("hasty", "in time")
				s.wantCounters(counters{Processed: 3, Failed: 1, Archived: 1})
			})
		})
	}
}

// The expected start was in time, but no worker took the task before its deadline. asynq fails such
// a task before any middleware sees it, and would go on until its retries are used up.
func TestATaskWhoseDeadlinePassesInLineFailsOnce(t *testing.T) {
	for name, planned := range map[string]bool{"denied": false, "planned": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, policy(1, 10*time.Minute))
				s.fill("acme")
				opts := []asynq.Option{asynq.TaskID("late"), asynq.MaxRetry(5), asynq.Deadline(time.Now().Add(12 * time.Minute))}
				if planned {
					if _, err := s.client(s.limiter).EnqueueContext(t.Context(), acmeTask(), opts...); err != nil {
						t.Fatal(err)
					}
				} else {
					s.enqueue(acmeTask(), opts...)
					server := s.serve(s.ok, calm)
					time.Sleep(10 * time.Second)
					server.Shutdown()
				}
				if got := s.inLine(); !slices.Equal(got, []string{"default/late"}) {
					t.Fatalf("in line: %q", got)
				}
				time.Sleep(20 * time.Minute) // all workers are away
				s.serve(s.ok, calm)
				time.Sleep(10 * time.Second)
				s.wantLate("late", 5, "throttled: api, tenant acme: would start ")
				time.Sleep(5 * time.Minute)
				s.wantNobodyInLine()
				s.wantCounters(counters{Processed: 1, Failed: 1, Archived: 1})
				if len(s.runs()) != 0 || s.used() != 0 {
					t.Errorf("ran %q, %d used", s.runs(), s.used())
				}
			})
		})
	}
}

// A task that ran and failed keeps asynq's ways when its deadline passes before it is retried.
func TestAFailedTaskWhoseDeadlinePassesKeepsAsynqsWays(t *testing.T) {
	t.Parallel()
	for _, failure := range []string{"boom", "throttled: by somebody else"} {
		t.Run(failure, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, policy(1, 5*time.Second))
				s.fill("acme") // it is denied before it runs and fails
				s.enqueue(acmeTask(), asynq.TaskID("a"), asynq.MaxRetry(2), asynq.Deadline(time.Now().Add(10*time.Second)))
				s.serve(func(context.Context, *asynq.Task) error { return errors.New(failure) }, calm, func(c *asynq.Config, _ *worker.Config) {
					c.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return 15 * time.Second }
				})
				time.Sleep(2 * time.Minute)
				s.wantReported([]string{failure, "context deadline exceeded", "context deadline exceeded"}, []string{failure, "context deadline exceeded"})
				s.wantCounters(counters{Processed: 3, Failed: 3, Archived: 1})
				if len(s.denials()) == 0 {
					t.Error("it was not denied first")
				}
			})
		})
	}
}

// Our client does not enqueue what would start after its deadline, and no place is taken for it.
func TestTheClientRefusesATaskThatWouldStartTooLate(t *testing.T) {
	each(t, []throttle.Policy{shared(1, time.Hour)}, func(t *testing.T, s *site) {
		client := s.client(s.limiter)
		s.joinMany(client, "acme", 0, 3) // now, in 1 h, in 2 h; the next in 3 h
		before := slices.Sorted(slices.Values(s.redis.Keys(t.Context(), "*").Val()))
		for name, row := range map[string]struct {
			in   time.Duration
			opts []asynq.Option
		}{
			"before its turn": {in: 2*time.Hour + 30*time.Minute},
			"passed":          {in: -time.Minute},
			"unique":          {in: time.Minute, opts: []asynq.Option{asynq.Unique(time.Hour)}},
			"would wait":      {in: time.Minute, opts: []asynq.Option{worker.MaxWait(24 * time.Hour), worker.Backlog(100)}},
		} {
			deadline := time.Now().Add(row.in).Truncate(time.Second)
			info, err := client.EnqueueContext(t.Context(), acmeTask(), append(row.opts, asynq.Deadline(deadline))...)
			var late *throttle.TooLateError
			if info != nil || !errors.As(err, &late) || !late.Deadline.Equal(deadline) || errors.Is(err, asynq.SkipRetry) ||
				!strings.HasPrefix(err.Error(), `worker: task type "x": throttled: api`) {
				t.Errorf("%s: %v, %v", name, info, err)
			} else if row.in > 0 && off(late.StartsAt, time.Now().Add(3*time.Hour)) {
				t.Errorf("%s: would have started at %v", name, late.StartsAt)
			}
		}
		// A shorter MaxWait is what refuses.
		var refused *throttle.TooLateError
		if _, err := client.EnqueueContext(t.Context(), acmeTask(), asynq.Deadline(time.Now().Add(time.Hour)), worker.MaxWait(time.Minute)); !errors.As(err, &refused) || refused.MaxWait != time.Minute {
			t.Error(err)
		}
		if after := slices.Sorted(slices.Values(s.redis.Keys(t.Context(), "*").Val())); !slices.Equal(before, after) {
			t.Errorf("keys %q before and %q after", before, after)
		}
		s.wantStates("default", 0, 3)
		if n := len(s.inLine()); n != 3 {
			t.Errorf("%d stand in line, want 3", n)
		}
		if _, err := client.EnqueueContext(t.Context(), acmeTask(), asynq.Deadline(time.Now().Add(4*time.Hour))); err != nil {
			t.Error(err)
		}
	})
}

// MaxWait of a task with ProcessAt is checked when it joins, by forward and by the middleware. It
// counts from then. A refused task fails once.
func TestMaxWaitOfATaskThatJoinsLater(t *testing.T) {
	t.Parallel()
	for name, unique := range map[string][]asynq.Option{"": nil, "unique": {asynq.Unique(time.Hour)}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, shared(1, 2*time.Minute))
				client := s.client(s.limiter)
				later := func(id string, opts ...asynq.Option) {
					task := worker.NewTask(worker.Identity{Tenant: "acme"}, "x", []byte(id))
					if _, err := client.Enqueue(task, slices.Concat(opts, unique, []asynq.Option{asynq.TaskID(id), asynq.ProcessIn(6 * time.Minute)})...); err != nil {
						t.Fatal(err)
					}
				}
				later("late", worker.MaxWait(time.Minute), asynq.MaxRetry(5))
				later("patient", worker.MaxWait(8*time.Minute))
				later("any time")
				s.serve(s.ok, calm)
				time.Sleep(5*time.Minute + 48*time.Second)
				s.joinMany(client, "beta", 0, 1) // it takes the window
				time.Sleep(30 * time.Second)
				task := s.task("late")
				if task.State != asynq.TaskStateArchived || task.Retried != 0 || task.MaxRetry != 5 ||
					!strings.Contains(task.LastErr, "longer than 1m0s") {
					t.Errorf("%v by %q after %d of %d retries", task.State, task.LastErr, task.Retried, task.MaxRetry)
				}
				if n := len(s.inLine()); n != 2 {
					t.Errorf("%d wait, want 2", n)
				}
				time.Sleep(12 * time.Minute)
				if got := slices.Sorted(slices.Values(s.runs())); !slices.Equal(got, []string{"any time", "beta-0000", "patient"}) {
					t.Errorf("ran: %q", got)
				}
				s.wantNobodyInLine()
				s.wantCounters(counters{Processed: 4, Failed: 1, Archived: 1})
				s.mu.Lock()
				defer s.mu.Unlock()
				var late *throttle.TooLateError
				if len(s.reported) != 1 || !errors.As(s.reported[0], &late) || late.MaxWait != time.Minute {
					t.Errorf("the user's ErrorHandler was told %q", s.reported)
				}
			})
		})
	}
}

// The lock of a unique task of our client holds also if the task waits for longer than it was
// promised, and ends with the task.
func TestAUniqueLockIsProlongedWhileTheTaskWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, time.Minute))
		l := newLedger()
		client := s.client(s.limiter)
		s.joinMany(client, "acme", 0, 2)
		if _, err := client.EnqueueContext(t.Context(), acmeTask(asynq.TaskID("unique"), asynq.Unique(10*time.Second))); err != nil {
			t.Fatal(err)
		}
		lock := s.stored("unique")["unique_key"]
		s.serve(s.ok, l.watch, calm)
		time.Sleep(time.Second)
		// What was expected does not hold: workers look after the task, and it waits on.
		s.setPolicy(func(p *throttle.Policy) { p.Windows[0].Period = 10 * time.Minute }, s.limiter)
		for range 36 {
			if _, err := client.EnqueueContext(t.Context(), acmeTask(asynq.Unique(10*time.Second))); !errors.Is(err, asynq.ErrDuplicateTask) {
				t.Fatalf("after %v the lock is open, and the task waits: %v", time.Since(l.begun), err)
			}
			time.Sleep(20 * time.Second)
		}
		if in := time.Until(s.task("unique").NextProcessAt); in < 2*time.Minute || l.wakesOf("unique") > 0 {
			t.Errorf("workers look after the task in %v, and it came %d times", in, l.wakesOf("unique"))
		}
		s.setPolicy(func(p *throttle.Policy) { p.Windows[0].Limit = 1000 }, s.limiter)
		time.Sleep(time.Minute)
		if n := s.redis.Exists(t.Context(), lock).Val(); n != 0 || !slices.Contains(s.runs(), "unique") {
			t.Errorf("the task ran: %q; its lock is there: %d", s.runs(), n)
		}
	})
}
