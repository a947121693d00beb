package worker

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// ErrLeaseLost is the cause by which a handler's context ends when a slot of a Concurrency window could
// not be renewed in time, and may be somebody else's. If the handler then returns an error, the task is
// requeued without burning a retry.
var ErrLeaseLost = errors.New("worker: the lease of a concurrency window was lost")

// An execution is one run of a task's handler, with what it holds.
type execution struct {
	calls    *throttle.Job // whose calls the handler makes; its policy is "" if none matches the task
	decision throttle.Decision
	limiter  *throttle.Limiter
	taskType string

	cancelled atomic.Bool // what the task took was given back

	mu    sync.Mutex
	ended bool                 // the handler has returned
	extra []*lease             // of what the handler reserved
	task  throttle.Reservation // of the task itself, as it was settled last
}

type executionKey struct{}

// run runs the handler of a task that was granted, or that no policy matches. It returns the error by which
// the task fails, or a *DeniedError if it is to wait.
func (ad *Adapter) run(ctx context.Context, a *attempt, task *asynq.Task, next asynq.Handler, request throttle.Request, d throttle.Decision) error {
	calls := request // those of the handler stand in no line
	calls.Front, calls.Key, calls.Ticket = false, "", throttle.TicketID{}
	e := &execution{
		calls: &throttle.Job{Request: calls}, decision: d, limiter: ad.config.Limiter, task: d.Reservation, taskType: task.Type(),
	}
	ctx = throttle.WithJob(context.WithValue(ctx, executionKey{}, e), e.calls)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	held := keepLease(ctx, ad.config.Limiter, e.task, func(refused bool) {
		if refused { // perhaps by a Cancel that is under way
			e.mu.Lock()
			defer e.mu.Unlock()
		}
		if !e.cancelled.Load() {
			cancel(ErrLeaseLost)
		}
	})
	err := func() error {
		defer func() { // also if the handler panics
			ad.release(held)
			for _, l := range e.end() {
				ad.release(l)
			}
		}()
		return next.ProcessTask(ctx, task)
	}()
	if err == nil || errors.Is(err, asynq.SkipRetry) || errors.Is(err, asynq.RevokeTask) {
		return err // the user's last word
	}
	return ad.afterError(ctx, a, e, request, err)
}

// afterError decides whether a task whose handler returned an error fails by it, or is to wait.
func (ad *Adapter) afterError(ctx context.Context, a *attempt, e *execution, request throttle.Request, err error) error {
	var refused *RefusedError
	var denied *throttle.DeniedError
	wait := func(policy string, d time.Duration) throttle.Decision {
		return throttle.Decision{At: time.Now(), Policy: policy, RetryIn: d, Tenant: request.Tenant}
	}
	retryIn, policy, callRefused := e.calls.Refusal()
	switch {
	case errors.As(err, &refused) && request.Policy == "":
		ad.config.Logger.Warn("worker: RetryAfter in a task that no policy matches: the task fails", "type", e.taskType)
		return err
	case errors.As(err, &refused):
		ad.pause(ctx, e, refused.After)
		return ad.requeueFront(ctx, a, request, wait(request.Policy, refused.After), err)
	case errors.As(err, &denied):
		return ad.requeueAt(a, wait(denied.Decision.Policy, denied.Decision.RetryIn), err)
	case callRefused && policy == request.Policy:
		return ad.requeueFront(ctx, a, request, wait(policy, retryIn), err)
	case callRefused:
		return ad.requeueAt(a, wait(policy, retryIn), err)
	case errors.Is(err, throttle.ErrUnavailable): // of a call that the handler wanted to make
		return ad.unavailable(a, request, err)
	case errors.Is(context.Cause(ctx), ErrLeaseLost):
		return ad.requeueAt(a, wait(request.Policy, unavailableMin), err)
	}
	return err
}

// pause passes on the upstream's refusal, also if the task's own time has run out.
func (ad *Adapter) pause(ctx context.Context, e *execution, d time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	if err := (&Job{e}).Pause(ctx, d); err != nil && !isInvalid(err) {
		ad.outages.failed(err, "policy", e.calls.Request.Policy)
	}
}

// release ends a lease, and has the line asked that may wait for its slot.
func (ad *Adapter) release(l *lease) {
	if l != nil {
		l.release()
		ad.dispatcher().Freed(l.reservation.Policy)
	}
}

// end marks the handler as returned, and returns the leases of what it reserved.
func (e *execution) end() []*lease {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = true
	return e.extra
}

// A handler that waits asks again when the request is expected to fit, and before that every askAgain,
// as limits may be raised and units given back. For a slot that somebody holds it asks every
// askForSlot.
const (
	askAgain   = time.Second
	askForSlot = 100 * time.Millisecond
)

// reserve reserves for the handler, and waits for it up to maxWait.
func (e *execution) reserve(ctx context.Context, request throttle.Request, maxWait time.Duration) (throttle.Reservation, error) {
	if deadline, ok := ctx.Deadline(); ok {
		maxWait = min(maxWait, time.Until(deadline))
		request.HoldFor = max(0, time.Until(deadline))
	}
	end := time.Now().Add(maxWait)
	for {
		d, err := e.limiter.Reserve(ctx, request)
		if err != nil {
			return throttle.Reservation{}, err
		}
		if d.Granted {
			if err := e.keep(ctx, d.Reservation); err != nil {
				return throttle.Reservation{}, err
			}
			return d.Reservation, nil
		}
		left := time.Until(end)
		if left <= 0 || left < d.RetryIn && !d.MayBeSooner() {
			return throttle.Reservation{}, &throttle.DeniedError{Decision: d, Request: request}
		}
		again := askAgain
		if d.MayBeSooner() {
			again = askForSlot
		}
		select {
		case <-time.After(min(max(d.RetryIn, time.Millisecond), left, again)):
		case <-ctx.Done():
			return throttle.Reservation{}, context.Cause(ctx)
		}
	}
}

// keep renews a reservation's lease until the handler returns. If it has returned, the lease is released.
func (e *execution) keep(ctx context.Context, reservation throttle.Reservation) error {
	if e.limiter.Lease(reservation) == 0 {
		return nil
	}
	kept := keepLease(ctx, e.limiter, reservation, func(bool) {})
	e.mu.Lock()
	ended := e.ended
	if !ended {
		e.extra = append(e.extra, kept)
	}
	e.mu.Unlock()
	if ended {
		kept.release()
		return errReturned
	}
	return nil
}

// A lease keeps the slots of a reservation in Concurrency windows.
type lease struct {
	limiter     *throttle.Limiter
	reservation throttle.Reservation
	stop        func()
}

// keepLease renews until release. Without a Concurrency window it returns nil.
func keepLease(ctx context.Context, limiter *throttle.Limiter, reservation throttle.Reservation, lost func(refused bool)) *lease {
	if limiter.Lease(reservation) == 0 {
		return nil
	}
	return &lease{limiter, reservation, limiter.KeepRenewing(ctx, reservation, lost)}
}

// release ends the renewals, and then the lease.
func (l *lease) release() {
	l.stop()
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()
	_ = l.limiter.Release(ctx, l.reservation) // else it runs out
}
