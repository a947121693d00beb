package scenario

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/call"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/drain"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

// A Nightly is a batch beside the tenants' jobs. It yields to them.
type Nightly struct {
	Each    int      // tasks of each tenant; 0 for no batch
	Tenants []string // some of the scenario's
}

// A night is the batch of a scenario at work: a scheduler, and a server of its own.
type night struct {
	counted   counted
	firing    batch.Firing
	progress  *drain.Progress
	scheduler *batch.Scheduler
	server    *worker.Server
	stop      context.CancelFunc
	stopped   chan struct{}
}

// counted is the most that windows counted, by window and scope.
type counted struct {
	mu   sync.Mutex
	most map[[2]string]int64
}

func (c *counted) decided(_ context.Context, _ *asynq.Task, d throttle.Decision) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.most == nil {
		c.most = map[[2]string]int64{}
	}
	for _, w := range d.Windows {
		key := [2]string{w.Name, strings.TrimPrefix(w.Scope.String(), "tenant=")}
		c.most[key] = max(c.most[key], w.Used)
	}
}

const nightlyQueue = queue + ":nightly"

// begin plans the batch, and fires it.
func (n Nightly) begin(ctx context.Context, server *redisconn.Server, limiter *throttle.Limiter, caller *call.Caller, base string, progress *drain.Progress) (*night, error) {
	tasks, err := batch.Template{Count: n.Each, Payload: base + "/{{.Tenant}}/nightly-{{.Number}}", Type: "demo:nightly"}.Tasks()
	if err != nil {
		return nil, err
	}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	w := &night{progress: progress, stopped: make(chan struct{})}
	w.scheduler, err = batch.NewScheduler(server.Opt, batch.Config{
		Batches: []batch.Batch{{
			FinishBy: "1m", Name: "nightly", Options: []asynq.Option{asynq.MaxRetry(jobs.DefaultMaxRetry)}, Queue: nightlyQueue, Tasks: tasks, Tenants: batch.List(n.Tenants...),
		}},
		Client: worker.ClientConfig{Limiter: limiter}, Logger: quiet,
	})
	if err != nil {
		return nil, err
	}
	w.server, err = worker.NewServer(server.Opt, asynq.Config{
		Concurrency: concurrency, LogLevel: asynq.FatalLevel, Queues: map[string]int{nightlyQueue: 1}, RetryDelayFunc: call.RetryDelay,
	}, worker.Config{Limiter: limiter, Logger: quiet, OnDecision: w.counted.decided})
	if err == nil {
		err = w.server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			_, _, err := caller.Call(ctx, jobs.Job{Method: http.MethodGet, URL: string(task.Payload())})
			return err
		}))
	}
	if err == nil {
		w.firing, err = w.scheduler.Fire(ctx, "nightly")
	}
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(ctx)
	w.stop = stop
	go func() {
		defer close(w.stopped)
		_ = w.scheduler.Run(running)
	}()
	return w, nil
}

// follow tells how the batch goes on, until it has ended or the context ends.
func (w *night) follow(ctx context.Context) batch.Status {
	var told batch.Status
	for {
		status, err := w.scheduler.Status(ctx, w.firing)
		moved := status.Expected.Sub(told.Expected).Abs() > time.Second
		switch {
		case err != nil:
		case status.HasEnded():
			w.progress.Say("nightly batch: %d of %d tasks done, %s", status.Done, status.Total, against(status))
			return status
		case !status.Expected.IsZero() && moved && time.Until(status.Expected) > time.Second:
			told = status
			w.progress.Say("nightly batch: %d of %d tasks done, the last expected to start in %s, %s", status.Done, status.Total,
				show.Short(time.Until(status.Expected).Round(time.Second)), against(status))
		}
		select {
		case <-ctx.Done():
			return status
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// against is how the batch stands against its plan.
func against(s batch.Status) string {
	switch by := s.Behind().Round(time.Second); {
	case by >= 2*time.Second: // it looks once a second whether all tasks have ended
		return fmt.Sprintf("%s behind its plan", show.Short(by))
	case by <= -2*time.Second:
		return fmt.Sprintf("%s ahead of its plan", show.Short(-by))
	}
	return "as planned"
}

func (w *night) end() {
	w.stop()
	<-w.stopped
	w.server.Shutdown()
	w.scheduler.Close()
}
