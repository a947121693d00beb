package batchfile_test

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/batchfile"
)

// The night of docs/howto/nightly-batches.md, from two to nine past, on fake time.
func TestTheNightOfTheDocs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(2*time.Hour - time.Minute) // it is one minute to two
		redisOpt := throttletest.InMemory(t)

		policies, batches, err := batchfile.Load("testdata/nightly.yml")
		expect.Must(t, err)
		client := redisOpt.Client(t)
		limiter := expect.Got(throttle.New(throttle.Config{Client: client, Policies: policies}))(t)

		// In every worker:
		ran := map[string]int{}
		mux := asynq.NewServeMux()
		mux.HandleFunc("geocode:address", func(_ context.Context, task *asynq.Task) error {
			ran[string(task.Payload())]++
			return nil
		})
		var told []batch.Status
		mux.HandleFunc("report:night", func(_ context.Context, task *asynq.Task) error {
			var status batch.Status
			err := json.Unmarshal(task.Payload(), &status)
			told = append(told, status)
			return err
		})
		server, err := worker.NewServer(
			redisOpt,
			asynq.Config{
				Concurrency: 1, LogLevel: asynq.ErrorLevel,
				Queues: map[string]int{"default": 9, "night": 1}, TaskCheckInterval: time.Minute,
			},
			worker.Config{Limiter: limiter},
		)
		expect.Must(t, err)
		expect.Must(t, server.Start(mux))
		defer server.Shutdown()

		// In one process or more:
		scheduler, err := batch.NewScheduler(redisOpt, batch.Config{
			Batches: batches,
			Client:  worker.ClientConfig{Limiter: limiter},
		})
		expect.Must(t, err)
		defer scheduler.Close()
		ctx, stop := context.WithCancel(context.Background())
		done := make(chan error)
		go func() { done <- scheduler.Run(ctx) }()

		plan, err := scheduler.Plan(ctx, "nightly", batch.PlanOptions{}) // the next tick
		expect.Must(t, err)
		// One starts every 3 s, the last of 120 after 5:57. What is expected follows within two seconds.
		const last, follows = "02:05:57", "02:05:59"
		if expected := plan.Finish.UTC().Format(time.TimeOnly); expected < last || expected > follows ||
			plan.Total != 120 || plan.Overdue != 0 {
			t.Errorf("before two it is planned to be: %+v", plan)
		}

		time.Sleep(4 * time.Minute) // three past two
		firings, err := scheduler.Firings(ctx, "nightly", 1)
		expect.Require(t, err == nil && len(firings) == 1, firings, err)
		status, err := scheduler.Status(ctx, firings[0])
		// The three minutes may begin and end with one.
		if err != nil || status.State != batch.StateRunning || status.Total != 120 ||
			status.Done < 3*60/3 || status.Done > 3*60/3+1 {
			t.Errorf("at three past two: %+v, %v", status, err)
		}
		expected := status.Finish.UTC().Format(time.TimeOnly)
		expect.That(t, expected >= last && expected <= follows, "at three past two it is expected to start its last task at", expected)
		expect.That(t, status.Behind().Abs() <= 2*time.Second, "at three past two it is behind its plan:", status.Behind())
		time.Sleep(6 * time.Minute)
		synctest.Wait() // for the race detector: a sleep orders nothing
		expect.That(t, len(told) == 1 && told[0].State == batch.StateDone && told[0].Done == 120 &&
			told[0].EndedAt.UTC().Format(time.TimeOnly) <= follows, "at nine past two:", told)
		expect.Equal(t, len(ran), 120, "calls were made")
		for payload, times := range ran {
			expect.Equal(t, times, 1, payload, "was called", "times")
		}
		stop()
		expect.Must(t, <-done)
	})
}
