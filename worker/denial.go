package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// A denied task's way back.
//
// The middleware notes as the outcome of the task's attempt that it waits, and returns no error. So asynq calls
// none of the user's functions, and is about to delete the task, or to complete it. The hook in the server's
// connection requeues the task in place of that call. It finds the attempt by the task's ID.
//
// This is safe because the hook lets no task go but those whose handler has returned: a call that ends
// another one is refused, and then asynq's recoverer finds the task. It requeues a denied task in place
// of any other script that names it, too, which a later asynq might send.
//
// If the task's time runs out while the limiter is asked, asynq goes on at once by the error of the
// task's context. It asks the user's IsFailure and RetryDelayFunc, and calls to retry or archive the
// task. The hook requeues it all the same, as a task about which nothing was decided.

// unavailableFor delays a task when the limiter cannot decide, to asynq's next whole second. Then it joins its line.
const unavailableFor = time.Second

// cleanUpTimeout bounds checks, and calls that must be made although the caller's context may have ended.
const cleanUpTimeout = 5 * time.Second

var errOutOfTime = errors.New("worker: the task's time ran out before the limiter had answered")

// noteWait notes that a task waits. The middleware then returns nil: an error would go to the user's ErrorHandler.
// The task goes back to its line if its ticket is there, or else waits until the decision allows another try. Then it
// joins its line, at the front if it had its turn. The cause is the error behind a denial, or nil.
func (s *Server) noteWait(a *attempt, m asynqredis.Message, r throttle.Request, d throttle.Decision, cause error) {
	a.outcome.Store(&outcome{waits: func(ctx context.Context) error {
		return s.requeue(ctx, s.wayBack(a, m, r, d, cause), d.Queued)
	}})
}

func (s *Server) wayBack(
	a *attempt, m asynqredis.Message, r throttle.Request, d throttle.Decision, cause error,
) asynqredis.RestoreOptions {
	now, after := time.Now(), max(d.EarliestReset(), time.Millisecond)
	if d.Queued {
		s.dispatch.Expect(s.lineOf(r), a.Queue, d.RetryIn)
		policy, _ := s.limiter.Lookup(d.Policy)
		after = dispatch.Fallback(policy, d.RetryIn)
	}
	at := asynqredis.WholeSecond(now.Add(after))
	reason := (&throttle.DeniedError{Cause: cause, Decision: d, Request: r}).Error()
	if d.Queued && d.RetryIn >= time.Second { // the text stays until then
		reason += ": expected to start at " + now.Add(d.RetryIn+time.Second-1).UTC().Format(time.RFC3339)
	}
	mark := ""
	switch {
	case r.Ticket == (throttle.Ticket{}): // it joins no line
	case r.Front && !d.Queued:
		mark = asynqredis.FrontMark
	default: // it can be picked by this mark when its ticket is taken
		mark = asynqredis.Mark(a.Message.JoinKey(), s.tasks.NewCall())
	}
	return asynqredis.RestoreOptions{
		Ref: a.Ref, Call: a.Call, At: at, Line: s.lineOf(r), Mark: mark, Message: m.WithDenial(reason, now),
	}
}

// lineOf returns the name of the line in which a request waits.
func (s *Server) lineOf(r throttle.Request) string {
	return s.limiter.LineOf(r.Policy, r.Tenant)
}

// noteUndecided logs that the limiter could not decide about a request, and returns the decision by which its
// task waits: it fails closed. The task may have joined the line all the same.
func (s *Server) noteUndecided(r throttle.Request, cause error) throttle.Decision {
	s.limiterLog.Failed(cause, "policy", r.Policy, "fails_open", false)
	d := undecidedDecision(r)
	s.limiter.Config().Observer(&throttle.DeniedError{Cause: cause, Decision: d, Request: r})
	return d
}

func undecidedDecision(r throttle.Request) throttle.Decision {
	return throttle.Decision{At: time.Now(), Policy: r.Policy, RetryIn: unavailableFor, Tenant: r.Tenant}
}

// reportErrors wraps the user's ErrorHandler. It is not called for a task that waits, whose time ran out.
func (s *Server) reportErrors(handler asynq.ErrorHandler) asynq.ErrorHandlerFunc {
	return func(ctx context.Context, task *asynq.Task, err error) {
		// A function of the user's that panics over a denial has a bug to report, though the task waits.
		if handler != nil && (!s.attempts.get(taskOf(ctx)).isWaiting() || asynq.IsPanicError(err)) {
			handler.HandleError(ctx, task, err)
		}
	}
}

// finish lets asynq's call end a task, unless the task is to wait.
func (s *Server) finish(
	ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call asynqredis.Call,
) error {
	a := s.attempts.get(call.Ref)
	ended := a.outcome.Load()
	if ended == nil {
		ended = &outcome{}
	}
	deletes := call.Verb == asynqredis.Done || call.Verb == asynqredis.Complete
	fails := call.Verb == asynqredis.Archive || call.Verb == asynqredis.Retry
	if fails && a.Call == "" { // asynq's recoverer has found it: its server died
		if back, err := s.tasks.Recover(ctx, call.Ref); back || err != nil {
			return reply(cmd, "OK", err)
		}
	}
	firing, index, member := asynqredis.FiringOf(call.Ref)
	if member && (deletes || call.Verb == asynqredis.Archive) {
		next = func(ctx context.Context, cmd redis.Cmder) error {
			return s.tasks.End(ctx, cmd, firing, index, time.Since(a.begun))
		}
	}
	var err error
	switch {
	case ended.waits != nil && call.Verb != asynqredis.Requeue: // that of a shutdown loses nothing
		err = reply(cmd, "OK", ended.waits(ctx))
	case call.Verb == asynqredis.Other:
		return next(ctx, cmd)
	case deletes && !ended.done:
		return reply(cmd, nil, fmt.Errorf("worker: task %s has not ended here: it stays", call.ID))
	default:
		if fails && s.isLate(a) {
			message, _ := call.Args[1].([]byte)
			call.Args[1] = []byte(asynqredis.Message(message).WithDeadline(a.Message.Deadline()))
		}
		a.releaseSlot()
		err = s.conclude(ctx, next, cmd)
	}
	if err == nil || asynqredis.IsNotFound(err) { // else asynq calls again, such as if Redis has lost its scripts
		if unused := s.attempts.end(a); unused.ID != "" {
			s.cancel(unused)
		}
	}
	return err
}

// requeue puts a denied task back to wait. It is repeated as asynq's own calls are.
func (s *Server) requeue(ctx context.Context, r asynqredis.RestoreOptions, queued bool) error {
	due := false
	err := s.repeat(ctx, func(ctx context.Context, _ bool) (err error) {
		due, err = s.tasks.Restore(ctx, r)
		return err
	})
	switch {
	case asynqredis.IsNotFound(err):
		return err
	case err != nil:
		return fmt.Errorf("worker: requeueing task %s, which was denied: %w", r.ID, err)
	case due: // its ticket was taken, and given up
		s.dispatch.WakeAt(r.Queue, time.Now())
	case !queued: // it comes back at that time, and by nothing else
		s.dispatch.WakeAt(r.Queue, r.At)
	}
	return nil
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
	for pause, again := (outage.Backoff{}), false; ; again = true {
		call, cancel := context.WithTimeout(ctx, cleanUpTimeout)
		err := do(call, again)
		cancel()
		if !ends || !asynqredis.IsOutage(err) {
			return err
		}
		pause.Fail(time.Now())
		select {
		case <-time.After(time.Until(pause.Until)):
		case <-ctx.Done():
			return err
		case <-s.shutdownGrace.Done():
			return err
		}
	}
}
