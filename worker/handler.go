package worker

import (
	"context"
	"errors"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// askAgainForSlots is the shortest wait of a task whose handler was denied a slot that others hold.
const askAgainForSlots = time.Second

// run runs the handler of a task that was granted, or that no policy matches. It returns the error
// by which the task fails, and nil if it is to wait.
func (s *Server) run(ctx context.Context, a *attempt, request throttle.Request, d throttle.Decision) error {
	calls := request // those of the handler stand in no line
	calls.Front, calls.Key, calls.Ticket = false, "", throttle.Ticket{}
	caller := &throttle.Caller{Decision: d, Request: calls}
	caller.SetCounted(request.Policy != "")
	j := &Job{caller: caller, limiter: s.config.Limiter, task: d.Reservation, taskType: a.task.Type()}
	ctx = throttle.WithCaller(context.WithValue(ctx, jobKey{}, j), j.caller)
	ctx = j.task.Hold(ctx)
	err := func() error {
		defer s.end(j) // even if the handler panics
		return a.handler.ProcessTask(ctx, a.task)
	}()
	lost := errors.Is(context.Cause(ctx), throttle.ErrLeaseLost)
	if err == nil || errors.Is(err, asynq.SkipRetry) || errors.Is(err, asynq.RevokeTask) {
		return err // the user's last word
	}
	return s.afterError(ctx, a, j, request, err, lost)
}

// afterError decides whether a task whose handler returned an error fails by it, or is to wait. The
// task's lease may have been lost meanwhile.
func (s *Server) afterError(
	ctx context.Context, a *attempt, j *Job, request throttle.Request, err error, lost bool,
) error {
	var refused *RefusedError
	var denied *throttle.DeniedError
	wait := func(policy string, in time.Duration) error { // it joins the line of its own policy, at the front
		d := throttle.Decision{At: time.Now(), Policy: policy, RetryIn: in, Tenant: request.Tenant}
		return s.wait(a, request, d, asynqredis.FrontMark, err)
	}
	retryIn, policy, callRefused := j.caller.Refusal()
	switch {
	case errors.As(err, &refused) && request.Policy == "":
		const warning = "worker: RetryAfter in a task that no policy matches: the task fails"
		s.config.Logger.Warn(warning, "type", j.taskType)
		return err
	case errors.As(err, &refused):
		after := known(refused.After)
		s.pause(ctx, j, after)
		if policy, ok := s.config.Limiter.Lookup(request.Policy); ok {
			after = min(after, policy.MaxPause)
		}
		return s.refused(ctx, a, request, request.Policy, after, err)
	case errors.As(err, &denied):
		return wait(denied.Decision.Policy, askAgainIn(denied.Decision))
	case callRefused:
		return s.refused(ctx, a, request, policy, retryIn, err)
	case errors.Is(err, throttle.ErrUnavailable): // of a call that the handler wanted to make
		return s.unavailable(a, request, err)
	case lost: // the handler was stopped
		return wait(request.Policy, unavailableMin)
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
func (s *Server) end(j *Job) {
	j.mu.Lock()
	j.ended = true
	held := append([]throttle.Reservation{j.task}, j.extra...)
	j.mu.Unlock()
	for _, reservation := range held {
		if reservation.Lease() > 0 {
			_ = reservation.Release(context.Background()) // else it runs out
			s.dispatch.Freed(s.lineOf(reservation.Request))
		}
	}
}
