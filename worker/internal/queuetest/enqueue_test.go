package queuetest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A task in line learns when it is expected to start, and asynq's tools show when workers look at it.
func TestATaskInLineReportsItsExpectedStart(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Shared(2, 2*time.Minute))
	client := s.Client(s.Limiter)
	begun := time.Now()
	for i, e := range s.JoinMany(client, "acme", 0, 7) {
		info, start := e.Info, e.Start
		wait, state := time.Duration(i/2)*2*time.Minute, asynq.TaskStateScheduled
		at := begun.Add(wait)
		expect.That(t, info.State == state && !sitetest.Off(info.NextProcessAt, at.Add(2*time.Minute)),
			"task", i, "is", info.State, ", next at", info.NextProcessAt, ": want", state)
		expect.That(t, start.Joined && !sitetest.Off(start.At, at) && start.Latest.Equal(start.At), "task", i, start, "want exactly", at)
		stored := s.Task(info.ID)
		expect.That(t, stored.State == state && stored.NextProcessAt.Equal(info.NextProcessAt),
			"task", i, "is stored as", stored.State, ", next at", stored.NextProcessAt)
		reason, told, _ := strings.Cut(stored.LastErr, ", expected to start at ")
		expected, err := time.Parse(time.RFC3339, told)
		const waits = `throttled: api, tenant "acme": waits in line`
		right := wait > 0 && err == nil && !sitetest.Off(expected, at) && reason == waits
		expect.That(t, right || wait == 0 && stored.LastErr == "", i, "says", stored.LastErr, "want", at)
	}
	s.WantStates("default", 0, 7)
	tickets := s.InLine()
	expect.That(t, len(tickets) == 7 && tickets[0] == "default/acme-0000", "in line:", tickets)
}

// What a deadline, MaxWait and Backlog refuse leaves nothing behind, and takes no place.
func TestARefusedTaskLeavesNothing(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Shared(1, time.Hour))
	client := s.Client(s.Limiter)
	s.JoinMany(client, "acme", 0, 3) // now, in 1 h, in 2 h; the next in 3 h
	before := slices.Sorted(slices.Values(s.Redis.Keys(t.Context(), "*").Val()))
	now := time.Now().Truncate(time.Second)
	within := func(in time.Duration) asynq.Option { return asynq.Deadline(now.Add(in)) }
	unique := asynq.Unique(time.Hour)
	for _, row := range []struct {
		opts     []asynq.Option
		deadline time.Duration
		text     string
	}{
		{[]asynq.Option{worker.MaxWait(90 * time.Minute)}, 0, "longer than 1h30m0s"},
		{[]asynq.Option{worker.Backlog(3)}, 0, "3 wait already"},
		{[]asynq.Option{worker.MaxWait(time.Hour), worker.Backlog(100)}, 0, "longer than 1h0m0s"},
		{[]asynq.Option{worker.MaxWait(24 * time.Hour), worker.Backlog(2)}, 0, "2 wait already"},
		{[]asynq.Option{worker.Backlog(3), unique}, 0, "3 wait already"},
		{[]asynq.Option{within(150 * time.Minute)}, 150 * time.Minute, ", deadline 20"},
		{[]asynq.Option{within(-time.Minute)}, -time.Minute, ", deadline 20"},
		{[]asynq.Option{within(time.Minute), unique}, time.Minute, ", deadline 20"},
		{[]asynq.Option{within(time.Minute), worker.MaxWait(24 * time.Hour), worker.Backlog(100)}, time.Minute, ", deadline 20"},
		{[]asynq.Option{within(time.Hour), worker.MaxWait(time.Minute)}, 0, "longer than 1m0s"},
	} {
		info, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(), row.opts...)
		var d throttle.Decision
		late := &throttle.DeniedError{}
		if errors.As(err, &late) {
			d = late.Decision
		}
		if info != nil || err == nil || errors.Is(err, asynq.SkipRetry) || d.Granted ||
			!strings.Contains(err.Error(), row.text) || !strings.HasPrefix(err.Error(), `worker: task type "x": throttle`) {
			t.Errorf("%v: %v, %v", row, info, err)
		} else if row.deadline >= 0 && sitetest.Off(now.Add(d.RetryIn), now.Add(3*time.Hour)) {
			t.Errorf("%v: would have waited %v", row, d.RetryIn)
		} else if row.deadline != 0 && !late.Request.Deadline.Equal(now.Add(row.deadline)) {
			t.Errorf("%v: the deadline is %v", row, late.Request.Deadline)
		}
	}
	after := slices.Sorted(slices.Values(s.Redis.Keys(t.Context(), "*").Val()))
	expect.That(t, slices.Equal(before, after), "keys", before, "before and", after, "after")
	s.WantStates("default", 0, 3)
	expect.Equal(t, len(s.InLine()), 3, "stand in line, want 3")
	// What fits under all is planned; another tenant has a backlog of its own.
	expect.Must(t, expect.ErrOf(client.EnqueueContext(t.Context(), sitetest.AcmeTask(within(4*time.Hour)), worker.MaxWait(24*time.Hour), worker.Backlog(4))))
	expect.Must(t, expect.ErrOf(client.EnqueueContext(t.Context(), sitetest.Task("beta"), worker.Backlog(1))))
}

