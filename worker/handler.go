package worker

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// askAgainForSlots is the shortest wait of a task whose handler was denied a slot that others hold.
const askAgainForSlots = time.Second

// An execution is one run of a task's handler, with what it holds.
type execution struct {
	caller   *throttle.Caller // as the handler's calls see the task; without a policy if none matches
	decision throttle.Decision
	limiter  *throttle.Limiter
	task     *throttle.Hold // of what the task itself took
	taskType string

	mu    sync.Mutex
	ended bool             // the handler has returned
	extra []*throttle.Hold // of what the handler reserved
}

type executionKey struct{}

// run runs the handler of a task that was granted, or that no policy matches. It returns the error
// by which the task fails, or a *throttle.DeniedError if it is to wait.
func (s *Server) run(
	ctx context.Context, a *attempt, task *asynq.Task, next asynq.Handler, request throttle.Request,
	d throttle.Decision,
) error {
	calls := request // those of the handler stand in no line
	calls.Front, calls.Key, calls.Ticket = false, "", throttle.Ticket{}
	e := &execution{caller: &throttle.Caller{Decision: d, Request: calls}, decision: d, limiter: s.config.Limiter, taskType: task.Type()}
	e.caller.SetCounted(request.Policy != "")
	ctx = throttle.WithCaller(context.WithValue(ctx, executionKey{}, e), e.caller)
	ctx, e.task = d.Reservation.Hold(ctx)
	err := func() error {
		defer s.end(e) // even if the handler panics
		return next.ProcessTask(ctx, task)
	}()
	lost := errors.Is(context.Cause(ctx), throttle.ErrLeaseLost)
	if err == nil || errors.Is(err, asynq.SkipRetry) || errors.Is(err, asynq.RevokeTask) {
		return err // the user's last word
	}
	return s.afterError(ctx, a, e, request, err, lost)
}

// afterError decides whether a task whose handler returned an error fails by it, or is to wait. The
// task's lease may have been lost meanwhile.
func (s *Server) afterError(
	ctx context.Context, a *attempt, e *execution, request throttle.Request, err error, lost bool,
) error {
	var refused *RefusedError
	var denied *throttle.DeniedError
	wait := func(policy string, d time.Duration) throttle.Decision {
		return throttle.Decision{At: time.Now(), Policy: policy, RetryIn: d, Tenant: request.Tenant}
	}
	retryIn, policy, callRefused := e.caller.Refusal()
	switch {
	case errors.As(err, &refused) && request.Policy == "":
		s.config.Logger.Warn("worker: RetryAfter in a task that no policy matches: the task fails", "type", e.taskType)
		return err
	case errors.As(err, &refused):
		after := known(refused.After)
		s.pause(ctx, e, after)
		if own, ok := s.config.Limiter.Lookup(request.Policy); ok {
			after = min(after, own.MaxPause)
		}
		return s.refused(ctx, a, request, request.Policy, after, err)
	case errors.As(err, &denied):
		return s.requeueAt(a, request, wait(denied.Decision.Policy, askAgainIn(denied.Decision)), err)
	case callRefused:
		return s.refused(ctx, a, request, policy, retryIn, err)
	case errors.Is(err, throttle.ErrUnavailable): // of a call that the handler wanted to make
		return s.unavailable(a, request, err)
	case lost: // the handler was stopped
		return s.requeueAt(a, request, wait(request.Policy, unavailableMin), err)
	}
	return err
}

// askAgainIn returns when to ask again for what was denied: before leases run out, as others may give
// slots back long before that.
func askAgainIn(d throttle.Decision) time.Duration {
	others, slots := askAgainForSlots, false
	for _, w := range d.Windows {
		if w.Algorithm.Leases() {
			slots = slots || w.Denied
		} else {
			others = max(others, w.RetryIn)
		}
	}
	if slots {
		return min(d.RetryIn, others)
	}
	return d.RetryIn
}

// end releases what a handler that has returned holds, and has the lines asked that may wait for
// it.
func (s *Server) end(e *execution) {
	e.mu.Lock()
	e.ended = true
	holds := append([]*throttle.Hold{e.task}, e.extra...)
	e.mu.Unlock()
	for _, h := range holds {
		reservation := h.Reservation()
		leases := reservation.Lease() > 0
		_ = h.Release(context.Background()) // else it runs out
		if leases {
			s.dispatch.Freed(s.lineOf(reservation.Request))
		}
	}
}

// wait waits for what the handler asks for, and keeps it.
func (e *execution) wait(ctx context.Context, request throttle.Request) (throttle.Reservation, error) {
	if deadline, ok := ctx.Deadline(); ok {
		request.MaxHold = max(0, time.Until(deadline))
	}
	ctx = throttle.WithCaller(ctx, e.caller) // which notes the slots that it holds
	d, err := e.limiter.Wait(ctx, request)
	if never := e.besideOwn(err); never != nil {
		err = never
	}
	if err != nil {
		return throttle.Reservation{}, err
	}
	if err := e.keep(ctx, d.Reservation); err != nil {
		return throttle.Reservation{}, err
	}
	return d.Reservation, nil
}

// besideOwn returns a *throttle.NeverFitsError if a denied request cannot fit beside the slots that
// the task itself holds. They are held for as long as its handler runs, so that neither a wait nor
// a requeue would help. Slots of the handler's own calls do not count: others of its goroutines may
// give them back.
func (e *execution) besideOwn(err error) error {
	var denied *throttle.DeniedError
	own := e.caller.Request
	if !errors.As(err, &denied) || !e.caller.Counted(denied.Request.Policy) {
		return nil
	}
	for _, w := range denied.Decision.Windows {
		if !w.Denied || !w.Algorithm.Leases() || !countsFor(w.Scope, own) {
			continue
		}
		held, cost := own.CostOf(w.Unit), denied.Request.CostOf(w.Unit)
		if held > 0 && held+cost > w.Limit {
			return &throttle.NeverFitsError{
				Policy: own.Policy, Window: w.Name, Unit: w.Unit, Cost: cost, Capacity: w.Limit, Held: held,
			}
		}
	}
	return nil
}

// countsFor reports whether a request is counted for this value of a scope.
func countsFor(scope throttle.ScopeValue, r throttle.Request) bool {
	for i, attribute := range scope.Attributes {
		value := r.Attributes[attribute]
		if attribute == throttle.TenantAttribute {
			value = r.Tenant
		}
		if value != scope.Values[i] {
			return false
		}
	}
	return true
}

// keep holds a reservation until the handler returns. If it has returned, the reservation is
// released.
func (e *execution) keep(ctx context.Context, reservation throttle.Reservation) error {
	if reservation.Lease() == 0 {
		return nil
	}
	_, hold := reservation.Hold(ctx)
	e.mu.Lock()
	ended := e.ended
	if !ended {
		e.extra = append(e.extra, hold)
	}
	e.mu.Unlock()
	if ended {
		_ = hold.Release(ctx) // else it runs out
		return errReturned
	}
	return nil
}
