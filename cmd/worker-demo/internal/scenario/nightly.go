package scenario

import (
	"context"
	"io"
	"log/slog"
	"net/http"
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
	caller   *call.Caller
	limiter  *throttle.Limiter
	nightly  Nightly
	progress *drain.Progress
	server   *redisconn.Server
	windows  *drain.Windows
}

const nightlyQueue = queue + ":nightly"

// run fires the batch, and returns when it has ended or the context ends.
func (n *night) run(ctx context.Context, base string) batch.Status {
	if n.nightly.Each == 0 {
		return batch.Status{}
	}
	status, err := n.work(ctx, base)
	if err != nil && ctx.Err() == nil {
		n.progress.Say("nightly batch: %v", err)
	}
	return status
}

func (n *night) work(ctx context.Context, base string) (batch.Status, error) {
	template := batch.Template{
		Count: n.nightly.Each, Payload: base + "/{{.Tenant}}/nightly-{{.Number}}", Type: "demo:nightly",
	}
	tasks, err := template.Tasks()
	if err != nil {
		return batch.Status{}, err
	}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	scheduler, err := batch.NewScheduler(n.server.Opt, batch.Config{
		Batches: []batch.Batch{{
			FinishBy: "1m",
			Name:     "nightly",
			Options:  []asynq.Option{asynq.MaxRetry(jobs.DefaultMaxRetry)},
			Queue:    nightlyQueue,
			Tasks:    tasks,
			Tenants:  batch.List(n.nightly.Tenants...),
		}},
		Client: worker.ClientConfig{Limiter: n.limiter}, Logger: quiet,
	})
	if err != nil {
		return batch.Status{}, err
	}
	defer scheduler.Close()
	note := func(_ context.Context, _ *asynq.Task, d throttle.Decision) { n.windows.Note(d) }
	workers, err := worker.NewServer(n.server.Opt, asynq.Config{
		Concurrency: concurrency, LogLevel: asynq.FatalLevel,
		Queues: map[string]int{nightlyQueue: 1}, RetryDelayFunc: call.RetryDelay,
	}, worker.Config{Limiter: n.limiter, Logger: quiet, OnDecision: note})
	if err != nil {
		return batch.Status{}, err
	}
	err = workers.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		_, _, err := n.caller.Call(ctx, jobs.Job{Method: http.MethodGet, URL: string(task.Payload())})
		return err
	}))
	if err != nil {
		return batch.Status{}, err
	}
	defer workers.Shutdown()
	running, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() { _ = scheduler.Run(running) })
	defer func() { stop(); all.Wait() }()
	firing, err := scheduler.Fire(ctx, "nightly")
	if err != nil {
		return batch.Status{}, err
	}
	return n.follow(ctx, scheduler, firing), nil
}

// follow shows how the batch goes on, until it has ended or the context ends.
func (n *night) follow(ctx context.Context, scheduler *batch.Scheduler, firing batch.Firing) batch.Status {
	var shown batch.Status
	for {
		status, err := scheduler.Status(ctx, firing)
		moved := status.Expected.Sub(shown.Expected).Abs() > time.Second
		switch {
		case err != nil:
		case status.HasEnded():
			n.progress.Say("nightly batch: %d of %d tasks done, %s", status.Done, status.Total, against(status))
			return status
		case !status.Expected.IsZero() && moved && time.Until(status.Expected) > time.Second:
			shown = status
			n.progress.Say("nightly batch: %d of %d tasks done, the last expected to start in %s, %s",
				status.Done, status.Total,
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
	return show.Against(s.Behind(), 2*time.Second) // it looks once a second whether all tasks have ended
}
