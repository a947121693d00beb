package queuetest

import (
	"context"
	"fmt"
	"slices"
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

// 500 policies with empty lines cost the limiter's Redis nothing, with asynq's own settings.
func TestIdlePoliciesCostLittle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, idle(500)...)
		var scripts atomic.Int64
		count := hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if hooktest.IsScript(cmd) {
				scripts.Add(1)
			}
			return next(ctx, cmd)
		})
		server := expect.Got(worker.NewServer(s.Asynq, asynq.Config{LogLevel: asynq.FatalLevel}, worker.Config{Limiter: s.AnotherLimiter(count)}))(t)
		expect.Must(t, server.Start(asynq.HandlerFunc(s.Ok)))
		defer server.Shutdown()
		time.Sleep(30 * time.Second) // each is asked once
		earlier := scripts.Load()
		time.Sleep(2 * time.Minute)
		n := scripts.Load() - earlier
		expect.That(t, n <= 0, n, "scripts in two minutes")
	})
}

// TaskCheckInterval does not delay the tasks of our client.
func TestTaskCheckIntervalMattersToPlainTasksOnly(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(4*time.Second, 0), func(t *testing.T, interval time.Duration) {
		s := sitetest.NewInBubble(t, append(idle(30), sitetest.Shared(2, 3*time.Second))...)
		for range 2 {
			s.Serve(s.Ok, s.Apart, func(c *asynq.Config, _ *worker.Config) {
				c.DelayedTaskCheckInterval, c.TaskCheckInterval = 0, interval
			})
		}
		time.Sleep(20 * time.Second)
		client := s.Client(s.AnotherLimiter())
		all := s.JoinMany(client, "acme", 0, 12)
		s.SleepUntil(12, 30*time.Second)
		time.Sleep(10 * time.Second)
		all = append(all, s.JoinMany(client, "acme", 12, 1)...) // to an idle server
		s.SleepUntil(13, 30*time.Second)
		s.WantOnTime(all, sitetest.Spacing)
	})
}

// The clock of Redis goes 61 s ahead, and later 100 s back, while tasks wait in line. No limit is
// exceeded by that clock. A clock that goes ahead delays no task. One that was set back delays all
// until it has caught up, which is logged once, within seconds. All tasks run, in order.
func TestClockOfRedisMovesUnderABacklog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		client := m.Client(t)
		p := sitetest.Shared(5, 5*time.Second)
		// Miniredis counts TTLs down, and does not see that its clock was set back.
		p.Windows = append(p.Windows, throttle.Window{Name: "hour", Limit: 1000, Period: time.Hour, Shared: true})
		s := sitetest.New(t, client, p)
		var ahead atomic.Int64
		defer sitetest.SetClock(m.Miniredis, &ahead)()
		s.Serve(s.Ok, sitetest.Calm)
		s.JoinMany(s.Client(s.AnotherLimiter()), "acme", 0, 100)
		time.Sleep(7500 * time.Millisecond) // 10 have run
		ran := func(want int, when string) {
			t.Helper()
			expect.Equal(t, s.Granted(), want, when, "have run")
		}
		ran(10, "before")
		ahead.Store(int64(61 * time.Second))
		time.Sleep(5 * time.Second)
		ran(15, "5 s after the clock went ahead") // the window opened at once
		ahead.Store(int64(-39 * time.Second))
		time.Sleep(3 * time.Second)
		expect.Equal(t, s.Logs.Count("the clock of Redis was set back"), 1, "want it logged within 3 s", s.Logs)
		granted := s.Granted()
		time.Sleep(90 * time.Second)
		ran(granted, "while the clock is behind")
		time.Sleep(10 * time.Second)
		expect.That(t, s.Granted() != granted, "no task runs after the clock has caught up")
		s.SleepUntil(100, 2*time.Minute)
		sitetest.WantNeverOver(t, s.Grants(), 5, 5*time.Second)
		for _, once := range []string{"is unavailable", "is still unavailable", "is available again"} {
			expect.Equal(t, s.Logs.Count("the limiter "+once), 1, "want logged once", once, s.Logs)
		}
		s.WantInOrder()
		s.WantNobodyInLine()
	})
}

// All but 20 of 300 waiting tasks are deleted, which fill 30 s. At that moment another task comes,
// with a deadline in 15 s, by a client of ours or by a plain one. It runs.
func TestDeletedTasksHoldUpNobody(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(false, true), func(t *testing.T, plain bool) {
		const limit, all, deleted, begin = 10, 300, 280, 500 * time.Millisecond
		s := sitetest.NewInBubble(t, sitetest.Shared(limit, time.Second))
		client := s.Client(s.AnotherLimiter())
		tasks := make([]*asynq.Task, all)
		for i := range tasks {
			tasks[i] = sitetest.AcmeTask(asynq.TaskID(fmt.Sprint("t", i)))
		}
		for _, result := range client.EnqueueBulk(t.Context(), tasks) {
			expect.Must(t, result.Err)
		}
		s.Serve(s.Ok, s.Apart)
		time.Sleep(begin)
		for i := range deleted {
			_ = s.Inspector.DeleteTask("default", fmt.Sprint("t", i)) // the first have run
		}
		enqueue := client.Enqueue
		if plain {
			enqueue = s.Plain.Enqueue
		}
		expect.Must(t, expect.ErrOf(enqueue(sitetest.AcmeTask(), asynq.TaskID("soon"), asynq.Deadline(time.Now().Add(15*time.Second)))))
		begun := time.Now()
		// It goes with the window after those of the tasks that are left. A look at a deleted one may take 1 ms.
		const most = (1+(all-deleted)/limit)*time.Second - begin + deleted*time.Millisecond
		time.Sleep(30 * time.Second)
		s.WantOnceEach(t, limit+all-deleted+1)
		if i := slices.Index(s.Order(), "soon"); i < 0 {
			t.Errorf("it has not started: %+v", s.Task("soon"))
		} else if after := s.Grants()[i].At.Sub(begun); after > most {
			t.Errorf("it started after %v, want at most %v", after, most)
		}
		s.WantNobodyInLine()
	})
}
