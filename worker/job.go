package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

var (
	// ErrNoJob is the error of a Job's methods when its context is not that of a handler in a
	// server of this package.
	ErrNoJob = errors.New("worker: the context is not that of a task's handler")

	errReturned = errors.New("worker: the task's handler has returned")
)

// An UnmatchedError says that no policy matches the type of a task. It may be misspelt.
type UnmatchedError struct {
	TaskType string
}

func (e *UnmatchedError) Error() string {
	return fmt.Sprintf("worker: no policy matches task type %q: name it in a policy's Match", e.TaskType)
}

// A Job is the task whose handler runs. Its methods may be called until the handler returns, by
// several goroutines at once. Their errors are ErrNoJob, an *UnmatchedError if no policy matches
// the task, and those of the reservation's own methods.
type Job struct {
	execution *execution // nil outside of a handler
}

// FromContext returns the job of a handler's context. It is never nil. In another context its
// methods return ErrNoJob.
func FromContext(ctx context.Context) *Job {
	e, _ := ctx.Value(executionKey{}).(*execution)
	return &Job{e}
}

// matched returns the job's execution, if a policy matches its task.
func (j *Job) matched() (*execution, error) {
	switch e := j.execution; {
	case e == nil:
		return nil, ErrNoJob
	case e.caller.Request.Policy == "":
		return nil, &UnmatchedError{TaskType: e.taskType}
	default:
		return e, nil
	}
}

// Decision returns the decision by which the task runs, and false if there is none, because no
// policy matches the task or the context is not that of a handler.
func (j *Job) Decision() (throttle.Decision, bool) {
	e, err := j.matched()
	if err != nil {
		return throttle.Decision{}, false
	}
	return e.decision, true
}

// Settle corrects the task's cost of a unit to what it really was, such as 900 or 4000 tokens where
// 1500 were estimated. An overestimate is given back at once. An underestimate is charged at once,
// even above the limit, and later tasks wait for it. Settle may be called again with a better
// figure.
func (j *Job) Settle(ctx context.Context, unit string, actual int64) error {
	e, err := j.matched()
	if err != nil {
		return err
	}
	return e.task.Settle(ctx, map[string]int64{unit: actual})
}

// Cancel gives back what the task took, as it did not make the call that it was for. That includes
// the task's slots in Concurrency windows.
func (j *Job) Cancel(ctx context.Context) error {
	e, err := j.matched()
	if err != nil {
		return err
	}
	if err := e.task.Cancel(ctx); err != nil {
		return err
	}
	e.caller.SetCounted(false)
	return nil
}

// Pause pauses the task's policy, as the upstream refuses calls for d, or for an unknown time if d
// is below a millisecond, as at 0 or below. It does so for the task's tenant or for all
// (throttle.Reservation.Pause). The task itself goes on. The limiter logs when a pause begins. The
// handler has dealt with the refusal then: an error that it returns fails the task.
func (j *Job) Pause(ctx context.Context, d time.Duration) error {
	e, err := j.matched()
	if err != nil {
		return err
	}
	e.caller.Answered(time.Now())
	r := e.task.Reservation()
	_, err = r.Pause(ctx, known(d), "")
	return err
}

// Reserve reserves more for the job, for a second call or by a second policy, and does not wait. A
// denial is a *throttle.DeniedError. The request's policy, tenant and attributes default to the
// task's own. A task that no policy matches must name a policy.
//
// A handler that returns the denial has its task requeued without burning a retry. When the
// denial's RetryIn is over the task joins the line of its own policy, at the front; after a second,
// if it was denied a slot that may be given back sooner. It then takes its own policy's cost again:
// call Cancel before you return, if its own call was not made.
//
// Slots of Concurrency windows are held until the handler returns, or until the reservation is
// released or cancelled. The error is a *throttle.NeverFitsError if the request cannot fit beside
// the slots that the task itself took. Other errors are throttle.Limiter.Wait's.
//
// A second call by the task's own policy belongs into the task's cost. A window of another
// algorithm whose limit is too small for both denies the second at every attempt.
func (j *Job) Reserve(ctx context.Context, r throttle.Request) (throttle.Reservation, error) {
	r.MaxWait = -1
	return j.Wait(ctx, r)
}

// Wait is Reserve, but a request that does not fit waits in line, as throttle.Limiter.Wait has it:
// until ctx ends, and for Request.MaxWait at most. It keeps the task's slot of the server busy
// meanwhile. If the task holds slots of Concurrency windows, and those that it would wait for may
// be held by others that wait for its own, it is denied at once.
func (j *Job) Wait(ctx context.Context, r throttle.Request) (throttle.Reservation, error) {
	e := j.execution
	if e == nil {
		return throttle.Reservation{}, ErrNoJob
	}
	task := e.caller.Request
	if r.Policy == "" {
		if _, err := j.matched(); err != nil {
			return throttle.Reservation{}, err
		}
		r.Policy = task.Policy
	}
	if r.Tenant == "" {
		r.Tenant = task.Tenant
	}
	if r.Attributes == nil {
		r.Attributes = task.Attributes
	}
	return e.wait(ctx, r)
}
