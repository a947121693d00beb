package queuetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A grant that has waited counts from when it was taken: it is given back, and the task is granted once more.
func TestAnOldGrantIsReservedAgain(t *testing.T) {
	type row struct {
		delay time.Duration
		anew  bool
	}
	sitetest.EachBubble(t, map[string]row{
		"in time": {50 * time.Millisecond, false},
		"too old": {300 * time.Millisecond, true},
	}, func(t *testing.T, row row) {
		s := sitetest.NewInBubble(t, sitetest.Policy(10, time.Hour))
		picks := &sitetest.Fault{Is: sitetest.IsPick, Lost: true, Meanwhile: func() { time.Sleep(row.delay) }}
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(picks.See))
		s.Serve(s.Ok)
		time.Sleep(time.Second)
		s.JoinMany(s.Client(s.Limiter), "acme", 0, 1)
		enqueued := time.Now()
		s.SleepUntil(1, 5*time.Second)
		after := s.Grants()[0].At.Sub(enqueued)
		expect.That(t, (after >= row.delay) == row.anew, "it was granted", after, "after it was enqueued")
		expect.Equal(t, s.Used(), 1, "are used")
	})
}

// An old grant cannot be reserved again while the limiter is silent. If the policy fails open it runs, and gives back
// the old slot.
func TestAnOldGrantOfAPolicyThatFailsOpenHoldsNoSlot(t *testing.T) {
	p := sitetest.AtOnce(10)
	p.FailOpen = true
	sitetest.Bubble(t, p, func(t *testing.T, s *sitetest.Site) {
		picks := &sitetest.Fault{Is: sitetest.IsPick, Lost: true, Meanwhile: func() { time.Sleep(300 * time.Millisecond) }}
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(picks.See))
		s.JoinMany(s.Client(s.AnotherLimiter()), "acme", 0, 1)
		silent := &sitetest.Fault{Is: sitetest.WithArg("reserve"), Err: context.DeadlineExceeded}
		s.Limiter = s.AnotherLimiter(hooktest.Hook(silent.See))
		s.Serve(s.Ok)
		time.Sleep(5 * time.Second)
		expect.Equal(t, fmt.Sprint(len(s.Runs()), " ran, used: ", s.Used()), "1 ran, used: 0")
	})
}

// A limit is cut while tasks that were taken wait, so that their old grants are not all renewed. What
// is denied then goes before the tasks that stood behind it.
func TestAnOldGrantThatIsDeniedWaitsInFront(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(2, 10*time.Second), func(t *testing.T, s *sitetest.Site) {
		picks := &sitetest.Fault{Is: sitetest.IsPick, Lost: true, Hits: sitetest.Only(1), Meanwhile: func() {
			time.Sleep(300 * time.Millisecond)
			s.SetPolicy(func(p *throttle.Policy) { p.Windows[0].Limit = 1 }, s.Limiter)
		}}
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(picks.See))
		s.JoinMany(s.Client(s.Limiter), "acme", 0, 4)
		s.Serve(s.Ok)
		s.SleepUntil(4, time.Minute)
		expect.Equal(t, slices.Sorted(slices.Values(s.Order()[:2])), []string{"acme-0000", "acme-0001"}, "granted", s.Order())
	})
}

// A client may compute something else than a worker: the worker's word counts, and nothing is charged twice.
func TestTheWorkersRequestCounts(t *testing.T) {
	for name, id := range map[string]worker.Identity{
		"cost": {Cost: map[string]int64{"requests": 7}, Tenant: "acme"}, "tenant": {Tenant: "beta"},
	} {
		t.Run(name, func(t *testing.T) {
			sitetest.Bubble(t, sitetest.Policy(10, time.Hour), func(t *testing.T, s *sitetest.Site) {
				s.Serve(s.Ok, func(_ *asynq.Config, c *worker.Config) {
					c.Identify = func(*asynq.Task) (worker.Identity, error) { return id, nil }
				})
				s.JoinMany(s.Client(s.Limiter), "acme", 0, 1)
				time.Sleep(5 * time.Second)
				s.WaitGone("acme-0000")
				want := map[string]int64{"cost": 7, "tenant": 0}[name]
				expect.That(t, s.Used() == want, s.Used(), "are used by acme, want", want)
				beta, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "beta"})
				expect.That(t, err == nil && (name != "tenant" || beta.Windows[0].Used == 1), beta.Windows, err)
				s.WantNobodyInLine()
			})
		})
	}
}

