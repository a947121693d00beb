package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/breaker"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// startWithin is how old a grant may be when its task starts, as its units count from when they
// were taken. An older grant is given back and reserved again.
const startWithin = 100 * time.Millisecond

// throttled is the outermost middleware: asynq gets what it returns.
func (s *Server) throttled(handler asynq.Handler) asynq.Handler {
	if handler == nil {
		return nil // asynq returns the error
	}
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		a := s.attempts.enter(ctx, taskOf(ctx))
		if a == nil {
			return errLost
		}
		err := s.process(ctx, a, task, handler)
		s.attempts.returned(a, err)
		return err
	})
}

// errLost is of a task whose lease ran out before it got here: its attempt has ended.
var errLost = errors.New("worker: the task's lease was lost before it started")

// process runs the task, or notes with the attempt that it waits. It returns the error by which the task
// fails. What was granted to the task before it had a slot is used, or else returned.
func (s *Server) process(ctx context.Context, a *attempt, task *asynq.Task, next asynq.Handler) error {
	grant, used := a.grant, false
	defer func() {
		if !used { // even if a user's function panics
			s.giveBack(grant)
		}
	}()

	policy, ok := s.config.Limiter.Match(task.Type())
	if !ok && grant != nil { // its policy was removed while it waited
		policy, ok = s.config.Limiter.MatchWaiting(task.Type())
	}
	if !ok {
		return s.processUnmatched(ctx, a, task, next)
	}
	request, err := s.identify.request(policy.Name, task)
	if err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok {
		request.MaxHold = max(0, time.Until(deadline))
	}
	if request.Deadline = a.message.Deadline(); !wasTaken(grant) {
		request.MaxWait = maxWaitOf(a.message)
	}
	if request, err = s.withTicket(ctx, a, request, policy, grant); err != nil {
		return s.unavailable(a, request, err)
	}
	// Should the task's time run out meanwhile, asynq goes on at once. The task did not run: it
	// waits.
	s.attempts.ask(a, newUnavailable(request, errOutOfTime), s.mark(a, request))
	d, err := s.decideOrSweep(ctx, grant, request, policy.Fail)
	used = err == nil // else it may have been used or not
	var late *throttle.TooLateError
	switch {
	case errors.As(err, &late):
		return s.tooLate(ctx, a, task, late)
	case isInvalid(err):
		s.attempts.run(a)
		return fmt.Errorf("worker: task type %q: %w", task.Type(), err)
	case err != nil && ctx.Err() == nil:
		return s.unavailable(a, request, err)
	case ctx.Err() != nil:
		s.outOfTime(ctx, request, d)
		return ctx.Err()
	}
	s.noteDecision(d)
	return s.follow(ctx, a, task, next, request, d, grant)
}

// decideOrSweep is decide. If the task can never start because of those that wait before it, tickets
// of tasks that were deleted leave the line, and it is decided once more.
func (s *Server) decideOrSweep(
	ctx context.Context, grant *dispatch.Grant, request throttle.Request, fail throttle.FailMode,
) (throttle.Decision, error) {
	d, err := s.decide(ctx, grant, request, fail)
	if !errors.As(err, new(*throttle.TooLateError)) ||
		!s.sweeper.sweep(ctx, s.lineOf(request), s.asynq, time.Now()) {
		return d, err
	}
	return s.decide(ctx, nil, request, fail)
}

// noteDecision notes, for the log, how the limiter came to a decision.
func (s *Server) noteDecision(d throttle.Decision) {
	if d.FailedOpen != nil {
		s.outages.Failed(d.FailedOpen, "policy", d.Policy, "fails", "open")
		return
	}
	s.outages.Decided()
	s.outages.ClockBehind(d.ClockBehind, "policy", d.Policy, "tenant", d.Tenant)
}

// follow does what was decided: it runs the task, or notes its denial.
func (s *Server) follow(
	ctx context.Context, a *attempt, task *asynq.Task, next asynq.Handler,
	request throttle.Request, d throttle.Decision, grant *dispatch.Grant,
) error {
	started := false
	if d.Granted {
		s.attempts.run(a)
		defer func() {
			if !started { // OnDecision panicked
				s.cancelLater(d)
			}
		}()
	}
	if s.config.OnDecision != nil {
		s.config.OnDecision(ctx, task, d)
	}
	if d.Granted {
		started = true
		s.started(d, grant)
		return s.run(ctx, a, task, next, request, d)
	}
	return s.deny(a, request, d, d.EarliestReset())
}

