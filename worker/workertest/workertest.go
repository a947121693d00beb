// Package workertest runs handlers in a whole worker for tests: a server, a client and a limiter, on
// a Redis in memory. In a bubble of testing/synctest hours of throttling take no time.
package workertest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

// Config configures Start, which replaces the limiters and Worker.Logger by the test's.
type Config struct {
	// Asynq configures the server. The defaults are asynq's own, but Concurrency is 4, JanitorInterval a
	// minute, and LogLevel FatalLevel.
	Asynq asynq.Config

	// Client configures the client.
	Client worker.ClientConfig

	// Handler runs the tasks, such as an *asynq.ServeMux. It is required.
	Handler asynq.Handler

	// Policies are the limiter's. The default is none.
	Policies []throttle.Policy

	// Worker configures how tasks are throttled.
	Worker worker.Config
}

// A Worker is a running server with its client and limiter. Its methods are safe for concurrent use.
type Worker struct {
	Client    *worker.Client
	Inspector *asynq.Inspector
	Limiter   *throttle.Limiter
	Memory    throttletest.Memory // asynq's Redis and the limiter's, such as for asynq.NewClient
	Server    *worker.Server

	t    testing.TB
	runs recorder
}

// Start starts a worker that ends with the test. The test fails if the config is invalid.
func Start(t testing.TB, c Config) *Worker {
	t.Helper()
	if c.Handler == nil {
		t.Fatal("workertest: Config.Handler is nil: must be what runs the tasks")
	}
	w := &Worker{Memory: throttletest.InMemory(t), t: t}
	k := &kit{Memory: w.Memory, log: t.Output(), looks: map[string]time.Time{}}
	logger := slog.New(slog.NewTextHandler(k, nil))
	w.Limiter = expect.Got(throttle.New(throttle.Config{
		Client: k.limiterClient(t), Logger: logger, Policies: c.Policies,
		Observer: func(event any) { w.runs.observe(event); k.observe(event) },
	}))(t)
	w.Inspector = asynq.NewInspector(w.Memory)
	t.Cleanup(func() { w.Inspector.Close() })

	c.Client.Limiter = w.Limiter
	w.Client = expect.Got(worker.NewClient(w.Memory, c.Client))(t)
	t.Cleanup(func() { w.Client.Close() })

	c.Asynq.Concurrency = cmp.Or(c.Asynq.Concurrency, 4)
	c.Asynq.JanitorInterval = cmp.Or(c.Asynq.JanitorInterval, time.Minute)
	c.Asynq.LogLevel = cmp.Or(c.Asynq.LogLevel, asynq.FatalLevel)
	c.Worker.Limiter, c.Worker.Logger = w.Limiter, logger
	w.Server = expect.Got(worker.NewServer(k, c.Asynq, c.Worker))(t)
	t.Cleanup(w.Server.Shutdown)
	expect.Must(t, w.Server.Start(w.runs.recorded(c.Handler)))
	return w
}

// Enqueue enqueues a task by the worker's client, and returns when it is expected to start. The
// test fails if the enqueue fails: use Client for tasks that are to be refused.
func (w *Worker) Enqueue(task *asynq.Task, opts ...asynq.Option) worker.ExpectedStart {
	w.t.Helper()
	var start worker.ExpectedStart
	expect.Got(w.Client.EnqueueContext(w.t.Context(), task, append(opts, worker.ReportStart(&start))...))(w.t)
	return start
}

// Drain returns when no task waits, runs or is to be retried. The test fails if that takes longer than the given time
// of its clock.
func (w *Worker) Drain(within time.Duration) {
	w.t.Helper()
	begun := time.Now()
	for {
		left := w.left()
		switch took := time.Since(begun); {
		case left == "":
			return
		case took >= within:
			w.t.Fatalf("workertest: after %v there are still tasks: %s", within, left)
		default: // each look costs as much as a task
			time.Sleep(min(max(took/50, 10*time.Millisecond), within-took))
		}
	}
}

// left describes how many tasks have not ended: "" if all have.
func (w *Worker) left() string {
	w.t.Helper()
	var left []string
	for _, queue := range expect.Got(w.Inspector.Queues())(w.t) {
		info := expect.Got(w.Inspector.GetQueueInfo(queue))(w.t)
		if info.Active+info.Pending+info.Scheduled+info.Retry+info.Aggregating > 0 {
			left = append(left, fmt.Sprintf("queue %s has %d active, %d pending, "+
				"%d scheduled or in line, %d to be retried, %d in groups",
				queue, info.Active, info.Pending, info.Scheduled, info.Retry, info.Aggregating))
		}
	}
	return strings.Join(left, "; ")
}

// Runs returns the runs of handlers so far, in the order in which they began.
func (w *Worker) Runs() []Run { return w.runs.copies("", 0) }

// Run enqueues a task, and returns its first run when that has ended and asynq has stored the outcome. Let no other
// task run meanwhile. The test fails if the task does not run within an hour, by the clock of the test.
func (w *Worker) Run(task *asynq.Task, opts ...asynq.Option) Run {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Hour)
	defer cancel()
	w.runs.mu.Lock()
	earlier := len(w.runs.runs) // perhaps some of the same ID
	w.runs.mu.Unlock()
	info := expect.Got(w.Client.EnqueueContext(ctx, task, opts...))(w.t)
	for ctx.Err() == nil {
		if runs := w.runs.copies(info.ID, earlier); len(runs) > 0 && !runs[0].End.IsZero() {
			if outcome := expect.Got(w.outcome(info, runs[0], earlier))(w.t); outcome != "" {
				run := w.runs.copies(info.ID, earlier)[0] // with what followed the end of its handler
				run.Outcome = outcome
				return run
			}
		}
		time.Sleep(time.Millisecond)
	}
	w.t.Fatalf("workertest: task %q did not run within an hour", info.ID)
	return Run{}
}

// outcome returns what became of the task by its first run after `earlier` others. It is empty until asynq has stored that.
func (w *Worker) outcome(task *asynq.TaskInfo, run Run, earlier int) (Outcome, error) {
	info, err := w.Inspector.GetTaskInfo(task.Queue, task.ID)
	switch {
	case errors.Is(err, asynq.ErrTaskNotFound), err == nil && info.State == asynq.TaskStateCompleted:
		return OutcomeDone, nil
	case err != nil:
		return "", err
	case info.State == asynq.TaskStateArchived:
		return OutcomeArchived, nil
	case info.Retried > run.Retried:
		return OutcomeRetries, nil
	case info.State == asynq.TaskStateActive && len(w.runs.copies(task.ID, earlier)) == 1:
		return "", nil
	}
	return OutcomeWaits, nil
}
