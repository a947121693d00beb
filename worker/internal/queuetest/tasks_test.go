package queuetest

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A ticket never runs a task again that has run: neither one that is retained nor one in the
// archive.
func TestATicketRunsNoTaskAgain(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(2, time.Second), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			if task.Type() == "bad" {
				return errors.New("boom")
			}
			return s.Ok(ctx, task)
		}, l.Watch, sitetest.Brisk)
		acme := worker.Identity{Tenant: "acme"}
		s.Enqueue(worker.NewTask(acme, "x", nil), asynq.TaskID("retained"), asynq.Retention(time.Hour))
		s.Enqueue(worker.NewTask(acme, "bad", nil), asynq.TaskID("archived"), asynq.MaxRetry(0))
		time.Sleep(time.Second)
		s.WaitState(asynq.TaskStateCompleted, "retained")
		s.WaitState(asynq.TaskStateArchived, "archived")
		for range 2 {
			for _, id := range []string{"retained", "archived", "never was"} {
				s.Join("acme", id, worker.NewTask(acme, "x", nil))
			}
			time.Sleep(5 * time.Second)
			s.WantNobodyInLine()
		}
		// One that waits is archived by hand.
		s.EnqueueMany("acme", 0, 6)
		time.Sleep(100 * time.Millisecond)
		sitetest.Must(t, s.Inspector.ArchiveTask("default", "acme-0005"))
		time.Sleep(5 * time.Second)
		s.WantNobodyInLine()
		s.WaitState(asynq.TaskStateCompleted, "retained")
		s.WaitState(asynq.TaskStateArchived, "archived", "acme-0005")
		if n := l.Count(); n != 7 {
			t.Errorf("%d tasks were granted, want 7: %q", n, l.Got())
		}
		for _, id := range []string{"retained", "archived"} {
			if n := l.WakesOf(id); n != 1 {
				t.Errorf("%s woke %d times", id, n)
			}
		}
	})
}

// A task may be taken before asynq has put it down: it is picked shortly after.
func TestATaskThatIsStillActiveIsPickedShortly(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 200*time.Millisecond), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Brisk, func(_ *asynq.Config, c *worker.Config) {
			watched := c.OnDecision
			c.OnDecision = func(ctx context.Context, task *asynq.Task, d throttle.Decision) {
				watched(ctx, task, d)
				if !d.Granted {
					time.Sleep(500 * time.Millisecond) // its turn comes before it is put down
				}
			}
		})
		s.EnqueueMany("acme", 0, 2)
		s.SleepUntil(l, 2, 1500*time.Millisecond)
		if n := l.WakesOf(l.Got()[1]); n != 2 {
			t.Errorf("it woke %d times", n)
		}
		s.WantNobodyInLine()
	})
}

// While a queue is paused, the line goes on without those of its tasks that are called, and they
// wake at most once in vain afterwards.
func TestAPausedQueueHoldsUpNoOther(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(10, time.Second), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Calm, func(c *asynq.Config, _ *worker.Config) {
			c.Queues = map[string]int{"default": 1, "other": 1}
		})
		s.EnqueueMany("acme", 0, 60)
		time.Sleep(1500 * time.Millisecond)
		sitetest.Must(t, s.Inspector.PauseQueue("default"))
		before := l.Count()
		s.EnqueueMany("beta", 0, 60, asynq.Queue("other"))
		time.Sleep(30 * time.Second)
		if others := l.Count() - before; others != 60 {
			t.Errorf("%d of 60 tasks of the other queue were granted in the meantime", others)
		}
		sitetest.Must(t, s.Inspector.UnpauseQueue("default"))
		s.SleepUntil(l, 120, 30*time.Second)
		s.WantWakes(l, sitetest.DeniedAndRun+1)
		if n := l.Excess(10, time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		s.WantNobodyInLine()
	})
}

// Tasks that asynq itself enqueues, or holds back, take their place when they are denied.
func TestTasksThatAsynqEnqueuesTakeTheirPlaces(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(10, 20*time.Second), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		scheduler := asynq.NewScheduler(s.Asynq, &asynq.SchedulerOpts{LogLevel: asynq.FatalLevel})
		acme := worker.Identity{Tenant: "acme"}
		if _, err := scheduler.Register("@every 1s", worker.NewTask(acme, "scheduled", nil)); err != nil {
			t.Fatal(err)
		}
		sitetest.Must(t, scheduler.Start())
		periodic, err := asynq.NewPeriodicTaskManager(asynq.PeriodicTaskManagerOpts{
			PeriodicTaskConfigProvider: provider{{Cronspec: "@every 2s", Task: worker.NewTask(acme, "periodic", nil)}},
			RedisConnOpt:               s.Asynq, SyncInterval: time.Minute, SchedulerOpts: &asynq.SchedulerOpts{LogLevel: asynq.FatalLevel},
		})
		sitetest.Must(t, err)
		sitetest.Must(t, periodic.Start())
		s.Serve(s.Ok, l.Watch, sitetest.Calm)
		s.EnqueueMany("acme", 0, 5, asynq.ProcessIn(5*time.Second))
		s.EnqueueMany("acme", 5, 5, asynq.ProcessAt(time.Now().Add(10*time.Second)))
		time.Sleep(20500 * time.Millisecond)
		scheduler.Shutdown()
		periodic.Shutdown()
		time.Sleep(80 * time.Second)
		if n := l.Count(); n != 20+10+10 {
			t.Errorf("%d tasks were granted of 40", n)
		}
		s.WantWakes(l, sitetest.DeniedAndRun)
		if n := l.Excess(10, 20*time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		s.WantNobodyInLine()
	})
}