// withTicket returns the request with the ticket by which a denied task waits, if it waits in line.
func (s *Server) withTicket(
	ctx context.Context, a *attempt, r throttle.Request, policy throttle.PolicyInfo, grant *dispatch.Grant,
) (throttle.Request, error) {
	if policy.Requeue == throttle.RequeueEarliestReset {
		return r, nil
	}
	identity, err := s.asynq.Identity(ctx)
	if err != nil {
		return r, err
	}
	retried, _ := asynq.GetRetryCount(ctx)
	r.Front = retried > 0 || wasTaken(grant) // it had its turn
	r.Key = a.message.JoinKey()
	r.Ticket = throttle.Ticket{Queue: identity + "/" + a.Queue, ID: a.ID}
	return r, nil
}

// wasTaken reports whether the task comes from the line. A pending one may have been denied before.
func wasTaken(grant *dispatch.Grant) bool { return grant != nil && !grant.Decision.Queued }

// processUnmatched runs a task that no policy matches, or returns the error by which it fails.
func (s *Server) processUnmatched(ctx context.Context, a *attempt, task *asynq.Task, next asynq.Handler) error {
	if !asynqredis.IsReport(a.Ref) { // of a batch: it needs no policy
		s.unmatched.attempt(task.Type())
		if s.config.Unmatched == UnmatchedReject {
			return &UnmatchedError{TaskType: task.Type()}
		}
	}
	id, _ := IdentityOf(task) // of the calls that the handler makes
	request := throttle.Request{Attributes: id.Attributes, Tenant: id.Tenant}
	return s.run(ctx, a, task, next, request, throttle.Decision{})
}

// decide returns what was decided for the task before it had a slot, if that is still right, and else
// asks the limiter.
func (s *Server) decide(
	ctx context.Context, grant *dispatch.Grant, request throttle.Request, fail throttle.FailMode,
) (d throttle.Decision, err error) {
	ask := func(ctx context.Context) error {
		d, err = s.config.Limiter.Reserve(ctx, request)
		return err
	}
	if grant != nil {
		line := s.config.Limiter.Line(grant.Line)
		denied := grant.Decision.Queued && grant.Decision.Policy == request.Policy
		if time.Since(grant.Sent) <= startWithin && (denied || line.Matches(grant.TakenTicket, request)) {
			return grant.Decision, nil
		}
		ask = func(ctx context.Context) error {
			d, err = line.ReserveAgain(ctx, grant.TakenTicket, request)
			return err
		}
	}
	err = s.breaker.Do(ctx, breaker.AnswerWithin, ask)
	if errors.Is(err, throttle.ErrUnavailable) && fail == throttle.FailOpen && ctx.Err() == nil {
		d = throttle.Decision{At: time.Now(), FailedOpen: err, Granted: true, Policy: request.Policy, Tenant: request.Tenant}
		d.Reservation = s.config.Limiter.Attach(throttle.Reservation{Request: request, At: d.At})
		s.config.Limiter.Config().Observer.Decided(d)
		return d, nil
	}
	return d, err
}

// outOfTime gives back what was granted to a task whose time ran out before it could start.
func (s *Server) outOfTime(ctx context.Context, r throttle.Request, d throttle.Decision) {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		s.outages.Failed(errOutOfTime, "fails", "closed")
		s.config.Limiter.Config().Observer.Unavailable(r.Policy, r.Tenant, errOutOfTime)
	}
	if d.Granted {
		s.cancelLater(d)
	}
}

// cancelLater gives back what was granted to a task that does not start. What cannot be given back
// counts until its windows have passed.
func (s *Server) cancelLater(d throttle.Decision) {
	s.dispatch.Later(func(ctx context.Context) error {
		_, err := d.Reservation.Cancel(ctx)
		return err
	})
}

// isInvalid reports whether the error says that the request can never be granted.
func isInvalid(err error) bool {
	return errors.As(err, new(*throttle.RequestError)) || errors.As(err, new(*throttle.NeverFitsError))
}

// started reports to the limiter's observer that a task's handler is about to be called.
func (s *Server) started(d throttle.Decision, grant *dispatch.Grant) {
	start := throttle.Start{Late: -1, Policy: d.Policy, Tenant: d.Tenant}
	if wasTaken(grant) {
		start.Waited = grant.Waited + max(0, time.Since(grant.Sent))
		if !grant.Due.IsZero() {
			start.Late = max(0, time.Since(grant.Due))
		}
	}
	s.config.Limiter.Config().Observer.Started(start)
}
