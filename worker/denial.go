package worker

import (
	"context"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// How a denied task goes back to asynq's scheduled tasks. Its ticket is in line by then, unless it could not join.
//
// The middleware notes in the task's attempt that the task waits, and returns no error. So asynq calls none of the
// user's functions, and sends a call that deletes or completes the task. The hook in the server's connection
// requeues the task instead of that call. It finds the attempt by the task's Ref.
//
// This is safe because the hook lets such a call pass only if the task's handler has returned, or the task is revoked.
// Otherwise it refuses the call, and asynq's recoverer finds the task. If a later asynq ends tasks by other scripts, the
// hook requeues a denied task instead of those, too.
//
// If the task's time runs out while the limiter is asked, asynq at once calls the user's IsFailure and RetryDelayFunc,
// and sends a call that retries or archives the task. The hook waits for the answer, and then requeues the task.

// unavailableFor delays a task if the limiter cannot decide. Then, at asynq's next whole second, it joins its line.
const unavailableFor = time.Second

// cleanUpTimeout bounds checks of a Redis, and calls that must be made even if the caller's context has ended.
const cleanUpTimeout = 5 * time.Second

// noteWait notes that a task waits. The middleware then returns nil, as an error would go to the user's ErrorHandler.
// If the task's ticket is in line, a take picks it up. Otherwise it waits until the decision allows another try, and
// then joins its line, at the front if it had its turn before. The cause of a denial may be nil.
func (s *Server) noteWait(a *attempt, m asynqredis.Message, r throttle.Request, d throttle.Decision, cause error) {
	a.outcome.Store(&outcome{requeue: func(ctx context.Context) error {
		return s.requeue(ctx, s.restoreOptions(a, m, r, d, cause), !d.Queued)
	}})
}

// restoreOptions returns how the task goes back. It also calls Expect: this server asks its line in time.
func (s *Server) restoreOptions(
	a *attempt, m asynqredis.Message, r throttle.Request, d throttle.Decision, cause error,
) asynqredis.RestoreOptions {
	now := time.Now()
	after := max(d.EarliestReset(), time.Millisecond) // if it is not queued
	if d.Queued {
		s.dispatch.Expect(s.lineOf(r), a.Queue, d.RetryIn)
		policy, _ := s.limiter.Lookup(d.Policy)
		after = dispatch.Fallback(policy, d.RetryIn)
	}
	at := asynqredis.WholeSecond(now.Add(after))
	reason := (&throttle.DeniedError{Cause: cause, Decision: d, Request: r}).Error()
	if d.Queued && d.RetryIn >= time.Second { // asynq's tools show this text until then
		reason += ": expected to start at " + now.Add(d.RetryIn+time.Second-1).UTC().Format(time.RFC3339)
	}
	mark := ""
	switch {
	case r.Ticket == (throttle.Ticket{}): // it joins no line
	case r.Front && !d.Queued:
		mark = asynqredis.FrontMark
	case !d.Queued: // undecided: it may stand in line all the same
		mark = asynqredis.Mark(a.Message.JoinKey(), "")
	default: // it has joined: a mark with the name of a call says so
		mark = asynqredis.Mark(a.Message.JoinKey(), s.tasks.NewCall())
	}
	return asynqredis.RestoreOptions{
		Ref: a.Ref, CallKey: a.CallKey, At: at, Line: s.lineOf(r), Mark: mark, Message: m.WithDenial(reason, now),
	}
}

func (s *Server) lineOf(r throttle.Request) string { return s.limiter.LineOf(r.Policy, r.Tenant) }

// noteUndecided logs that the limiter did not answer, or that asynq's Redis did not tell its Database. It returns
// the decision by which the task waits. The task may have joined the line all the same.
func (s *Server) noteUndecided(r throttle.Request, cause error) throttle.Decision {
	s.limiterLog.Failed(cause, "policy", r.Policy, "fails_open", false)
	d := undecidedDecision(r)
	s.limiter.Config().Observer(&throttle.DeniedError{Cause: cause, Decision: d, Request: r})
	return d
}

func undecidedDecision(r throttle.Request) throttle.Decision {
	return throttle.Decision{At: time.Now(), Policy: r.Policy, RetryIn: unavailableFor, Tenant: r.Tenant}
}

// reportErrors wraps the user's ErrorHandler, which is not called for a waiting task whose time ran out.
func (s *Server) reportErrors(handler asynq.ErrorHandler) asynq.ErrorHandlerFunc {
	return func(ctx context.Context, task *asynq.Task, err error) {
		o := s.attempts.get(taskOf(ctx)).ending()
		if handler != nil && (o.requeue == nil || asynq.IsPanicError(err)) { // a panic is a bug, even if the task waits
			handler.HandleError(ctx, task, err)
		}
	}
}

// finish lets a call of asynq end a task, unless the task is to wait.
func (s *Server) finish(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call asynqredis.Call) error {
	a := s.attempts.get(call.Ref)
	var o outcome
	if call.Verb != asynqredis.Requeue { // which asynq makes at a shutdown: the task goes back either way
		o = a.ending()
	}
	deletes := call.Verb == asynqredis.Done || call.Verb == asynqredis.Complete
	fails := call.Verb == asynqredis.Archive || call.Verb == asynqredis.Retry
	// Only calls of asynq's recoverer have no deadline: it has found a task whose server died.
	if _, hasDeadline := ctx.Deadline(); fails && !hasDeadline {
		if recovered, err := s.tasks.Recover(ctx, call.Ref, a.CallKey); recovered || err != nil {
			return reply(cmd, "OK", err)
		}
	}
	firing, index, member := asynqredis.FiringOf(call.Ref)
	if member && (deletes || call.Verb == asynqredis.Archive) {
		next = func(ctx context.Context, cmd redis.Cmder) error {
			return s.tasks.End(ctx, cmd, firing, index, time.Since(a.begun))
		}
	}
	hadTurn := a.counted.Load() || a.isFromLine()
	var err error
	switch {
	case o.requeue != nil:
		err = reply(cmd, "OK", o.requeue(ctx))
	case call.Verb == asynqredis.Requeue && hadTurn:
		a.releaseSlot()
		back := asynqredis.RestoreOptions{Ref: a.Ref, CallKey: a.CallKey, Mark: asynqredis.KeptMark, Message: a.Message.WithTurn()}
		err = reply(cmd, "OK", s.requeue(ctx, back, false))
	case call.Verb == asynqredis.Other:
		return next(ctx, cmd)
	case deletes && !o.done:
		return reply(cmd, nil, fmt.Errorf("worker: task %s has not ended here: it stays", call.ID))
	default:
		if fails && s.isLate(a) { // undo the later deadline of hook.dequeue
			message, _ := call.Args[1].([]byte)
			call.Args[1] = []byte(asynqredis.Message(message).WithDeadline(a.Message.Deadline()))
		}
		a.releaseSlot()
		err = s.conclude(ctx, next, cmd, a)
	}
	if err == nil || asynqredis.IsNotFound(err) { // after other errors asynq calls again, as after NOSCRIPT
		s.attempts.end(a)
		s.giveBack(a)
	}
	return err
}

// requeue puts a task back, by Client.Restore. It is repeated, as asynq's calls that end a task are.
func (s *Server) requeue(ctx context.Context, r asynqredis.RestoreOptions, needsWake bool) error {
	due := false
	err := s.repeat(ctx, func(ctx context.Context, _ bool) (err error) {
		due, err = s.tasks.Restore(ctx, r)
		return err
	})
	switch {
	case asynqredis.IsNotFound(err):
		return err
	case err != nil:
		return fmt.Errorf("worker: requeueing task %s: %w", r.ID, err)
	case due: // its ticket was taken meanwhile, and given up
		s.dispatch.WakeAt(r.Queue, time.Now())
	case needsWake: // no take brings it back
		s.dispatch.WakeAt(r.Queue, r.At)
	}
	return nil
}

// conclude makes the call by which asynq ends a task, and repeats it. Asynq's own repetition uses a context that has
// ended, and never succeeds: the task would stay active until asynq's recoverer finds it, which costs a retry.
func (s *Server) conclude(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, a *attempt) error {
	return s.repeat(ctx, func(ctx context.Context, again bool) error {
		if again { // an earlier copy of the call may have arrived: then the task may run elsewhere by now
			if active, err := s.tasks.CheckActive(ctx, a.Ref, a.CallKey, !asynqredis.NoteStart); err != nil || !active {
				return reply(cmd, "OK", err)
			}
		}
		cmd.SetErr(nil)
		err := next(ctx, cmd)
		if again && asynqredis.IsNotFound(err) { // it has arrived meanwhile
			return reply(cmd, "OK", nil)
		}
		return err
	})
}

// repeat makes a call that ends an attempt. While asynq's Redis does not answer, as during a failover, it repeats the
// call until the context ends (asynq's ends with the task's lease), or until the shutdown waits no longer. It makes a
// call of asynq's recoverer, whose context has no deadline, only once: the recoverer comes again.
func (s *Server) repeat(ctx context.Context, do func(ctx context.Context, again bool) error) error {
	_, hasDeadline := ctx.Deadline()
	for backoff, again := (outage.Backoff{}), false; ; again = true {
		call, cancel := context.WithTimeout(ctx, cleanUpTimeout)
		err := do(call, again)
		cancel()
		if !hasDeadline || !asynqredis.IsOutage(err) {
			return err
		}
		backoff.Fail(time.Now())
		select {
		case <-time.After(time.Until(backoff.Until)):
		case <-ctx.Done():
			return err
		case <-s.shutdownGrace.Done():
			return err
		}
	}
}
