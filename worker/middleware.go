package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

const (
	// startWithin is the greatest age of a grant at which its task starts. An older grant is given back and reserved
	// again: its units count from the time of the grant, so the upstream could get too many calls.
	startWithin = 100 * time.Millisecond

	// maxTypesLogged is the number of task types that are logged, and remembered to be logged once.
	maxTypesLogged = 100
)

// middleware wraps all other middlewares: asynq gets the errors that it returns.
func (s *Server) middleware(handler asynq.Handler) asynq.Handler {
	if handler == nil {
		return nil // asynq returns the error
	}
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		a := s.attempts.enter(ctx, taskOf(ctx), task, handler)
		if a == nil {
			return errors.New("worker: the task's lease was lost before it started")
		}
		err := s.process(ctx, a)
		if errors.Is(err, asynq.RevokeTask) { // from the handler, or Identify
			a.outcome.Store(&outcome{done: true})
		}
		return err
	})
}

// process runs the task, or notes in the attempt that it waits. It returns the error with which the task fails.
func (s *Server) process(ctx context.Context, a *attempt) error {
	defer s.giveBack(a) // unless the handler uses the grant; also if a user's function panics

	policy, ok := s.limiter.Match(a.task.Type(), a.Verdict != nil || s.isLate(a)) // such a task may have a removed policy
	switch {
	case !ok && s.isLate(a):
		return archivedError{tooLate(throttle.Request{Deadline: a.Message.Deadline()}, a.begun)}
	case !ok:
		fails := s.config.RejectUnmatched && !asynqredis.IsReport(a.Ref)
		return s.runUncounted(ctx, a, fails, unmatchedError(a.task.Type()))
	}
	enforced := !policy.Observe && !asynqredis.IsReport(a.Ref)
	request, err := s.request(policy.Name, a.task, a.Message)
	if err != nil {
		return s.runUncounted(ctx, a, enforced, err)
	}
	request.Front = request.Front || a.isFromLine()
	if !policy.EarliestReset {
		database, err := s.tasks.Database(ctx)
		if err != nil {
			s.noteWait(a, a.Message, request, s.noteUndecided(request, err), err)
			return nil
		}
		request.Ticket = throttle.Ticket{Queue: database + "/" + a.Queue, ID: a.ID}
	}
	d, err := s.decide(ctx, a, request)
	var late *throttle.DeniedError
	switch {
	case errors.As(err, &late):
		s.report(ctx, a, late.Decision)
		return archivedError{late}
	case errors.As(err, new(*throttle.RequestError)):
		return s.runUncounted(ctx, a, enforced, fmt.Errorf("worker: task type %q: %w", a.task.Type(), err))
	case err != nil:
		if !errors.Is(ctx.Err(), context.Canceled) { // which says nothing about the limiter
			s.noteUndecided(request, err)
		}
		return nil
	}
	s.report(ctx, a, d)
	if !d.Granted || a.grant.Swap(nil) == nil { // the task waits, or finish has given the grant back
		return nil
	}
	a.counted.Store(true)
	s.started(a, d)
	return s.run(ctx, a, request, d)
}

// report logs outages of the limiter and their ends, and calls OnDecision. A refusal as too late counts as an answer.
func (s *Server) report(ctx context.Context, a *attempt, d throttle.Decision) {
	if d.FailedOpen != nil {
		s.limiterLog.Failed(d.FailedOpen, "policy", d.Policy, "fails_open", true)
	} else {
		s.limiterLog.Answered(d.ClockBehind, "policy", d.Policy, "tenant", d.Tenant)
	}
	if s.config.OnDecision != nil {
		s.config.OnDecision(ctx, a.task, d)
	}
}

// decide asks for a decision, and notes in the attempt what was granted, or that the task waits. If the task's time
// runs out meanwhile, asynq makes its call that fails the task, and finish blocks until decide has returned.
func (s *Server) decide(ctx context.Context, a *attempt, r throttle.Request) (throttle.Decision, error) {
	a.asking.Lock()
	defer a.asking.Unlock()
	d, err := s.ask(ctx, a, r)
	if d.FailedOpen != nil && a.Verdict != nil { // what the verdict granted stays counted, except its leases
		s.dispatch.RetryInBackground(a.Verdict.Decision.Reservation.Release)
	}
	if err == nil { // after an error it is not known whether the verdict's grant was replaced
		a.grant.Store(&d.Reservation)
	}
	switch {
	case errors.As(err, new(*throttle.DeniedError)), errors.As(err, new(*throttle.RequestError)):
		return d, err
	case ctx.Err() != nil:
		err = errors.New("worker: the task's time ran out before the limiter had answered")
	}
	if err != nil {
		d = undecidedDecision(r)
	}
	if !d.Granted {
		s.noteWait(a, a.Message, r, d, err)
	}
	return d, err
}

