package workertest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/workertest"
)

// The code under test: a policy and a handler.
var policies = []throttle.Policy{{
	Name: "llm", Match: []string{"llm:*"},
	Windows: []throttle.Window{
		{Name: "calls", Limit: 2, Period: time.Minute},
		{Name: "tokens", Unit: "tokens", Limit: 10_000, Period: time.Hour, Shared: true},
	},
}, {Name: "storage", Windows: []throttle.Window{{Name: "writes", Limit: 10, Period: time.Second}}}}

var errFull = errors.New("the disk is full")

func handle(ctx context.Context, task *asynq.Task) error {
	job := worker.FromContext(ctx)
	switch string(task.Payload()) {
	case "refused": // the API answers 429, and Retry-After: 30
		return worker.RetryAfter(30 * time.Second)
	case "full":
		return errFull
	case "empty": // no call is needed
		return job.Cancel(ctx)
	}
	if err := job.Settle(ctx, "tokens", 900); err != nil { // as the API's answer says
		return err
	}
	_, err := job.Reserve(ctx, throttle.Request{Policy: "storage"}) // to keep the answer
	return err
}

var acme = worker.Identity{Tenant: "acme", Cost: map[string]int64{throttle.Requests: 1, "tokens": 1500}}

// Hours of throttling take seconds.
func TestHoursOfTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := workertest.Start(t, workertest.Config{Handler: asynq.HandlerFunc(handle), Policies: policies})
		for range 5 {
			w.Enqueue(worker.NewTask(acme, "llm:ask", nil))
		}
		w.Drain(time.Hour)

		begun := w.Runs()[0].Start
		for i, run := range w.Runs() {
			if got, want := run.Start.Sub(begun).Round(time.Second), time.Duration(i/2)*time.Minute; got != want {
				t.Errorf("run %d began after %v, want %v", i, got, want)
			}
		}

		time.Sleep(90 * time.Minute)
		next := w.Enqueue(worker.NewTask(acme, "llm:ask", nil))
		w.Drain(time.Minute)
		if late := w.Runs()[5].Start.Sub(next.At); late > 50*time.Millisecond {
			t.Errorf("90 minutes later, a task began %v late", late)
		}
	})
}

// What a handler does by its job, and what becomes of the task.
func TestWhatTheHandlerDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := workertest.Start(t, workertest.Config{Handler: asynq.HandlerFunc(handle), Policies: policies})

		run := w.Run(worker.NewTask(acme, "llm:ask", []byte("why?")))
		if run.Outcome != workertest.OutcomeDone || run.Cost["tokens"] != 900 {
			t.Errorf("%s, and it cost %v, want 900 tokens: %v", run.Outcome, run.Cost, run.Err)
		}
		if len(run.Reserved) != 1 || run.Reserved[0].Policy != "storage" {
			t.Errorf("it reserved %v, want a write", run.Reserved)
		}

		run = w.Run(worker.NewTask(acme, "llm:ask", []byte("refused")))
		if run.Outcome != workertest.OutcomeWaits || len(run.Refusals) != 1 || run.Refusals[0].Pause != 30*time.Second {
			t.Errorf("%s after refusals %v, want one of 30 s", run.Outcome, run.Refusals)
		}
	})
}

// The handler is denied the second write that it wants to make.
func TestTheSecondWriteIsDenied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := workertest.Start(t, workertest.Config{Handler: asynq.HandlerFunc(handle), Policies: policies})
		throttletest.DenyAfter(t, w.Limiter, throttle.Request{Policy: "storage", Tenant: "acme"}, 1)

		if run := w.Run(worker.NewTask(acme, "llm:ask", nil)); run.Outcome != workertest.OutcomeDone {
			t.Errorf("the first: %s, %v", run.Outcome, run.Err)
		}
		run := w.Run(worker.NewTask(acme, "llm:ask", nil))
		var denied *throttle.DeniedError
		if run.Outcome != workertest.OutcomeWaits || !errors.As(run.Err, &denied) || run.Retried != 0 {
			t.Errorf("the second: %s, %v", run.Outcome, run.Err)
		}
	})
}

