package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

var (
	// ErrNoJob is the error of a Job's methods when its context is not a handler's in a server of this package.
	ErrNoJob = errors.New("worker: the context is not that of a task's handler")

	// ErrUnmatched is wrapped by an error that names a task's type, which may be misspelt.
	ErrUnmatched = errors.New("no policy matches it: name it in a policy's Match")

	errReturned = errors.New("worker: the task's handler has returned")
)

func unmatchedError(taskType string) error {
	return fmt.Errorf("worker: task type %q: %w", taskType, ErrUnmatched)
}

// A Job is the task whose handler runs. Its methods may be called until the handler returns, by several goroutines at
// once. Errors are ErrNoJob, ErrUnmatched if no policy matches the task, and the errors of Reservation's methods.
type Job struct {
	caller   *throttle.Caller // identifies the task to the handler's calls; nil outside of a handler
	limiter  *throttle.Limiter
	lost     context.CancelCauseFunc // ends the handler's context when a slot is lost
	settling sync.Mutex
	settled  throttle.Reservation // of the task, with the costs settled last, which Redis forgets when they count no more
	taskType string

	mu    sync.Mutex
	ended bool                   // the handler has returned
	extra []throttle.Reservation // with leases, made by the handler
}

type jobKey struct{}

// FromContext returns the job of a handler's context. It is never nil. In another context its methods return ErrNoJob.
func FromContext(ctx context.Context) *Job {
	if j, ok := ctx.Value(jobKey{}).(*Job); ok {
		return j
	}
	return &Job{}
}

// matched returns an error unless a policy counts the job's task.
func (j *Job) matched() error {
	switch {
	case j.caller == nil:
		return ErrNoJob
	case j.caller.Request.Policy == "":
		return unmatchedError(j.taskType)
	}
	return nil
}

// Decision returns the decision that granted the task; false if no policy counts it, or ctx is not a handler's.
func (j *Job) Decision() (throttle.Decision, bool) {
	if j.matched() != nil {
		return throttle.Decision{}, false
	}
	return j.caller.Decision, true
}

// Settle corrects the task's cost of a unit to the real one, such as 900 or 4000 tokens where 1500 were estimated.
// What was estimated too much is given back at once. What was estimated too little is charged at once, even above the
// limit, and later tasks wait for it. Settle may be called again with a better figure.
func (j *Job) Settle(ctx context.Context, unit string, actual int64) error {
	if err := j.matched(); err != nil {
		return err
	}
	j.settling.Lock()
	defer j.settling.Unlock()
	var err error
	j.settled, err = j.settled.Settle(ctx, map[string]int64{unit: actual})
	return err
}

// Cancel gives back what the task took, with slots of Concurrency windows, because it has not made its call.
func (j *Job) Cancel(ctx context.Context) error {
	if err := j.matched(); err != nil {
		return err
	}
	return j.caller.Cancel(ctx)
}

// Pause pauses the task's policy because the upstream refuses calls for d, or for an unknown time if d is below a
// millisecond: for the task's tenant or for all (throttle.Reservation.Pause), even if ctx has ended. The limiter logs
// when a pause begins. The task goes on, and an error of its handler then fails it, unless that is a RetryAfter, a
// denial or throttle.ErrUnavailable, or a slot was lost, or the upstream of another policy has refused.
func (j *Job) Pause(ctx context.Context, d time.Duration) error {
	if err := j.matched(); err != nil {
		return err
	}
	j.caller.Answered(j.caller.Request.Policy, time.Now())
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	_, err := j.caller.Decision.Reservation.Pause(ctx, d, "")
	return err
}

