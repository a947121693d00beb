package drain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// decided counts what the throttle decided of one task that a worker picked up.
func (d *Drain) decided(ctx context.Context, _ *asynq.Task, decision throttle.Decision) {
	id, _ := asynq.GetTaskID(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts.Dequeues++
	if !decision.Granted {
		d.counts.Denials++
	}
	if r := d.open[id]; r != nil {
		r.Wakes++
	}
}

// process is asynq's handler of a task that got through.
func (d *Drain) process(ctx context.Context, t *asynq.Task) error {
	id, _ := asynq.GetTaskID(ctx)
	job := d.jobs[id] // as the file has it by now
	if job == nil {
		return fmt.Errorf("the jobs hold no %q any more: %w", id, asynq.RevokeTask)
	}
	var p payload
	if err := json.Unmarshal(t.Payload(), &p); err != nil {
		return fmt.Errorf("payload of job %q: %w", id, err)
	}
	r, open := d.begin(id, p)
	if !open {
		return nil // it has its line, and asynq did not come to know
	}
	var err error
	r.Status, r.Answer, err = d.Caller.Call(ctx, *job)
	if err == nil {
		return d.write(r)
	}
	r.Error = err.Error()
	var failure *call.Error
	switch {
	case !errors.As(err, &failure):
		return err // the task was taken away, and runs again
	case !failure.Retryable:
		err = fmt.Errorf("%w: %w", err, asynq.SkipRetry)
	case refused(ctx): // all calls by the policy pause, and the job keeps its retries
		d.note(r)
		return err
	case mayRetry(ctx):
		return err
	}
	return errors.Join(err, d.write(r))
}

// refused reports whether the upstream refused the job's call.
func refused(ctx context.Context) bool {
	_, _, refused := throttle.CallerFrom(ctx).Refusal()
	return refused
}

// note keeps what the last call of a job brought, as the job may be given up by it.
func (d *Drain) note(r jobs.Result) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if open := d.open[r.ID]; open != nil {
		r.Error = ""
		*open = r
	}
}

// HandleError is asynq's ErrorHandler. It writes the result of a job that the upstream refused too
// often.
func (d *Drain) HandleError(ctx context.Context, _ *asynq.Task, err error) {
	var given *worker.GivenUpError
	if !errors.As(err, &given) {
		return
	}
	id, _ := asynq.GetTaskID(ctx)
	d.mu.Lock()
	open := d.open[id]
	var r jobs.Result
	if open != nil {
		r = *open
	}
	d.mu.Unlock()
	if open == nil {
		return
	}
	r.Error = given.Error()
	if err := d.write(r); err != nil {
		d.Progress.Say("job %q: %v", id, err)
	}
}

func mayRetry(ctx context.Context) bool {
	retried, _ := asynq.GetRetryCount(ctx)
	most, _ := asynq.GetMaxRetry(ctx)
	return retried < most
}

// begin notes that a call begins, and returns the result so far.
func (d *Drain) begin(id string, p payload) (begun jobs.Result, open bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.open[id]
	if r == nil {
		return jobs.Result{}, false
	}
	r.StartedAt = time.Now()
	if r.Attempts == 0 {
		r.WaitedMS = r.StartedAt.Sub(p.EnqueuedAt).Milliseconds()
	}
	r.Attempts++
	return *r, true
}

// write adds the result to the log, unless it is there.
func (d *Drain) write(r jobs.Result) error {
	added, err := d.Results.Add(r)
	if err != nil {
		d.breakOff(err)
	}
	if err != nil || !added || d.jobs[r.ID] == nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, r.ID)
	d.counts.ended(r)
	if len(d.open) == 0 {
		close(d.done)
	}
	return nil
}
