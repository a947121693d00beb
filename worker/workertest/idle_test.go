package workertest_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/workertest"
)

// idle starts a worker whose policy lets one task start a day. So many wait.
func idle(t *testing.T, waiting int) *workertest.Worker {
	w := workertest.Start(t, workertest.Config{
		Handler: asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return nil }),
		Policies: []throttle.Policy{{
			Name: "report", Match: []string{"report"},
			Windows: []throttle.Window{{Name: "w", Limit: 1, Period: 24 * time.Hour}},
		}},
	})
	for range waiting + 1 {
		w.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "report", nil))
	}
	return w
}

// Idle time costs at most 1.2 times the commands of plain asynq in memory, also while tasks wait.
func TestIdleTimeCostsNoMoreThanWithPlainAsynq(t *testing.T) {
	idleTime := func(m throttletest.Memory) int {
		time.Sleep(time.Minute)
		before := m.CommandCount()
		time.Sleep(10 * time.Minute)
		return m.CommandCount() - before
	}
	var plain int
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		s := asynq.NewServer(m, asynq.Config{Concurrency: 4, LogLevel: asynq.FatalLevel})
		expect.Must(t, s.Start(asynq.NotFoundHandler()))
		defer s.Shutdown()
		plain = idleTime(m)
	})
	for _, waiting := range []int{0, 2} {
		synctest.Test(t, func(t *testing.T) {
			ours := idleTime(idle(t, waiting).Memory)
			expect.That(t, ours <= plain*12/10, waiting, ours, plain)
		})
	}
}

// A worker that has had no pending task sees that a pause has ended.
func TestAPauseEndsByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := idle(t, -1)
		store := control.StoreOf(w.Limiter)
		defer store.Follow(t.Context(), control.FollowConfig{}).Close()
		expect.Must(t, store.Pause(t.Context(), "report", "", 3*time.Minute, control.Author{Who: "a", Why: "test"}))
		time.Sleep(2 * time.Second)
		w.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "report", nil))
		time.Sleep(4 * time.Minute)
		expect.Equal(t, len(w.Runs()), 1, "after a pause of three minutes")
	})
}

// However long a worker was idle, it finds what comes, as in production.
func TestAnIdleWorkerFindsWhatComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := idle(t, 1)
		time.Sleep(10 * time.Minute)
		wantRuns := func(what string, n int, within time.Duration) {
			t.Helper()
			time.Sleep(within)
			expect.Equal(t, len(w.Runs()), n, what, "tasks have run")
		}
		w.Enqueue(worker.NewTask(worker.Identity{Tenant: "beta"}, "report", nil))
		wantRuns("a task that fits", 2, 50*time.Millisecond)

		plain := asynq.NewClient(w.Memory)
		defer plain.Close()
		time.Sleep(4 * time.Minute)
		expect.Must(t, expect.ErrOf(plain.Enqueue(asynq.NewTask("other", nil))))
		wantRuns("a plain client's task", 3, 2*time.Second)

		expect.Must(t, w.Inspector.PauseQueue("default"))
		w.Enqueue(worker.NewTask(worker.Identity{Tenant: "gamma"}, "report", nil))
		wantRuns("a task of a paused queue", 3, time.Minute)
		expect.Must(t, w.Inspector.UnpauseQueue("default"))
		wantRuns("when it goes on", 4, 3*time.Second)

		time.Sleep(4 * time.Minute)
		policies := w.Limiter.Policies()
		policies[0].Windows[0].Limit = 2
		expect.Must(t, w.Limiter.SetPolicies(policies))
		wantRuns("a raised limit", 5, 3*time.Second)
	})
}
