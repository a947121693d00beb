package worker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// A denied task's way back.
//
// The middleware notes with the task's attempt that it waits, and returns no error. So asynq calls none of
// the user's functions, and is about to delete the task, or to complete it. The hook in the server's
// connection requeues the task in place of that call. It finds the attempt by the task's ID.
//
// This is safe because the hook lets no task go but those whose handler has returned: a call that ends
// another one is refused, and then asynq's recoverer finds the task. It requeues a denied task in place
// of any other script that names it, too, as those of an asynq to come might.
//
// If the task's time runs out while the limiter is asked, asynq goes on at once by the error of the
// task's context. It asks the user's IsFailure and RetryDelayFunc, and calls to retry or archive the
// task. The hook requeues it all the same.

// Requeues of tasks about which the limiter could not decide are spread over this range, so that
// they do not all come back at once. Asynq's whole seconds make the longest 3 s.
const (
	unavailableMin = time.Second
	unavailableMax = 1500 * time.Millisecond
)

// Pauses between attempts to requeue while asynq's Redis does not answer.
const (
	requeuePauseMin = 50 * time.Millisecond
	requeuePauseMax = 2 * time.Second
)

// cleanUpTimeout bounds calls that must be made although the caller's context, or the task's own time, may
// have ended. It also bounds checks.
const cleanUpTimeout = 5 * time.Second

var errOutOfTime = errors.New("worker: the task's time ran out before the limiter had answered")

// wait notes that a task waits: in line if its ticket is there, or else until the decision allows another
// try. The mark is that of the task's join. The cause is the error behind a denial, or nil. Asynq is told of
// no error, as no function of the user's has to know of it.
func (s *Server) wait(a *attempt, r throttle.Request, d throttle.Decision, mark string, cause error) error {
	after := max(d.EarliestReset(), time.Millisecond)
	if d.Queued {
		s.dispatch.Expect(s.lineOf(r), a.Queue, d.RetryIn)
		policy, _ := s.config.Limiter.Lookup(d.Policy)
		after = dispatch.Fallback(policy, d.RetryIn)
	}
	retryAt := asynqredis.WholeSecond(time.Now().Add(after))
	s.attempts.note(a, &throttle.DeniedError{Cause: cause, Decision: d, Request: r, RetryAt: retryAt}, mark)
	return nil
}

// lineOf returns the name of the line in which a request waits.
func (s *Server) lineOf(r throttle.Request) string {
	return s.config.Limiter.LineOf(r.Policy, r.Tenant)
}

// mark returns the mark by which the task of an attempt can be picked when its ticket is taken, "" if
// it waits without one.
func (s *Server) mark(a *attempt, r throttle.Request) string {
	if r.Ticket == (throttle.Ticket{}) {
		return ""
	}
	return asynqredis.Mark(a.message.JoinKey(), s.asynq.Call())
}

// unavailable notes that a task waits about which the limiter could not decide: it fails closed. The
// task may have joined the line all the same.
func (s *Server) unavailable(a *attempt, r throttle.Request, cause error) error {
	s.notDecided(r, cause)
	return s.wait(a, r, undecided(r), s.mark(a, r), cause)
}

func (s *Server) notDecided(r throttle.Request, cause error) {
	s.limiter.Failed(cause, "policy", r.Policy, "fails", "closed")
	s.config.Limiter.Config().Observer.Unavailable(r.Policy, r.Tenant, cause)
}

func undecided(r throttle.Request) throttle.Decision {
	in := unavailableMin + rand.N(unavailableMax-unavailableMin)
	return throttle.Decision{At: time.Now(), Policy: r.Policy, RetryIn: in, Tenant: r.Tenant}
}

// reportErrors wraps the user's ErrorHandler. It is not called for a task that waits, whose time ran out.
func (s *Server) reportErrors(handler asynq.ErrorHandler) asynq.ErrorHandlerFunc {
	return func(ctx context.Context, task *asynq.Task, err error) {
		a, _ := s.attempts.get(taskOf(ctx))
		// A function of the user's that panics over a denial has a bug to report, though the task waits.
		if handler != nil && (a.denied == nil || asynq.IsPanicError(err)) {
			handler.HandleError(ctx, task, err)
		}
	}
}

