package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

const nightly = `
policies:
  - name: api
    match: [call]
    windows:
      - {name: pace, limit: 40, period: 1s, per: []}
  - name: slow
    match: [slow]
    windows:
      - {name: pace, limit: 1, period: 1s, per: []}
batches:
  - name: small
    tenants: [acme, zeta]
    tasks: {type: call, count: 10, max_retry: 0}
  - name: large
    tenants: [acme]
    tasks: {type: slow, count: 400}
  - name: late
    tenants: [acme]
    tasks: {type: call, count: 400}
    finish_by: 2s
    late: refuse
`

// A batchDesk is a desk with a Redis and a worker.
type batchDesk struct {
	desk
	addr string
}

func newBatchDesk(t *testing.T, handler asynq.HandlerFunc) batchDesk {
	d := batchDesk{newDesk(t, nightly, ""), throttletest.Redis(t)}
	policies, err := policyfile.Load(d.path("policies.yml"))
	must(t, err)
	client := redis.NewClient(&redis.Options{Addr: d.addr})
	t.Cleanup(func() { client.Close() })
	limiter, err := throttle.New(throttle.Config{Client: client, Policies: policies})
	must(t, err)
	config := asynq.Config{LogLevel: asynq.FatalLevel, DelayedTaskCheckInterval: time.Second}
	server, err := worker.NewServer(asynq.RedisClientOpt{Addr: d.addr}, config, worker.Config{Limiter: limiter})
	must(t, err)
	must(t, server.Start(handler))
	t.Cleanup(server.Shutdown)
	return d
}

func (d batchDesk) batch(ctx context.Context, args ...string) ending {
	return runMain(ctx, "", append([]string{"batch", "--policies", d.path("policies.yml"), "--redis", "redis://" + d.addr}, args...)...)
}

func TestABatchIsRunAndWatched(t *testing.T) {
	t.Parallel()
	d := newBatchDesk(t, func(_ context.Context, task *asynq.Task) error {
		if len(task.Payload()) == 0 {
			return nil
		}
		return errors.New("fails")
	})
	e := d.batch(t.Context(), "run")
	e.want(t, exitBadInput, `--batch "": must be one of small, large, late`)
	d.batch(t.Context(), "status", "--batch", "small").want(t, exitBadInput, `batch "small" has not fired in the last month`)

	e = d.batch(t.Context(), "plan", "--batch", "large")
	e.want(t, exitDone)
	if !strings.Contains(columns(e.stdout), ", 400 tasks: the last is expected to end at ") ||
		!strings.Contains(columns(e.stdout), "(it waits for the window pace) ") ||
		!strings.Contains(columns(e.stdout), "TENANT TASKS EXPECTED END OVERDUE acme 400 ") {
		t.Errorf("plan says:\n%s", e.stdout)
	}
	var plan batch.Plan // 40 a second start until the finish, at which the third window opens
	e = d.batch(t.Context(), "plan", "--batch", "late", "--tick", time.Now().Add(24*time.Hour).UTC().Format(time.RFC3339), "--json")
	e.want(t, exitFailed)
	if err := json.Unmarshal([]byte(e.stdout), &plan); err != nil || plan.Overdue < 400-3*40 ||
		plan.Overdue > 400-2*40 || plan.Begins || plan.FinishBy.Sub(plan.Tick) != 2*time.Second ||
		len(plan.Tenants) != 1 {
		t.Errorf("plan says %v:\n%s", err, e.stdout)
	}
	plan = batch.Plan{}
	e = d.batch(t.Context(), "plan", "--batch", "large", "--limit", "pace=40", "--json") // it takes 400 s by one a second
	e.want(t, exitDone)
	if err := json.Unmarshal([]byte(e.stdout), &plan); err != nil || plan.Finish.Sub(plan.Tick) > time.Minute {
		t.Errorf("with another limit the plan says %v:\n%s", err, e.stdout)
	}
	d.batch(t.Context(), "plan", "--batch", "late").want(t, exitFailed)
	d.batch(t.Context(), "run", "--batch", "late").want(t, exitFailed, "nothing is enqueued")

	e = d.batch(t.Context(), "run", "--batch", "small")
	e.want(t, exitDone)
	if !strings.Contains(e.stdout, "20 tasks: 20 done, 0 failed, 0 rejected, 0 cancelled, 0 running, 0 waiting, ") {
		t.Errorf("run says:\n%s", e.stdout)
	}
	d.batch(t.Context(), "retry", "--batch", "small").want(t, exitBadInput, "nothing has failed")
	var status batch.Status
	e = d.batch(t.Context(), "status", "--batch", "small", "--json")
	e.want(t, exitDone)
	if err := json.Unmarshal([]byte(e.stdout), &status); err != nil || status.Done != 20 || status.State != batch.StateDone {
		t.Errorf("status says %v:\n%s", err, e.stdout)
	}
	d.batch(t.Context(), "cancel", "--batch", "small").want(t, exitBadInput, "it has ended or was cancelled")

	ctx, interrupt := context.WithCancel(t.Context())
	ran := make(chan ending)
	go func() { ran <- d.batch(ctx, "run", "--batch", "large") }()
	for status = (batch.Status{}); status.State != batch.StateRunning; time.Sleep(20 * time.Millisecond) {
		_ = json.Unmarshal([]byte(d.batch(t.Context(), "status", "--batch", "large", "--json").stdout), &status)
	}
	interrupt()
	e = <-ran
	e.want(t, exitInterrupted, "stopped: the firing goes on where a scheduler runs")
	e = d.batch(t.Context(), "pause", "--batch", "large")
	e.want(t, exitDone)
	if !strings.Contains(e.stdout, "paused") {
		t.Errorf("pause says:\n%s", e.stdout)
	}
	e = d.batch(t.Context(), "cancel", "--batch", "large")
	e.want(t, exitDone)
	if !strings.Contains(e.stdout, "cancelled\n400 tasks: ") {
		t.Errorf("cancel says:\n%s", e.stdout)
	}
}
