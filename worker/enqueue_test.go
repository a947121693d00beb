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
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

func acmeTask(opts ...asynq.Option) *asynq.Task {
	return worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil, opts...)
}

// wantStates fails unless the queue holds so many tasks in these states, and no others.
func (s *site) wantStates(queue string, pending, scheduled int) {
	s.Helper()
	ctx := context.Background()
	key := "asynq:{" + queue + "}:"
	if p, n := s.redis.LLen(ctx, key+"pending").Val(), s.redis.ZCard(ctx, key+"scheduled").Val(); int(p) != pending || int(n) != scheduled {
		s.Errorf("queue %s: %d pending and %d scheduled, want %d and %d", queue, p, n, pending, scheduled)
	}
	if n := len(s.redis.Keys(ctx, key+"t:*").Val()); n != pending+scheduled {
		s.Errorf("queue %s: %d tasks are stored, want %d", queue, n, pending+scheduled)
	}
}

// A task in line learns when it is expected to start, and asynq's tools show when workers look at
// it.
func TestATaskInLineReportsItsExpectedStart(t *testing.T) {
	each(t, []throttle.Policy{shared(2, 2*time.Minute)}, func(t *testing.T, s *site) {
		client := s.client(s.limiter)
		begun := time.Now()
		for i, e := range s.joinMany(client, "acme", 0, 7) {
			info, start := e.Info, e.Start
			wait, state := time.Duration(i/2)*2*time.Minute, asynq.TaskStateScheduled
			at := begun.Add(wait)
			if info.State != state || off(info.NextProcessAt, at.Add(max(2*time.Minute, wait/2))) {
				t.Errorf("task %d is %v, next at %v: want %v", i, info.State, info.NextProcessAt, state)
			}
			if !start.Known || !start.Joined || off(start.At, at) || !start.Least.Equal(start.At) || !start.Most.Equal(start.At) {
				t.Errorf("task %d is expected to start %+v, want exactly %v", i, start, at)
			}
			stored := s.task(info.ID)
			if stored.State != state || !stored.NextProcessAt.Equal(info.NextProcessAt) {
				t.Errorf("task %d is stored as %v, next at %v", i, stored.State, stored.NextProcessAt)
			}
			reason, told, _ := strings.Cut(stored.LastErr, ", expected to start at ")
			expected, err := time.Parse(time.RFC3339, told)
			if wait == 0 && stored.LastErr != "" || wait > 0 && (err != nil || off(expected, at) || reason != `throttled: api, tenant "acme": waits in line`) {
				t.Errorf("task %d says %q, want that it starts at %v", i, stored.LastErr, at)
			}
		}
		s.wantStates("default", 0, 7)
		if tickets := s.inLine(); len(tickets) != 7 || tickets[0] != "default/acme-0000" {
			t.Errorf("in line: %q", tickets)
		}
	})
}

// off says that two times differ by more than a machine may be slow.
func off(a, b time.Time) bool { return a.Sub(b).Abs() > 20*time.Second }

// What MaxWait and Backlog refuse leaves nothing behind.
func TestARefusedTaskLeavesNothing(t *testing.T) {
	each(t, []throttle.Policy{shared(1, time.Hour)}, func(t *testing.T, s *site) {
		client := s.client(s.limiter)
		s.joinMany(client, "acme", 0, 3) // now, in 1 h, in 2 h
		before := slices.Sorted(slices.Values(s.redis.Keys(t.Context(), "*").Val()))
		for _, row := range []struct {
			name    string
			opts    []asynq.Option
			backlog int
			maxWait time.Duration
			text    string
		}{
			{"waits too long", []asynq.Option{worker.MaxWait(90 * time.Minute)}, 0, 90 * time.Minute, "longer than 1h30m0s"},
			{"too many wait", []asynq.Option{worker.Backlog(3)}, 3, 0, "has 3 waiting already"},
			{"waits too long, and not too many", []asynq.Option{worker.MaxWait(time.Hour), worker.Backlog(100)}, 0, time.Hour, "longer than 1h0m0s"},
			{"too many, and not too long", []asynq.Option{worker.MaxWait(24 * time.Hour), worker.Backlog(2)}, 2, 0, "has 2 waiting already"},
			{"unique", []asynq.Option{worker.Backlog(3), asynq.Unique(time.Hour)}, 3, 0, "has 3 waiting already"},
		} {
			info, err := client.EnqueueContext(t.Context(), acmeTask(), row.opts...)
			var d throttle.Decision
			late, full := &throttle.TooLateError{}, &throttle.BacklogError{}
			switch {
			case errors.As(err, &late):
				d = late.Decision
			case errors.As(err, &full):
				d = full.Decision
			}
			if info != nil || full.Backlog != row.backlog || late.MaxWait != row.maxWait || !strings.Contains(err.Error(), row.text) {
				t.Errorf("%s: %v, %v", row.name, info, err)
			} else if d.RetryIn < 2*time.Hour || d.Granted {
				t.Errorf("%s: would have waited %v", row.name, d.RetryIn)
			}
		}
		after := slices.Sorted(slices.Values(s.redis.Keys(t.Context(), "*").Val()))
		if !slices.Equal(before, after) {
			t.Errorf("keys %q before and %q after", before, after)
		}
		s.wantStates("default", 0, 3)
		if n := len(s.inLine()); n != 3 {
			t.Errorf("%d stand in line, want 3", n)
		}
		// What fits under both is planned; another tenant has a backlog of its own.
		if _, err := client.EnqueueContext(t.Context(), acmeTask(), worker.MaxWait(24*time.Hour), worker.Backlog(4)); err != nil {
			t.Error(err)
		}
		if _, err := client.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "beta"}, "x", nil), worker.Backlog(1)); err != nil {
			t.Error(err)
		}
	})
}

