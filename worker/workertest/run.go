package workertest

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// An Outcome is the result of one run of a task's handler.
type Outcome string

const (
	OutcomeDone     Outcome = "done"     // it has ended well
	OutcomeWaits    Outcome = "waits"    // it goes back to the line, and no retry was used
	OutcomeRetries  Outcome = "retries"  // it failed, and will be retried
	OutcomeArchived Outcome = "archived" // it failed for good
)

// A Run is one run of a handler, and what the handler did by its job (worker.FromContext). Refusals and Reserved are
// known only if meanwhile no other handler ran, and nothing was decided about another task.
type Run struct {
	Cancelled bool                // the handler gave the task's cost back
	Cost      map[string]int64    // of the task in the end, as settled, for the units that it named
	Decision  throttle.Decision   // by which it ran; zero if no policy counts the task
	End       time.Time           // when the handler returned; zero while it runs
	Err       error               // what it returned
	ID        string              // of the task
	Outcome   Outcome             // known by Worker.Run
	Refusals  []throttle.Refusal  // by upstreams, that it reported
	Reserved  []throttle.Decision // what it asked for in addition to its own cost, granted or denied
	Retried   int                 // how often the task had failed before
	Start     time.Time           // when the handler was called
	Task      *asynq.Task         // with its payload and headers
}

// A recorder records the runs of a worker.
type recorder struct {
	mu   sync.Mutex
	runs []*Run
}

// recorded returns a handler whose runs are recorded.
func (r *recorder) recorded(handler asynq.Handler) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) (err error) {
		run := r.begin(ctx, task)
		defer func() { // even if the handler panics
			r.mu.Lock()
			defer r.mu.Unlock()
			run.End, run.Err = time.Now(), err
		}()
		return handler.ProcessTask(ctx, task)
	})
}

func (r *recorder) begin(ctx context.Context, task *asynq.Task) *Run {
	run := &Run{Cost: map[string]int64{}, Start: time.Now(), Task: task}
	run.ID, _ = asynq.GetTaskID(ctx)
	run.Retried, _ = asynq.GetRetryCount(ctx)
	run.Decision, _ = worker.FromContext(ctx).Decision()
	maps.Copy(run.Cost, run.Decision.Reservation.Cost)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.runs = append(r.runs, run)
	return run
}

// observe records what handlers do.
func (r *recorder) observe(event any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch e := event.(type) {
	case throttle.Correction:
		for _, run := range r.runs {
			if id := run.Decision.Reservation.ID; id != "" && id == e.Reservation.ID {
				run.Cancelled = run.Cancelled || e.Cancelled
				maps.Copy(run.Cost, e.Cost)
			}
		}
	case throttle.Decision:
		if run := r.running(); run != nil {
			run.Reserved = append(run.Reserved, e)
		}
	case throttle.Refusal:
		run := r.running()
		if run == nil && len(r.runs) > 0 {
			run = r.runs[len(r.runs)-1] // it has returned RetryAfter
		}
		if run != nil {
			run.Refusals = append(run.Refusals, e)
		}
	}
}

// running returns the only run that has not ended, or nil. The lock is held.
func (r *recorder) running() (only *Run) {
	for _, run := range r.runs {
		if run.End.IsZero() {
			if only != nil {
				return nil
			}
			only = run
		}
	}
	return only
}

// copies returns copies of the recorder's runs after its first n: the runs of one task, or of all for the ID "".
func (r *recorder) copies(id string, n int) (runs []Run) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, run := range r.runs[n:] {
		if id == "" || run.ID == id {
			c := *run
			c.Cost = maps.Clone(c.Cost)
			c.Refusals, c.Reserved = slices.Clone(c.Refusals), slices.Clone(c.Reserved)
			runs = append(runs, c)
		}
	}
	return runs
}
