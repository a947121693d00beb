package worker_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

func TestTheClientRefusesWhatCanNeverRun(t *testing.T) {
	p := sitetest.Policy(5, time.Hour)
	p.Match = []string{"x"}
	p.Windows[0].Per = []string{"tenant", "user"}
	s := sitetest.OnRedis(t, p)
	limiter, err := throttle.New(throttle.Config{Client: s.Redis, Policies: []throttle.Policy{p},
		Tenants: func(_ context.Context, _, tenant string) (throttle.Tenant, bool, error) {
			if tenant == "unknown" {
				return throttle.Tenant{}, false, errors.New("the database of plans is down")
			}
			return throttle.Tenant{}, false, nil
		},
	})
	expect.Must(t, err)
	client := s.Client(limiter)
	task := func(tenant string, cost int64) *asynq.Task {
		return worker.NewTask(worker.Identity{Attributes: map[string]string{"user": "bob"}, Cost: map[string]int64{"requests": cost}, Tenant: tenant}, "x", nil)
	}
	var request *throttle.RequestError
	if _, err := client.EnqueueContext(t.Context(), asynq.NewTask("x", nil)); err == nil ||
		err.Error() != `worker: task type "x": no tenant, and policy "api" matches it: make the task with worker.NewTask, or set Config.Identify` {
		t.Errorf("without a tenant: %v", err)
	}
	_, err = client.EnqueueContext(t.Context(), task("acme", 6))
	expect.That(t, errors.As(err, &request) && request.Window == "window", "a cost of 6 of 5", err)
	_, err = client.EnqueueContext(t.Context(), sitetest.AcmeTask())
	expect.That(t, errors.As(err, &request) && request.Field == "attribute user", "without the user", err)
	_, err = client.EnqueueContext(t.Context(), nil)
	expect.That(t, err != nil, "nil was enqueued")
	expect.Equal(t, s.Redis.DBSize(t.Context()).Val(), 0, "keys were written")

	for _, ok := range []*asynq.Task{task("acme", 5), task("unknown", 6), asynq.NewTask("unmatched", nil)} {
		info := expect.Got(client.EnqueueContext(t.Context(), ok, asynq.MaxRetry(7)))(t)
		got := s.Task(info.ID)
		expect.That(t, got.MaxRetry == 7 && (ok.Type() != "unmatched" || got.State == asynq.TaskStatePending), got)
	}

	bulk := client.EnqueueBulk(t.Context(), []*asynq.Task{task("acme", 5), task("unknown", 5)}, worker.MaxWait(time.Minute))
	expect.Err(t, bulk[0].Err, new(*throttle.DeniedError), "together with a tenant whose limits are not known")
	expect.That(t, bulk[1].Err == nil, bulk[1].Err)

	byPayload, err := worker.NewClient(s.Asynq, worker.ClientConfig{
		Identify: func(task *asynq.Task) (worker.Identity, error) {
			return worker.Identity{
				Attributes: map[string]string{"user": "bob"}, Cost: map[string]int64{"requests": 5}, Tenant: string(task.Payload()),
			}, nil
		},
		Limiter: limiter, LimiterTimeout: time.Minute,
	})
	expect.Must(t, err)
	defer byPayload.Close()
	_, err = byPayload.EnqueueContext(t.Context(), asynq.NewTask("x", []byte("acme")))
	expect.That(t, err == nil, err)
}

// What asynq schedules for later is checked where it can be: a deadline before ProcessAt is too late. MaxWait and
// Backlog do nothing.
func TestTheClientRefusesWhatComesTooLate(t *testing.T) {
	reset := sitetest.Policy(5, time.Hour)
	reset.Name, reset.Match, reset.EarliestReset = "reset", []string{"reset"}, true
	line, observes := sitetest.Policy(5, time.Hour), sitetest.Policy(5, time.Hour)
	line.Match = []string{"x"}
	observes.Name, observes.Match, observes.Observe = "observes", []string{"observed"}, true
	at := time.Now().Add(time.Hour).Truncate(time.Second)
	s := sitetest.OnRedis(t, line, observes, reset)
	client := s.Client(s.Limiter)
	for _, typename := range []string{"x", "reset", "observed", "unmatched"} {
		for name, row := range map[string]struct {
			opts      []asynq.Option
			late, now bool // refused, as it is too late, or as it joins no line now
		}{
			"the deadline is before":         {opts: []asynq.Option{asynq.ProcessAt(at), asynq.Deadline(at.Add(-time.Minute))}, late: true},
			"the deadline is then":           {opts: []asynq.Option{asynq.ProcessAt(at), asynq.Deadline(at)}, late: true},
			"the deadline is before, unique": {opts: []asynq.Option{asynq.ProcessAt(at), asynq.Deadline(at.Add(-time.Minute)), asynq.Unique(time.Hour)}, late: true},
			"the deadline is after":          {opts: []asynq.Option{asynq.ProcessAt(at), asynq.Deadline(at.Add(time.Minute))}},
			"MaxWait":                        {opts: []asynq.Option{asynq.ProcessAt(at), worker.MaxWait(time.Minute)}, now: true},
			"MaxWait, group":                 {opts: []asynq.Option{asynq.Group("some"), worker.MaxWait(time.Minute)}, now: true},
			"MaxWait, group, later":          {opts: []asynq.Option{asynq.Group("some"), asynq.ProcessAt(at), worker.MaxWait(time.Minute)}, now: true},
			"Backlog":                        {opts: []asynq.Option{asynq.ProcessAt(at), worker.Backlog(7)}, now: true},
			"Backlog, group":                 {opts: []asynq.Option{asynq.Group("some"), worker.Backlog(7)}, now: true},
			"no limits":                      {opts: []asynq.Option{asynq.ProcessAt(at), worker.MaxWait(0), worker.Backlog(0)}},
		} {
			var late *throttle.DeniedError
			task := worker.NewTask(worker.Identity{Tenant: "acme"}, typename, []byte(name))
			info, err := client.EnqueueContext(t.Context(), task, row.opts...)
			switch {
			case typename == "unmatched" || typename == "observed" && row.late || !row.late && !row.now:
				expect.That(t, err == nil, typename, name, err)
			case info != nil || err == nil:
				t.Errorf("%s, %s: enqueued", typename, name)
			case row.late:
				expect.That(t, errors.As(err, &late) && late.StartsAt.Equal(at) && late.Decision.Tenant == "acme", typename, name, err)
			case !strings.Contains(err.Error(), "need a task that joins a line"):
				t.Errorf("%s, %s: %v", typename, name, err)
			}
		}
	}
	_, err := client.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "acme"}, "reset", nil), worker.MaxWait(time.Minute))
	expect.That(t, err != nil, "MaxWait of a policy without a line is ignored")
	expect.Equal(t, s.Redis.ZCard(t.Context(), "asynq:{default}:scheduled").Val(), 2+2+5+8, "tasks are scheduled")
}