// Reserve reserves more for the job, for another call or by another policy, without a wait. A denial is a
// *throttle.DeniedError. Policy, tenant and attributes default to the task's; without a match Policy is required.
//
// If a handler returns the denial its task is requeued, and keeps its retries. After the denial's RetryIn the task
// joins the line of its own policy, at the front; or after a second, if it was denied a slot that may be given back
// sooner. It then takes its own policy's cost again: call Cancel before you return, if its own call was not made.
//
// Slots of Concurrency windows are held until the handler returns, or Release or Cancel. The error is a
// *throttle.RequestError if the request cannot fit beside the task's own slots. Other errors are Limiter.Wait's.
//
// A second call by the task's own policy belongs in the task's cost. A window that is no Concurrency
// window, and whose limit is too small for both calls, denies the second one at every attempt.
func (j *Job) Reserve(ctx context.Context, r throttle.Request) (throttle.Reservation, error) {
	r.MaxWait = -1
	return j.Wait(ctx, r)
}

// Wait is Reserve, but a request that does not fit waits in line, as throttle.Limiter.Wait has it: until ctx ends,
// and for Request.MaxWait at most. It keeps the task's slot of the server busy meanwhile. A request is denied at once
// if it would wait for slots of Concurrency windows whose holders may wait for slots that this task holds.
func (j *Job) Wait(ctx context.Context, r throttle.Request) (throttle.Reservation, error) {
	if j.caller == nil {
		return throttle.Reservation{}, ErrNoJob
	}
	task := j.caller.Request
	if r.Policy == "" {
		if err := j.matched(); err != nil {
			return throttle.Reservation{}, err
		}
		r.Policy = task.Policy
	}
	r.Tenant = cmp.Or(r.Tenant, task.Tenant)
	if r.Attributes == nil {
		r.Attributes = task.Attributes
	}
	if deadline, ok := ctx.Deadline(); ok && r.MaxHold == 0 {
		r.MaxHold = max(0, time.Until(deadline))
	}
	ctx = throttle.WithCaller(ctx, j.caller) // by which Wait finds the job's slots
	d, err := j.limiter.Wait(ctx, r)
	if err = cmp.Or(j.neverFits(err), err); err == nil {
		err = j.keep(ctx, d.Reservation)
	}
	if err != nil {
		return throttle.Reservation{}, err
	}
	return d.Reservation, nil
}

// neverFits returns a *throttle.RequestError if a denied request cannot fit while the task itself holds its
// slots. The task holds them until its handler returns, so neither a wait nor a requeue would help. The slots of the
// handler's calls do not count, as other goroutines of the handler may give them back.
func (j *Job) neverFits(err error) error {
	var denied *throttle.DeniedError
	task := j.caller.Request
	if !errors.As(err, &denied) || !j.caller.Counted(denied.Request.Policy) {
		return nil
	}
	for _, w := range denied.Decision.Windows {
		held, cost := task.CostOf(w.Unit), denied.Request.CostOf(w.Unit)
		isTasksOwn := slices.ContainsFunc(j.caller.Decision.Windows, func(window throttle.WindowState) bool {
			return window.Name == w.Name && window.Scope.String() == w.Scope.String()
		})
		deniesSlots, neverFree := w.Denied && w.Algorithm.Leases(), held > 0 && held+cost > w.Limit
		if isTasksOwn && deniesSlots && neverFree {
			hint := fmt.Sprintf("never fits beside the %d that the job holds: the window grants %d at most", held, w.Limit)
			return &throttle.RequestError{
				Policy: task.Policy, Window: w.Name, Field: "cost " + w.Unit, Value: cost, Hint: hint,
			}
		}
	}
	return nil
}

// keep holds a reservation until the handler returns, or releases it if the handler has returned.
func (j *Job) keep(ctx context.Context, reservation throttle.Reservation) error {
	if reservation.Lease() == 0 {
		return nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended {
		_ = reservation.Release(ctx) // if that fails, the lease expires
		return errReturned
	}
	held := reservation.Hold(context.WithoutCancel(ctx))
	context.AfterFunc(held, func() {
		if errors.Is(context.Cause(held), throttle.ErrLeaseLost) { // else it was released
			j.lost(throttle.ErrLeaseLost)
		}
	})
	j.extra = append(j.extra, reservation)
	return nil
}