// ask returns the decision of the task's verdict, if it is still right, and otherwise asks the limiter. If the limiter
// refuses the task as too late, ask removes tickets of deleted tasks from the line, and asks once more.
func (s *Server) ask(ctx context.Context, a *attempt, r throttle.Request) (d throttle.Decision, err error) {
	if s.isLate(a) {
		s.leave(ctx, r)
		return d, tooLate(r, a.begun)
	}
	begun := time.Now()
	reserve := func(ctx context.Context) error {
		d, err = s.limiter.Reserve(ctx, r)
		return err
	}
	call := reserve
	if verdict := a.Verdict; verdict != nil {
		line := s.limiter.Line(verdict.Line)
		// Next notes in Redis that a last attempt starts, but not a denied one. So only a take may grant it, not this call.
		denied := verdict.Decision.Queued && (verdict.Decision.Policy == r.Policy || a.Message.IsLastAttempt())
		isStillRight := time.Since(verdict.DecidedAt) <= startWithin && line.Matches(verdict.TakenTicket, r)
		if denied || isStillRight {
			return verdict.Decision, nil
		}
		call = func(ctx context.Context) error {
			d, err = line.ReserveAgain(ctx, verdict.TakenTicket, r)
			return err
		}
	}
	err = s.breaker.Do(ctx, outage.AnswerWithin, call)
	if errors.As(err, new(*throttle.DeniedError)) && s.sweep(ctx, s.lineOf(r), begun) {
		err = s.breaker.Do(ctx, outage.AnswerWithin, reserve)
	}
	return d, err
}

// giveBack cancels the attempt's grant in the background, unless its handler has used the grant, so that other tasks
// may fit. Units that cannot be given back count until their windows have passed.
func (s *Server) giveBack(a *attempt) {
	unused := a.grant.Swap(nil)
	if unused == nil || unused.ID == "" { // without an ID nothing was counted
		return
	}
	s.dispatch.RetryInBackground(func(ctx context.Context) error {
		_, err := unused.Cancel(ctx)
		if err == nil {
			s.dispatch.Freed(s.lineOf(unused.Request))
		}
		return err
	})
}

// started reports to the limiter's observer that a task's handler is about to be called.
func (s *Server) started(a *attempt, d throttle.Decision) {
	start := throttle.Start{Late: -1, Policy: d.Policy, Tenant: d.Tenant}
	if a.isFromLine() {
		start.Waited = a.Verdict.Waited + max(0, time.Since(a.Verdict.DecidedAt))
		if !a.Verdict.Due.IsZero() {
			start.Late = max(0, time.Since(a.Verdict.Due))
		}
	}
	s.limiter.Config().Observer(start)
}

// runUncounted runs a task that no policy can count, or returns the error if such tasks are to fail. It logs the
// first task of each type, except a report of a batch, which needs no policy.
func (s *Server) runUncounted(ctx context.Context, a *attempt, fails bool, err error) error {
	s.mu.Lock()
	taskType := a.task.Type()
	if !asynqredis.IsReport(a.Ref) && !s.warned[taskType] && len(s.warned) < maxTypesLogged {
		s.warned[taskType] = true
		s.config.Logger.Warn("worker: no policy counts a task", "type", taskType, "fails", fails, "err", err)
	}
	s.mu.Unlock()
	if fails {
		return err
	}
	id, _ := IdentityOf(a.task) // for the handler's calls; without a policy, so that Job.matched fails
	return s.run(ctx, a, throttle.Request{Attributes: id.Attributes, Tenant: id.Tenant}, throttle.Decision{})
}

// archivedError makes asynq archive the task. A plain throttle.DeniedError does not, as a handler may
// return that of another task, which it could not enqueue.
type archivedError struct{ *throttle.DeniedError }

func (e archivedError) Unwrap() []error { return []error{e.DeniedError, asynq.SkipRetry} }

// tooLate returns the denial of a task whose deadline passes before it starts.
func tooLate(r throttle.Request, startsAt time.Time) *throttle.DeniedError {
	d := throttle.Decision{At: time.Now(), Policy: r.Policy, Tenant: r.Tenant}
	return &throttle.DeniedError{Cause: context.DeadlineExceeded, Decision: d, Request: r, StartsAt: startsAt}
}

func (s *Server) leave(ctx context.Context, r throttle.Request) {
	if r.Ticket == (throttle.Ticket{}) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	_ = s.limiter.Line(s.lineOf(r)).Leave(ctx, r.Ticket) // if that fails, a take finds the task gone
}
