package drain

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// call makes the call of a job that was granted. Then the job ends, or tries again.
func (d *Drain) call(ctx, calls context.Context, w *openJob, grant throttle.Decision) {
	defer func() { d.slots <- struct{}{} }()
	if err := d.noteBegun(calls, w, w.used+1); err != nil { // a call without the note could be made too often
		d.Progress.Unanswered(err)
		_, _ = grant.Reservation.Cancel(calls)
		d.again(ctx, calls, w, againAfter)
		return
	}
	r := &w.result
	if r.StartedAt = time.Now(); r.Attempts == 0 {
		r.WaitedMS = r.StartedAt.Sub(d.begun).Milliseconds()
	}
	r.Attempts++
	caller := &throttle.Caller{Decision: grant, Request: w.request}
	held := grant.Reservation.Hold(throttle.WithCaller(calls, caller))
	var err error
	r.Status, r.Answer, err = d.Caller.Call(held, *w.job)
	leaseLost := errors.Is(context.Cause(held), throttle.ErrLeaseLost)
	_ = grant.Reservation.Release(calls) // if that fails, the lease expires
	var failure *call.Error
	retryIn, _, refused := caller.Refusal()
	switch {
	case err == nil:
		d.end(w, nil)
	case leaseLost && w.used >= w.job.MaxRetry:
		d.end(w, fmt.Errorf("%w during the call, and no retry is left: the call may have been made", throttle.ErrLeaseLost))
	case leaseLost:
		w.used++
		d.again(ctx, calls, w, 0)
	case !errors.As(err, &failure): // the call was stopped: the next run goes on
	case refused:
		if givenUp := w.noteRefusal(retryIn, err); givenUp != nil {
			d.end(w, givenUp)
			return
		}
		_ = d.noteBegun(calls, w, w.used) // a refusal uses no retry
		d.again(ctx, calls, w, 0)         // the line waits for the end of the policy's pause
	case !failure.Retryable || w.used >= w.job.MaxRetry:
		d.end(w, err)
	default:
		w.refusedSince = time.Time{}
		delay := call.RetryDelay(w.used, failure)
		w.used++
		d.again(ctx, calls, w, delay)
	}
}

// noteRefusal notes that the upstream refused the job's call. It returns an error if calls were refused for too long.
func (w *openJob) noteRefusal(retryIn time.Duration, cause error) error {
	now := time.Now()
	if w.refusedSince.IsZero() {
		w.refusedSince = now
	}
	limit := w.policy.MaxRefusedWait
	if limit == 0 || now.Add(retryIn).Sub(w.refusedSince) <= limit {
		return nil
	}
	return &worker.GivenUpError{
		Cause: cause, Limit: limit, Policy: w.policy.Name, Since: w.refusedSince, Tenant: w.job.Tenant,
	}
}
