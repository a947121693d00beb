package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/outage"
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
		a := s.attempts.enter(ctx, taskOf(ctx), task, handler)
		if a == nil {
			return errLost
		}
		err := s.process(ctx, a)
		s.attempts.returned(a, err)
		return err
	})
}

// errLost is of a task whose lease ran out before it got here: its attempt has ended.
var errLost = errors.New("worker: the task's lease was lost before it started")

// process runs the task, or notes with the attempt that it waits. It returns the error by which the task
// fails. What was granted to the task is the handler's from its start on, and else given back.
func (s *Server) process(ctx context.Context, a *attempt) error {
	var granted throttle.Decision
	if a.grant != nil {
		granted = a.grant.Decision
	}
	defer func() { // even if a user's function panics
		if granted.Granted {
			s.giveBack(granted.Reservation)
		}
	}()

	isLate := s.isLate(a)
	policy, ok := s.config.Limiter.Match(a.task.Type(), a.grant != nil || isLate)
	if !ok {
		return s.processUnmatched(ctx, a)
	}
	request, err := s.request(policy.Name, a.task, a.message, wasTaken(a.grant))
	if err != nil {
		return s.processInvalid(ctx, a, policy, err)
	}
	if policy.Requeue != throttle.RequeueEarliestReset {
		identity, err := s.asynq.Identity(ctx)
		if err != nil {
			return s.unavailable(a, request, err)
		}
		request.Ticket = throttle.Ticket{Queue: identity + "/" + a.Queue, ID: a.ID}
	}
	// Should the task's time run out meanwhile, asynq goes on at once. The task did not run: it
	// waits.
	_ = s.wait(a, request, undecided(request), s.mark(a, request), errOutOfTime)
	d := throttle.Decision{}
	if isLate {
		s.leave(ctx, request)
		err = missed(request.Policy, request.Tenant, request.Deadline, a.begun)
	} else {
		d, err = s.decideOrSweep(ctx, a.grant, request)
	}
	if err == nil { // else the grant of before may have been replaced or not
		granted = d
	}
	var late *throttle.TooLateError
	switch {
	case errors.As(err, &late):
		d = late.Decision
	case isInvalid(err):
		return s.processInvalid(ctx, a, policy, fmt.Errorf("worker: task type %q: %w", a.task.Type(), err))
	case err != nil && ctx.Err() == nil:
		return s.unavailable(a, request, err)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		s.notDecided(request, errOutOfTime)
		return ctx.Err()
	case ctx.Err() != nil:
		return ctx.Err()
	}
	if d.FailedOpen != nil {
		s.limiter.Failed(d.FailedOpen, "policy", d.Policy, "fails", "open")
	} else {
		s.limiter.Answered(d.ClockBehind, "policy", d.Policy, "tenant", d.Tenant)
	}
	if d.Granted {
		s.attempts.note(a, nil, "")
	}
	if s.config.OnDecision != nil {
		s.config.OnDecision(ctx, a.task, d)
	}
	switch {
	case late != nil:
		s.attempts.note(a, nil, "")
		return notAgain{late}
	case !d.Granted:
		return s.wait(a, request, d, s.mark(a, request), nil)
	}
	granted = throttle.Decision{}
	s.started(d, a.grant)
	return s.run(ctx, a, request, d)
}

// request returns what a task asks of a policy, before it has a ticket. It was in line, or comes for the
// first time.
func (s *Server) request(
	policy string, task *asynq.Task, m asynqredis.Message, waited bool,
) (throttle.Request, error) {
	r, err := requestOf(s.config.Identify, policy, task)
	r.Deadline, r.MaxHold = m.Deadline(), m.TimeLimit(time.Now())
	r.Front, r.Key = waited || m.Retried() > 0, m.JoinKey()
	if !waited {
		r.MaxWait = maxWaitOf(m)
	}
	return r, err
}

// wasTaken reports whether the task comes from the line.
func wasTaken(grant *dispatch.Grant) bool { return grant != nil && grant.Taken }

// processUnmatched runs a task that no policy matches, or returns the error by which it fails.
func (s *Server) processUnmatched(ctx context.Context, a *attempt) error {
	if !asynqredis.IsReport(a.Ref) { // of a batch: it needs no policy
		s.noteUnmatched(a.task.Type())
		if s.config.Unmatched == UnmatchedReject {
			return &UnmatchedError{TaskType: a.task.Type()}
		}
	}
	return s.runUncounted(ctx, a)
}

// processInvalid returns the error of a task that the policy cannot count. If the policy only observes,
// the task runs.
func (s *Server) processInvalid(ctx context.Context, a *attempt, policy throttle.Policy, err error) error {
	s.attempts.note(a, nil, "")
	if policy.Mode != throttle.ModeObserve {
		return err
	}
	s.noteUnobserved(policy, a.task.Type(), err)
	return s.runUncounted(ctx, a)
}

func (s *Server) runUncounted(ctx context.Context, a *attempt) error {
	id, _ := IdentityOf(a.task) // of the calls that the handler makes
	return s.run(ctx, a, throttle.Request{Attributes: id.Attributes, Tenant: id.Tenant}, throttle.Decision{})
}

// decideOrSweep is decide. If the task can never start because of those that wait before it, tickets
// of tasks that were deleted leave the line, and it is decided once more.
func (s *Server) decideOrSweep(
	ctx context.Context, grant *dispatch.Grant, request throttle.Request,
) (throttle.Decision, error) {
	d, err := s.decide(ctx, grant, request)
	if !errors.As(err, new(*throttle.TooLateError)) ||
		!s.sweeper.sweep(ctx, s.lineOf(request), s.asynq, time.Now()) {
		return d, err
	}
	return s.decide(ctx, nil, request)
}

// decide returns what was decided for the task before it had a slot, if that is still right, and else
// asks the limiter.
func (s *Server) decide(
	ctx context.Context, grant *dispatch.Grant, request throttle.Request,
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
	err = s.breaker.Do(ctx, outage.AnswerWithin, ask)
	return d, err
}

// giveBack cancels, in the background, what was granted to a task that does not start: other tasks may
// fit. What cannot be given back counts until its windows have passed.
func (s *Server) giveBack(r throttle.Reservation) {
	s.dispatch.Later(func(ctx context.Context) error {
		_, err := r.Cancel(ctx)
		if err == nil {
			s.dispatch.Freed(s.lineOf(r.Request))
		}
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