// A task that asynq refuses neither takes a place nor costs the one it was taken for its own.
func TestAConflictKeepsThePlaceInLine(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Shared(1, time.Hour))
	client := s.Client(s.Limiter)
	s.JoinMany(client, "acme", 0, 2)
	expect.Must(t, expect.ErrOf(client.EnqueueContext(t.Context(), sitetest.AcmeTask(asynq.TaskID("unique"), asynq.Unique(time.Minute)))))
	s.Enqueue(asynq.NewTask("x", nil), asynq.TaskID("plain"))
	want := s.Redis.HGetAll(t.Context(), "sluice:{api}:t").Val()
	expect.Require(t, len(want) == 3, "in line:", want)
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
			_, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(), row.opts...)
			expect.That(t, errors.Is(err, row.err), row.name, err)
		}
		expect.Equal(t, s.Redis.HGetAll(t.Context(), "sluice:{api}:t").Val(), want, row.name)
	}
}

// Options that are hidden in asynq.NewTask work as they do for asynq's client, for tasks that start at once or wait.
func TestATaskInLineKeepsItsOptions(t *testing.T) {
	deadline := time.Now().Add(100 * time.Hour).Truncate(time.Second)
	s := sitetest.OnRedis(t, sitetest.Shared(1, time.Hour))
	client := s.Client(s.Limiter)
	for i, state := range []asynq.TaskState{asynq.TaskStateScheduled, asynq.TaskStateScheduled} {
		id := fmt.Sprint("mine/", i)
		info, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(asynq.Queue("my queue"), asynq.TaskID(id), asynq.MaxRetry(3),
			asynq.Retention(time.Hour), asynq.Timeout(time.Minute), asynq.Deadline(deadline)))
		expect.Must(t, err)
		stored := expect.Got(s.Inspector.GetTaskInfo("my queue", id))(t)
		for _, got := range []*asynq.TaskInfo{info, stored} {
			expect.That(t, got.Queue == "my queue" && got.ID == id && got.MaxRetry == 3 &&
				got.Retention == time.Hour && got.Timeout == time.Minute && got.Deadline.Equal(deadline) &&
				got.State == state, got, "want it", state)
		}
	}
	expect.Equal(t, s.InLine(), []string{"my queue/mine/0", "my queue/mine/1"}, "in line")
	// A time in the future and a group are asynq's: these tasks take their place when they come.
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
		task := sitetest.AcmeTask(append(opts, asynq.TaskID(name))...)
		info, err := client.EnqueueContext(t.Context(), task, worker.ReportStart(&start))
		expect.That(t, err == nil && info.State == want && s.Task(name).State == want, name, info, err)
		least := time.Now()
		if name != "group" {
			least = least.Add(time.Hour)
		}
		expect.That(t, !start.Joined && !sitetest.Off(start.At, least) && start.Latest.IsZero(), name, start, "want at least", least)
	}
	expect.Equal(t, len(s.InLine()), 2, "stand in line, want 2")
	// One whose time has come already is like any other.
	var start worker.ExpectedStart
	task := sitetest.AcmeTask(asynq.Queue("my queue"), asynq.ProcessAt(time.Now().Add(-time.Hour)))
	info, err := client.EnqueueContext(t.Context(), task, worker.ReportStart(&start))
	expect.That(t, err == nil && info.State == asynq.TaskStateScheduled && !sitetest.Off(start.At, time.Now().Add(2*time.Hour)), "in the past", info, err)
}

// A Close leaves nothing running: a bubble ends only when all its goroutines have ended.
func TestClosingLeavesNothingRunning(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 10*time.Second), func(t *testing.T, s *sitetest.Site) {
		config := expect.Got(worker.NewClient(s.Asynq, worker.ClientConfig{Limiter: s.Limiter, LimiterTimeout: time.Minute}))(t)
		expect.Must(t, config.Close()) // that was never used
		client := s.Client(s.Limiter)
		s.JoinMany(client, "acme", 0, 3)
		server := s.Serve(s.Ok, sitetest.Brisk)
		s.JoinMany(client, "acme", 3, 3)
		time.Sleep(time.Second)
		client.Close()
		client.Close()
		server.Shutdown()
		expect.That(t, expect.ErrOf(client.EnqueueContext(t.Context(), sitetest.AcmeTask())) != nil, "a closed client enqueues")

		never := s.Idle()
		never.Shutdown()
		never.Shutdown()
		s.Serve(s.Ok, sitetest.Brisk, s.Apart)
		s.SleepUntil(5, 90*time.Second)
	})
}

// The limiters of a client and its server have different lines: tasks start two minutes late, as the log says once.
func TestAClientWithAnotherLimiterIsNoticed(t *testing.T) {
	policy := sitetest.Policy(1000, time.Minute)
	renamed := policy
	renamed.Name = "another"
	type row struct {
		prefix string
		policy throttle.Policy
		logged int
	}
	sitetest.EachBubble(t, map[string]row{
		"the same":     {"", policy, 0},
		"another name": {"", renamed, 1},
		"a prefix":     {"staging:", policy, 1},
	}, func(t *testing.T, row row) {
		s := sitetest.NewInBubble(t, policy)
		limiter := expect.Got(throttle.New(throttle.Config{Client: s.Redis, Policies: []throttle.Policy{row.policy}, Prefix: row.prefix}))(t)
		s.Serve(s.Ok)
		client := s.Client(limiter)
		for _, id := range []string{"a", "b"} {
			expect.Must(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask(), asynq.TaskID(id))))
		}
		time.Sleep(3 * time.Minute)
		n := s.Logs.Count("stood in no line")
		expect.That(t, n == row.logged && len(s.Runs()) == 2, "logged", n, "times, want", row.logged, "ran", s.Runs(), s.Logs)
	})
}