// finish lets asynq's call end a task, unless the task was denied.
func (s *Server) finish(
	ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call asynqredis.Call,
) error {
	ended, a := s.attempts.get(call.Ref)
	switch firing, position, member := asynqredis.FiringOf(call.Ref); {
	case !member:
	case call.Verb == asynqredis.Done, call.Verb == asynqredis.Complete, call.Verb == asynqredis.Archive:
		took := time.Duration(0)
		if !ended.begun.IsZero() {
			took = time.Since(ended.begun)
		}
		next = func(ctx context.Context, cmd redis.Cmder) error {
			return s.asynq.End(ctx, cmd, firing, position, took)
		}
	}
	var err error
	switch {
	case ended.denied != nil && call.Verb != asynqredis.Requeue: // that of a shutdown loses nothing
		err = reply(cmd, "OK", s.requeue(ctx, ended))
	case call.Verb == asynqredis.Other:
		return next(ctx, cmd)
	case (call.Verb == asynqredis.Done || call.Verb == asynqredis.Complete) && !ended.done:
		return reply(cmd, nil, fmt.Errorf("worker: task %s has not ended here: it stays", call.ID))
	default:
		if (call.Verb == asynqredis.Archive || call.Verb == asynqredis.Retry) && s.isLate(&ended) {
			message, _ := call.Args[1].([]byte)
			call.Args[1] = []byte(asynqredis.Message(message).WithDeadline(ended.message.Deadline()))
		}
		ended.free()
		err = s.conclude(ctx, next, cmd)
	}
	if err == nil || asynqredis.IsNotFound(err) { // else asynq calls again, such as if Redis has lost its scripts
		s.attempts.end(call.Ref, a)
	}
	return err
}

// requeue puts a denied task back to wait. It is repeated as asynq's own calls are.
func (s *Server) requeue(ctx context.Context, a attempt) error {
	now, reason := time.Now(), a.denied.Error()
	if d := a.denied.Decision; d.Queued && d.RetryIn >= time.Second { // the text stays until then
		reason += ": expected to start at " + now.Add(d.RetryIn+time.Second-1).UTC().Format(time.RFC3339)
	}
	r := asynqredis.Restored{
		Queue: a.Queue, Call: a.call, Message: a.message.WithDenial(reason, now),
		At: a.denied.RetryAt, Line: s.lineOf(a.denied.Request), Mark: a.mark,
	}
	due := false
	err := s.repeat(ctx, func(ctx context.Context, _ bool) (err error) {
		due, err = s.asynq.Requeue(ctx, r, a.ID)
		return err
	})
	switch {
	case err == nil && due: // its ticket was taken, and given up
		s.dispatch.WakeAt(a.Queue, now)
		return nil
	case err == nil:
		if !a.denied.Decision.Queued { // it comes back at that time, and by nothing else
			s.dispatch.WakeAt(a.Queue, r.At)
		}
		return nil
	case asynqredis.IsNotFound(err):
		return err
	}
	return fmt.Errorf("worker: requeueing task %s, which was denied: %w", a.ID, err)
}

// conclude makes the call by which asynq ends a task. Asynq's own repetition uses a context that
// has ended, and never succeeds: the task would stay active, and asynq's recoverer would take one
// of its retries.
func (s *Server) conclude(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd) error {
	return s.repeat(ctx, func(ctx context.Context, again bool) error {
		cmd.SetErr(nil)
		err := next(ctx, cmd)
		if again && asynqredis.IsNotFound(err) { // a call before has arrived
			return reply(cmd, "OK", nil)
		}
		return err
	})
}

// repeat makes a call that ends an attempt. While asynq's Redis is out, as during a failover, it is
// repeated until the context ends, which asynq's does with the task's lease, or the server's
// shutdown waits no longer. A call of asynq's recoverer is not: it comes again.
func (s *Server) repeat(ctx context.Context, do func(ctx context.Context, again bool) error) error {
	_, ends := ctx.Deadline()
	for pause, again := requeuePauseMin, false; ; pause, again = min(2*pause, requeuePauseMax), true {
		call, cancel := context.WithTimeout(ctx, cleanUpTimeout)
		err := do(call, again)
		cancel()
		if !ends || !asynqredis.IsOutage(err) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		case <-s.shutdownGrace.Done():
			return err
		}
	}
}