// A limiter alone, for code without a worker.
func TestThreeASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter := throttletest.NewLimiter(t, throttle.Policy{
			Name: "sms", Windows: []throttle.Window{{Name: "w", Limit: 3, Period: time.Second}},
		})
		request := throttle.Request{Policy: "sms", Tenant: "acme"}
		throttletest.DenyAfter(t, limiter, request, 0)
		d, err := limiter.Reserve(t.Context(), request)
		if err != nil || d.Granted {
			t.Fatalf("granted %v, %v", d.Granted, err)
		}
		time.Sleep(d.RetryIn) // of the bubble: it takes no time
		if d, err = limiter.Reserve(t.Context(), request); err != nil || !d.Granted {
			t.Errorf("granted %v, %v: %s", d.Granted, err, d.Reason())
		}
	})
}

// Windows of the calendar are tested at a date.
func TestTheNextMonth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 12, 31, 23, 59, 0, 0, time.UTC)))
		limiter := throttletest.NewLimiter(t, throttle.Policy{
			Name: "sms", Windows: []throttle.Window{{Name: "w", Algorithm: throttle.AlgorithmCalendar, Limit: 1, Resets: "@monthly"}},
		})
		for _, granted := range []bool{true, false, true} {
			d, err := limiter.Reserve(t.Context(), throttle.Request{Policy: "sms", Tenant: "acme"})
			if err != nil || d.Granted != granted {
				t.Errorf("granted %v, %v at %v", d.Granted, err, time.Now())
			}
			time.Sleep(d.RetryIn)
		}
	})
}

// Outside of a bubble, the real clock goes.
func TestByTheRealClock(t *testing.T) {
	w := workertest.Start(t, workertest.Config{Handler: asynq.HandlerFunc(handle), Policies: policies})
	if run := w.Run(worker.NewTask(acme, "llm:ask", nil)); run.Outcome != workertest.OutcomeDone {
		t.Errorf("%s: %v", run.Outcome, run.Err)
	}
	w.Drain(time.Minute)
}

// Every way in which a run can end.
func TestARunSaysHowItEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := workertest.Start(t, workertest.Config{Handler: asynq.HandlerFunc(handle), Policies: policies})
		for i, row := range []struct {
			payload string
			retries int
			want    workertest.Outcome
		}{
			{"full", 1, workertest.OutcomeRetries},
			{"full", 0, workertest.OutcomeArchived},
			{"empty", 0, workertest.OutcomeDone},
			{"refused", 0, workertest.OutcomeWaits},
		} {
			tenant := worker.Identity{Tenant: fmt.Sprint("tenant", i)}
			run := w.Run(worker.NewTask(tenant, "llm:ask", []byte(row.payload)), asynq.MaxRetry(row.retries))
			if run.Outcome != row.want {
				t.Errorf("%s: %s, %v, want %s", row.payload, run.Outcome, run.Err, row.want)
			}
			if run.Cancelled != (row.payload == "empty") || run.End.IsZero() || run.Task.Type() != "llm:ask" {
				t.Errorf("%s: %+v", row.payload, run)
			}
		}
		for _, tenant := range []string{"first", "second"} {
			run := w.Run(worker.NewTask(worker.Identity{Tenant: tenant}, "llm:ask", []byte("empty"), asynq.TaskID("nightly")))
			if id, _ := worker.IdentityOf(run.Task); id.Tenant != tenant {
				t.Errorf("the %s task of an ID: the run of %q", tenant, id.Tenant)
			}
		}
		if run := w.Run(asynq.NewTask("other", nil)); run.Outcome != workertest.OutcomeRetries || run.Decision.Policy != "" {
			t.Errorf("a task that no policy matches, and settles: %s, %v, by %+v", run.Outcome, run.Err, run.Decision)
		}
	})
}