// Every task of a batch has its own result, and the rest is as if it was enqueued alone.
func TestABatchHasAResultForEachTask(t *testing.T) {
	other := sitetest.Policy(5, time.Hour)
	other.Name, other.Match = "other", []string{"other"}
	api := sitetest.Shared(1, time.Hour)
	api.Match = []string{"x"}
	s := sitetest.OnRedis(t, api, other)
	client := s.Client(s.Limiter)
	task := func(typename string, cost int64, opts ...asynq.Option) *asynq.Task {
		identity := worker.Identity{Tenant: "acme", Cost: map[string]int64{"requests": cost}}
		return worker.NewTask(identity, typename, []byte(fmt.Sprint(opts)), opts...)
	}
	tasks := []*asynq.Task{
		task("x", 1, asynq.TaskID("a")), nil, task("x", 1, asynq.TaskID("a"), asynq.Retention(time.Hour)),
		task("x", 2, asynq.TaskID("never")), asynq.NewTask("x", nil, asynq.TaskID("nobody's")),
		task("unmatched", 1, asynq.TaskID("plain")),
		task("x", 1, asynq.TaskID("later"), asynq.ProcessIn(time.Hour)),
		task("other", 1, asynq.TaskID("b"), asynq.Queue("low")), task("other", 1, asynq.TaskID("c")),
		task("x", 1, asynq.TaskID("late"), asynq.Deadline(time.Now().Add(time.Minute))),
		task("x", 1, asynq.TaskID("u1"), asynq.Unique(time.Hour)),
		task("x", 1, asynq.TaskID("u2"), asynq.Unique(time.Hour)),
	}
	results := client.EnqueueBulk(t.Context(), tasks, asynq.MaxRetry(3))
	for i, want := range []struct {
		state asynq.TaskState
		in    time.Duration
		err   func(error) bool
	}{
		{state: asynq.TaskStateScheduled},
		{err: func(err error) bool { return err.Error() == "worker: the task is nil" }},
		{err: func(err error) bool { return errors.Is(err, asynq.ErrTaskIDConflict) }},
		{err: func(err error) bool { return errors.As(err, new(*throttle.RequestError)) }},
		{err: func(err error) bool { return strings.Contains(err.Error(), "no tenant") }},
		{state: asynq.TaskStatePending},
		{state: asynq.TaskStateScheduled, in: time.Hour},
		{state: asynq.TaskStateScheduled},
		{state: asynq.TaskStateScheduled},
		{err: func(err error) bool { return errors.As(err, new(*throttle.DeniedError)) }},
		{state: asynq.TaskStateScheduled, in: time.Hour},
		{state: asynq.TaskStateScheduled, in: 2 * time.Hour},
	} {
		got := results[i]
		if want.err != nil {
			expect.That(t, got.Info == nil && got.Err != nil && want.err(got.Err), "task", i, got.Info, got.Err)
			continue
		}
		expect.That(t, got.Err == nil && got.Info.State == want.state &&
			!sitetest.Off(got.Start.At, time.Now().Add(want.in)) && got.Info.MaxRetry == 3, "task", i, got.Info,
			got.Err)
	}
	expect.Equal(t, s.InLine(), []string{"default/a", "default/c", "default/u1", "default/u2", "low/b"}, "in line")
	if n := s.Redis.ZCard(t.Context(), "asynq:{default}:scheduled").Val(); n != 5 { // with the later one
		t.Errorf("%d are scheduled", n)
	}
	again := client.EnqueueBulk(t.Context(), tasks[10:11])
	expect.Err(t, again[0].Err, asynq.ErrDuplicateTask, "enqueued again:")
}

func TestEnqueueBulkTakesFewCalls(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Shared(10, time.Hour))
	calls := 0
	count := hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		calls++
		return next(ctx, cmd)
	})
	config := worker.ClientConfig{Limiter: s.AnotherLimiter(count), LimiterTimeout: time.Minute}
	client := expect.Got(worker.NewClient(hooktest.With(s.Asynq, count), config))(t)
	defer client.Close()
	tasks := make([]*asynq.Task, 510) // two chunks
	for i := range tasks {
		tasks[i] = sitetest.AcmeTask(asynq.TaskID(fmt.Sprint("t", i)))
	}
	last := time.Time{}
	for i, result := range client.EnqueueBulk(t.Context(), tasks) {
		expect.Require(t, result.Err == nil && result.Info.ID == fmt.Sprint("t", i) &&
			!result.Start.At.Before(last), "task", i, result.Info, result.Err, "after one that starts", last)
		last = result.Start.At.Add(-time.Second)
	}
	// One of asynq's client for each task, which is never sent. A store, a join and an arrangement for
	// as many as one call takes, in two chunks, and each again as Redis does not know the script.
	const steps, chunks = 3, 2
	most := len(tasks) + steps*(len(tasks)/throttle.MaxTake+chunks) + steps
	expect.That(t, calls <= most, calls, "calls, want at most", most)
	expect.Equal(t, len(s.InLine()), len(tasks), "in line")
}

// A task that is enqueued with the ID of one that was deleted stands behind those that waited before.
func TestATaskIDMayBeUsedAgain(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Shared(1, time.Hour))
	client := s.Client(s.Limiter)
	s.JoinMany(client, "acme", 0, 3)
	expect.Must(t, s.Inspector.DeleteTask("default", "acme-0001"))
	var start worker.ExpectedStart
	another := worker.NewTask(worker.Identity{Tenant: "acme"}, "x", []byte("another"))
	info, err := client.EnqueueContext(t.Context(), another, asynq.TaskID("acme-0001"), worker.ReportStart(&start))
	expect.That(t, err == nil && !sitetest.Off(start.At, time.Now().Add(2*time.Hour)), info, err)
	got := s.InLine()
	expect.That(t, len(got) == 3, "in line:", got)
}