// A task that asynq refuses neither takes a place nor costs the one it was taken for its own.
func TestAConflictKeepsThePlaceInLine(t *testing.T) {
	each(t, []throttle.Policy{shared(1, time.Hour)}, func(t *testing.T, s *site) {
		client := s.client(s.limiter)
		s.joinMany(client, "acme", 0, 2)
		if _, err := client.EnqueueContext(t.Context(), acmeTask(asynq.TaskID("unique"), asynq.Unique(time.Minute))); err != nil {
			t.Fatal(err)
		}
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("plain"))
		want := s.redis.HGetAll(t.Context(), "sluice:{api}:t").Val()
		if len(want) != 3 {
			t.Fatalf("in line: %v", want)
		}
		for _, row := range []struct {
			name string
			opts []asynq.Option
			err  error
		}{
			{"one that was called", []asynq.Option{asynq.TaskID("acme-0000")}, asynq.ErrTaskIDConflict},
			{"one that waits", []asynq.Option{asynq.TaskID("acme-0001")}, asynq.ErrTaskIDConflict},
			{"one of a plain client", []asynq.Option{asynq.TaskID("plain")}, asynq.ErrTaskIDConflict},
			{"unique", []asynq.Option{asynq.Unique(time.Minute)}, asynq.ErrDuplicateTask},
			{"unique, with the ID", []asynq.Option{asynq.Unique(time.Minute), asynq.TaskID("unique")}, asynq.ErrDuplicateTask},
		} {
			for range 2 {
				if info, err := client.EnqueueContext(t.Context(), acmeTask(), row.opts...); !errors.Is(err, row.err) {
					t.Errorf("%s: %v, %v", row.name, info, err)
				}
			}
			if got := s.redis.HGetAll(t.Context(), "sluice:{api}:t").Val(); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: the line was\n%v, and is\n%v", row.name, want, got)
			}
		}
	})
}

// The lock of a unique task holds for as long as the task waits.
func TestAUniqueLockHoldsWhileTheTaskWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, time.Minute))
		l := newLedger()
		client := s.client(s.limiter)
		s.joinMany(client, "acme", 0, 5)
		if _, err := client.EnqueueContext(t.Context(), acmeTask(asynq.TaskID("acme-0005"), asynq.Unique(10*time.Second))); err != nil {
			t.Fatal(err)
		}
		s.serve(s.ok, l.watch, calm)
		for l.count() < 6 {
			if _, err := client.EnqueueContext(t.Context(), acmeTask(asynq.Unique(10*time.Second))); !errors.Is(err, asynq.ErrDuplicateTask) {
				t.Fatalf("after %v the lock is open, and the task waits: %v", time.Since(l.begun), err)
			}
			time.Sleep(10 * time.Second)
		}
		if took := time.Since(l.begun); took < 5*time.Minute {
			t.Errorf("it waited for %v", took)
		}
		if _, err := client.EnqueueContext(t.Context(), acmeTask(asynq.Unique(10*time.Second))); err != nil {
			t.Errorf("after the task ran: %v", err)
		}
	})
}

