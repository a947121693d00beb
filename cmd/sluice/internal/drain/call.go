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

// call makes the call of a job that was granted, and gives its slot back. Then the job ends, or tries again.
func (d *Drain) call(beginning, calls context.Context, j *openJob, grant throttle.Decision) {
	defer func() { d.slots <- struct{}{} }()
	if err := d.noteBegun(calls, j, j.retries+1); err != nil { // a call without the note could be made too often
		d.Progress.Unanswered(err)
		_, _ = grant.Reservation.Cancel(calls)
		d.again(beginning, calls, j, againAfter)
		return
	}
	r := &j.result
	if r.StartedAt = time.Now(); r.Attempts == 0 {
		r.WaitedMS = r.StartedAt.Sub(d.begun).Milliseconds()
	}
	r.Attempts++
	caller := &throttle.Caller{Decision: grant, Request: j.request}
	held := grant.Reservation.Hold(throttle.WithCaller(calls, caller))
	var err error
	r.Status, r.Answer, err = d.Caller.Call(held, *j.job)
	leaseLost := errors.Is(context.Cause(held), throttle.ErrLeaseLost)
	_ = grant.Reservation.Release(calls) // if that fails, the lease expires
	var failure *call.Error
	retryIn, _, refused := caller.Refusal()
	switch {
	case err == nil:
		d.end(j, nil)
	case leaseLost && j.retries >= j.job.MaxRetry:
		d.end(j, fmt.Errorf("%w during the call, and no retry is left: the call may have been made", throttle.ErrLeaseLost))
	case leaseLost:
		j.retries++
		d.again(beginning, calls, j, 0)
	case !errors.As(err, &failure): // the call was stopped: the next run goes on
	case refused:
		if givenUp := j.noteRefusal(retryIn, err); givenUp != nil {
			d.end(j, givenUp)
			return
		}
		_ = d.noteBegun(calls, j, j.retries) // a refusal uses no retry
		d.again(beginning, calls, j, 0)      // the line waits for the end of the policy's pause
	case !failure.Retryable || j.retries >= j.job.MaxRetry:
		d.end(j, err)
	default:
		j.refusedSince = time.Time{}
		delay := call.RetryDelay(j.retries, failure)
		j.retries++
		d.again(beginning, calls, j, delay)
	}
}

// noteRefusal notes that the upstream refused the job's call. It returns an error if calls were refused for too long.
func (j *openJob) noteRefusal(retryIn time.Duration, cause error) error {
	now := time.Now()
	if j.refusedSince.IsZero() {
		j.refusedSince = now
	}
	limit := j.policy.MaxRefusedWait
	if limit == 0 || now.Add(retryIn).Sub(j.refusedSince) <= limit {
		return nil
	}
	return &worker.GivenUpError{
		Cause: cause, Limit: limit, Policy: j.policy.Name, Since: j.refusedSince, Tenant: j.job.Tenant,
	}
}
