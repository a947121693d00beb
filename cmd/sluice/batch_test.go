package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

const nightly = `
policies:
  - name: api
    match: [call]
    windows:
      - {name: pace, limit: 40, period: 1s, shared: true}
  - name: slow
    match: [slow]
    windows:
      - {name: pace, limit: 1, period: 1s, shared: true}
batches:
  - name: small
    tenants: [acme, zeta]
    tasks: {type: call, count: 10, max_retry: 0}
  - name: large
    tenants: [acme]
    tasks: {type: slow, count: 400, max_retry: 0}
  - name: late
    tenants: [acme]
    tasks: {type: call, count: 400}
    finish_by: 2s
    late: refuse
`

func TestABatchIsRunAndWatched(t *testing.T) {
	t.Parallel()
	hour := func(in time.Duration) string { return time.Now().Add(in).UTC().Format("15:04") }
	closed := fmt.Sprintf("  - name: closed\n    tenants: [acme]\n    tasks: {type: call, count: 9}\n    hours: {from: %q, to: %q}\n", hour(2*time.Hour), hour(3*time.Hour))
	d := newLiveWorkspace(t, nightly+closed)
	config := asynq.Config{LogLevel: asynq.FatalLevel, DelayedTaskCheckInterval: time.Second}
	server := valueOf(worker.NewServer(asynq.RedisClientOpt{Addr: d.addr}, config, worker.Config{Limiter: d.limiter}))(t)
	must(t, server.Start(asynq.HandlerFunc(func(_ context.Context, task *asynq.Task) error {
		if task.Type() == "slow" {
			return errors.New("fails")
		}
		return nil
	})))
	t.Cleanup(server.Shutdown)
	d.run(t, "batch", "run").want(t, exitBadInput, `--batch "": must be one of small, large, late, closed`)
	d.run(t, "batch", "status", "--batch", "small").want(t, exitBadInput, `batch "small" has not fired in the last month`)

	d.run(t, "batch", "plan", "--batch", "large").want(t, exitDone).says(t,
		", 400 tasks: the last is expected to end at ", "(it waits for pace) ", "TENANT TASKS EXPECTED END OVERDUE acme 400 ")
	// 40 a second start until the finish, at which the third window opens.
	tomorrow := time.Now().Add(24 * time.Hour).UTC().Format(time.RFC3339)
	e := d.run(t, "batch", "plan", "--batch", "late", "--tick", tomorrow, "--json").want(t, exitFailed)
	plan := decoded[batch.Plan](t, e)
	that(t, plan.Overdue >= 400-3*40 && plan.Overdue <= 400-2*40 && !plan.Begins, "plan says", e.stdout)
	that(t, plan.FinishBy.Sub(plan.Tick) == 2*time.Second && len(plan.Tenants) == 1, "plan says", e.stdout)
	d.run(t, "batch", "plan", "--batch", "large", "--limit", "pce=40").want(t, exitBadInput, `--limit "pce=40": must be at least 1, of one of `)
	e = d.run(t, "batch", "plan", "--batch", "large", "--limit", "pace=40", "--json").want(t, exitDone)
	plan = decoded[batch.Plan](t, e)
	that(t, plan.Finish.Sub(plan.Tick) <= time.Minute, "with another limit it does not take 400 s:", e.stdout)
	d.run(t, "batch", "plan", "--batch", "late").want(t, exitFailed)
	d.run(t, "batch", "run", "--batch", "late").want(t, exitFailed, "nothing is enqueued")

	d.run(t, "batch", "run", "--batch", "small").want(t, exitDone).
		says(t, "20 tasks: 20 done, 0 failed, 0 rejected, 0 cancelled, 0 running, 0 waiting, ")
	d.run(t, "batch", "retry", "--batch", "small").want(t, exitBadInput, "nothing has failed")
	e = d.run(t, "batch", "status", "--batch", "small", "--json").want(t, exitDone)
	status := decoded[batch.Status](t, e)
	that(t, status.Done == 20 && status.State == batch.StateDone, e.stdout)
	d.run(t, "batch", "cancel", "--batch", "small").want(t, exitBadInput, "it has ended or was cancelled")
	d.run(t, "batch", "status", "--batch", "small", "--tick", "2026-01-02T02:00:00Z").
		want(t, exitBadInput, "did not fire then: its newest firings are "+status.Tick.Format(time.RFC3339)+"\n")

	ctx, interrupt := context.WithCancel(t.Context())
	ran := make(chan runResult)
	go func() {
		ran <- runMain(ctx, "", "batch", "--policies", d.path("policies.yml"), "--redis", "redis://"+d.addr, "run", "--batch", "large")
	}()
	for status = (batch.Status{}); status.Failed == 0; time.Sleep(20 * time.Millisecond) {
		_ = json.Unmarshal([]byte(d.run(t, "batch", "status", "--batch", "large", "--json").stdout), &status)
	}
	interrupt()
	(<-ran).want(t, exitInterrupted, "stopped: the firing goes on where a scheduler runs")
	status = decoded[batch.Status](t, d.run(t, "batch", "pause", "--batch", "large", "--json").want(t, exitDone))
	that(t, status.State == batch.StatePaused && status.Finish.IsZero() && status.Failed > 0, status)
	d.run(t, "batch", "cancel", "--batch", "large").want(t, exitDone).says(t, "cancelled\n400 tasks: ")

	go func() {
		ran <- runMain(t.Context(), "", "batch", "--policies", d.path("policies.yml"), "--redis", "redis://"+d.addr, "run", "--batch", "closed")
	}()
	for code := -1; code != exitDone; time.Sleep(20 * time.Millisecond) { // before its hours
		code = d.run(t, "batch", "cancel", "--batch", "closed").code
	}
	(<-ran).want(t, exitFailed)
}