type provider []*asynq.PeriodicTaskConfig

func (p provider) GetConfigs() ([]*asynq.PeriodicTaskConfig, error) { return p, nil }

// A group is throttled as the task that it becomes.
func TestGroupsAreThrottledAfterAggregation(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 5*time.Second), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Brisk, func(c *asynq.Config, _ *worker.Config) {
			c.GroupAggregator = asynq.GroupAggregatorFunc(func(group string, tasks []*asynq.Task) *asynq.Task {
				return worker.NewTask(worker.Identity{Tenant: group}, "group", nil)
			})
			c.GroupGracePeriod, c.GroupMaxSize = time.Second, 5
		})
		client := s.Client(s.Limiter)
		for i := range 20 {
			part := worker.NewTask(worker.Identity{Tenant: "acme"}, "part", nil, asynq.Group("acme"))
			info, err := client.EnqueueContext(t.Context(), part)
			if err != nil || info.State != asynq.TaskStateAggregating {
				t.Fatalf("part %d: %v, %v", i, info, err)
			}
		}
		if tickets := s.InLine(); len(tickets) != 0 {
			t.Errorf("parts of a group stand in line: %q", tickets)
		}
		s.SleepUntil(l, 4, 25*time.Second)
		s.WantWakes(l, sitetest.DeniedAndRun)
		s.WantNobodyInLine()
		if ids := l.Got(); len(ids) != 4 {
			t.Errorf("granted: %q", ids)
		}
	})
}

// With requeue: earliest-reset nobody stands in line.
func TestEarliestResetKnowsNoLine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := sitetest.Shared(5, 2*time.Second)
		p.Requeue = throttle.RequeueEarliestReset
		s := sitetest.NewInBubble(t, p)
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Brisk)
		s.EnqueueMany("acme", 0, 15)
		e := s.JoinMany(s.Client(s.Limiter), "acme", 15, 1)[0]
		if e.Info.State != asynq.TaskStatePending || e.Start.Joined {
			t.Errorf("enqueued as %v", e.Info.State)
		}
		time.Sleep(time.Second)
		s.WantNobodyInLine()
		s.SleepUntil(l, 16, 20*time.Second)
	})
}

// A task that really failed comes back after asynq's own delay, at the front of its tenant's
// waiters; its retries are counted, and it ends in the archive.
func TestAFailedTaskComesBackInFront(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 10*time.Second), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			if task.Type() == "bad" {
				return errors.New("boom")
			}
			return s.Ok(ctx, task)
		}, l.Watch, sitetest.Calm, func(c *asynq.Config, _ *worker.Config) {
			c.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return 15 * time.Second }
		})
		s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "bad", nil), asynq.TaskID("bad"), asynq.MaxRetry(2))
		time.Sleep(time.Second)
		s.EnqueueMany("acme", 0, 6)
		time.Sleep(22 * time.Second) // 0 and 10 and 20 s: bad, and two others; bad is back and waits since 15 s
		if task := s.Task("bad"); task.Retried != 1 && !(task.Retried == 2) {
			t.Errorf("bad is %v, retried %d", task.State, task.Retried)
		}
		s.SleepUntil(l, 9, 90*time.Second)
		got := l.Got()
		want := []string{"bad", "acme-0000", "bad", "acme-0001", "bad"}
		if !slices.Equal(got[:1], want[:1]) || got[2] != "bad" || got[4] != "bad" {
			t.Errorf("granted: %q", got)
		}
		if task := s.Task("bad"); task.State != asynq.TaskStateArchived || task.Retried != 2 || task.LastErr != "boom" {
			t.Errorf("bad is %v, retried %d: %s", task.State, task.Retried, task.LastErr)
		}
		s.WantCounters(sitetest.Counters{Processed: 9, Failed: 3, Archived: 1})
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
		s.Limiter = s.AnotherLimiter(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if err == nil && loses.Load() && slices.Contains(cmd.Args(), any("reserve")) {
				err = context.DeadlineExceeded
				cmd.SetErr(err)
			}
			return err
		}))
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Brisk)
		s.EnqueueMany("acme", 0, 1)
		time.Sleep(200 * time.Millisecond)
		loses.Store(false)
		s.EnqueueMany("acme", 1, 1)
		time.Sleep(10 * time.Second)
		if got := l.Got(); !slices.Equal(got, []string{"acme-0000", "acme-0001"}) {
			t.Errorf("ran %q", got)
		}
	})
}
