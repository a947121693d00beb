package queuetest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// An explanation tells of a task in line its place, and of any other why it is in asynq's state.
func TestExplainKnowsEveryState(t *testing.T) {
	guarded := sitetest.Policy(1, time.Hour)
	guarded.Match = []string{"x"}
	sitetest.OnRedis(t, []throttle.Policy{guarded}, func(t *testing.T, s *sitetest.Site) {
		client := s.Client(s.Limiter)
		explain := func(queue, id string) worker.Explanation {
			t.Helper()
			e, err := client.Explain(t.Context(), queue, id)
			sitetest.Must(t, err)
			return e
		}
		says := func(id, state string, why ...string) {
			t.Helper()
			e := explain("default", id)
			if e.State != state {
				t.Errorf("%s is %q, want %q", id, e.State, state)
			}
			for _, text := range why {
				if !strings.Contains(e.String(), text) {
					t.Errorf("%s: %q is not in\n%s", id, text, e)
				}
			}
		}
		if e := explain("default", "nothing"); e.State != "" || e.Why == "" || e.Line != nil {
			t.Errorf("%+v", e)
		}
		s.Fill("acme")
		if _, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(), asynq.TaskID("waits")); err != nil {
			t.Fatal(err)
		}
		later := sitetest.AcmeTask(asynq.TaskID("later"), asynq.ProcessIn(time.Hour))
		if _, err := client.EnqueueContext(t.Context(), later); err != nil {
			t.Fatal(err)
		}
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("plain"))
		s.Enqueue(asynq.NewTask("unmatched", nil), asynq.TaskID("free"))
		s.Enqueue(asynq.NewTask("fails", nil), asynq.TaskID("fails"), asynq.MaxRetry(0))
		s.Enqueue(asynq.NewTask("fails", nil), asynq.TaskID("again"), asynq.MaxRetry(3))
		says("waits", "scheduled", "policy api, delayed by window window; no server serves its queue\n",
			"position 1 of 1 of its tenant", "window window (tenant=acme): 1 of 1 requests used")
		if e := explain("default", "waits"); e.Line == nil ||
			sitetest.Off(e.Line.Expected, time.Now().Add(time.Hour)) || e.Line.Binds != "window" ||
			e.Servers != 0 {
			t.Errorf("%+v", e)
		}
		says("later", "scheduled", "it is scheduled for ", "joins the line of policy api then")
		says("plain", "pending", "policy api decides about it")
		sitetest.Must(t, s.Inspector.PauseQueue("default"))
		says("free", "pending", "no policy matches its type", "its queue is paused")
		sitetest.Must(t, s.Inspector.UnpauseQueue("default"))
		s.Serve(func(_ context.Context, task *asynq.Task) error {
			if task.Type() == "fails" {
				return errors.New("boom")
			}
			return nil
		}, func(theirs *asynq.Config, _ *worker.Config) {
			theirs.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
		})
		s.WaitState(asynq.TaskStateArchived, "fails")
		s.WaitState(asynq.TaskStateRetry, "again")
		s.WaitState(asynq.TaskStateScheduled, "plain")
		says("fails", "archived", "it has failed for good: boom")
		says("again", "retry", "it has failed (1 of 3 retries used)", "boom")
		says("plain", "scheduled", "it waits in line for policy api", "position 2 of 2 of its tenant")
	})
}