// Options that are hidden in asynq.NewTask work as they do for asynq's client, for tasks that start
// at once and for those that wait.
func TestATaskInLineKeepsItsOptions(t *testing.T) {
	deadline := time.Now().Add(100 * time.Hour).Truncate(time.Second)
	each(t, []throttle.Policy{shared(1, time.Hour)}, func(t *testing.T, s *site) {
		client := s.client(s.limiter)
		for i, state := range []asynq.TaskState{asynq.TaskStateScheduled, asynq.TaskStateScheduled} {
			id := fmt.Sprint("mine/", i)
			info, err := client.EnqueueContext(t.Context(), acmeTask(asynq.Queue("my queue"), asynq.TaskID(id), asynq.MaxRetry(3),
				asynq.Retention(time.Hour), asynq.Timeout(time.Minute), asynq.Deadline(deadline)))
			if err != nil {
				t.Fatal(err)
			}
			stored, err := s.inspector.GetTaskInfo("my queue", id)
			if err != nil {
				t.Fatal(err)
			}
			for _, got := range []*asynq.TaskInfo{info, stored} {
				if got.Queue != "my queue" || got.ID != id || got.MaxRetry != 3 || got.Retention != time.Hour || got.Timeout != time.Minute ||
					!got.Deadline.Equal(deadline) || got.State != state {
					t.Errorf("%+v, want it %v", got, state)
				}
			}
		}
		if tickets := s.inLine(); !slices.Equal(tickets, []string{"my queue/mine/0", "my queue/mine/1"}) {
			t.Errorf("in line: %q", tickets)
		}
		// A time in the future and a group are asynq's: these tasks take their place when they
		// come.
		for name, opts := range map[string][]asynq.Option{
			"in":    {asynq.ProcessIn(time.Hour)},
			"at":    {asynq.ProcessAt(time.Now().Add(time.Hour))},
			"group": {asynq.Group("some")},
		} {
			want := asynq.TaskStateScheduled
			if name == "group" {
				want = asynq.TaskStateAggregating
			}
			var start worker.ExpectedStart
			info, err := client.EnqueueContext(t.Context(), acmeTask(append(opts, asynq.TaskID(name))...), worker.ReportStart(&start))
			if err != nil || info.State != want || s.task(name).State != want {
				t.Errorf("%s: %+v, %v", name, info, err)
			}
			least := time.Now()
			if name != "group" {
				least = least.Add(time.Hour)
			}
			if !start.Known || start.Joined || off(start.Least, least) || !start.At.IsZero() || !start.Most.IsZero() {
				t.Errorf("%s: is expected to start %+v, want at least %v", name, start, least)
			}
		}
		if n := len(s.inLine()); n != 2 {
			t.Errorf("%d stand in line, want 2", n)
		}
		// One whose time has come already is like any other.
		var start worker.ExpectedStart
		info, err := client.EnqueueContext(t.Context(), acmeTask(asynq.Queue("my queue"), asynq.ProcessAt(time.Now().Add(-time.Hour))), worker.ReportStart(&start))
		if err != nil || info.State != asynq.TaskStateScheduled || off(start.At, time.Now().Add(2*time.Hour)) {
			t.Errorf("in the past: %+v, %v", info, err)
		}
	})
}

// While the limiter's Redis is away, tasks are enqueued as asynq does.
func TestTasksAreEnqueuedWithoutTheLimitersRedis(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, 10*time.Second))
		l := newLedger()
		var c cable
		through := redis.NewClient(c.options(like(s.redis)))
		defer through.Close()
		client := s.client(s.anotherLimiter(through))
		s.joinMany(client, "acme", 0, 2)
		c.cut()
		for i, e := range s.joinMany(client, "acme", 2, 2) {
			if e.Info.State != asynq.TaskStatePending || e.Start != (worker.ExpectedStart{}) {
				t.Errorf("task %d is %v, is expected to start %+v", i, e.Info.State, e.Start)
			}
		}
		s.wantStates("default", 2, 2)
		c.mend()
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.sleepUntil(l, 4, 40*time.Second)
		s.wantNobodyInLine()
		client.Close()
		time.Sleep(2 * time.Second)
	})
}

// A Close leaves nothing running: a bubble ends only when all its goroutines have ended.
func TestClosingLeavesNothingRunning(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(1, 10*time.Second))
		config, err := worker.NewClient(s.asynq, worker.ClientConfig{Limiter: s.limiter, LimiterTimeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		if err := config.Close(); err != nil { // that was never used
			t.Error(err)
		}
		client := s.client(s.limiter)
		s.joinMany(client, "acme", 0, 3)
		server := s.serve(s.ok, brisk)
		s.joinMany(client, "acme", 3, 3)
		time.Sleep(time.Second)
		client.Close()
		client.Close()
		server.Shutdown()
		if _, err := client.EnqueueContext(t.Context(), acmeTask()); err == nil {
			t.Error("a closed client enqueues")
		}

		never, err := worker.NewAdapter(worker.Config{Limiter: s.limiter})
		if err != nil {
			t.Fatal(err)
		}
		never.Close()
		never.Close()

		// An asynq.Server whose Adapter is not closed.
		theirs, ours := s.configs()
		brisk(&theirs, &ours)
		_, own, middleware := s.adapted(theirs, ours)
		s.joinMany(s.client(s.limiter), "acme", 6, 3)
		if err := own.Start(middleware(asynq.HandlerFunc(s.ok))); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		own.Shutdown()
		l := newLedger()
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.sleepUntil(l, 7, 90*time.Second)
	})
}
