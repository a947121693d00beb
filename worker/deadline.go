package worker

import (
	"context"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// notAgain makes asynq archive the task. A throttle.TooLateError alone does not: a handler may
// return one of another task, which it could not enqueue.
type notAgain struct{ *throttle.TooLateError }

func (e notAgain) Unwrap() []error { return []error{e.TooLateError, asynq.SkipRetry} }

// maxWaitOf returns how long a task may wait in line that joins later than it was enqueued, or 0
// for any time. It holds until the task has waited or run.
func maxWaitOf(message asynqredis.Message) time.Duration {
	if message.Retried() > 0 || message.LastError() != "" {
		return 0
	}
	d, _ := time.ParseDuration(message.Headers()[maxWaitHeader])
	return max(0, d)
}

// tooLate returns the error by which a task fails that the limiter refused, as it cannot start in
// time.
func (s *Server) tooLate(ctx context.Context, a *attempt, task *asynq.Task, late *throttle.TooLateError) error {
	s.noteDecision(late.Decision)
	if s.config.OnDecision != nil {
		s.config.OnDecision(ctx, task, late.Decision)
	}
	s.attempts.run(a)
	return notAgain{late}
}

// missed returns the error for a deadline that will have passed when the task starts.
func missed(policy, tenant string, deadline, startsAt time.Time) *throttle.TooLateError {
	d := throttle.Decision{At: time.Now(), Policy: policy, Tenant: tenant}
	return &throttle.TooLateError{Deadline: deadline, Decision: d, StartsAt: startsAt}
}

// missedDeadline returns why a task that was just picked up does not run, or nil. Once a task's
// deadline has passed asynq gives it to no middleware, but fails it at every attempt until its
// retries are used up. That is right for a task that ran and failed. A task that only waited fails
// once.
func (s *Server) missedDeadline(message asynqredis.Message, now time.Time) *throttle.TooLateError {
	deadline := message.Deadline()
	if deadline.IsZero() || now.Before(deadline) {
		return nil
	}
	policy, matched := s.config.Limiter.MatchWaiting(message.Type())
	if !matched || message.LastError() != "" && !message.Denied() {
		return nil
	}
	return missed(policy.Name, "", deadline, now)
}

// leaveLate takes a task out of the line whose deadline had passed when it was picked up.
func (s *Server) leaveLate(ctx context.Context, task *asynq.Task, late *throttle.TooLateError) {
	request, err := s.identify.request(late.Decision.Policy, task)
	if err != nil {
		return
	}
	late.Decision.Tenant = request.Tenant
	ref := taskOf(ctx)
	if identity, err := s.asynq.Identity(ctx); err == nil {
		request.Ticket = throttle.Ticket{Queue: identity + "/" + ref.Queue, ID: ref.ID}
		s.leave(ctx, request)
	}
}

// leave withdraws the request's ticket, if it has one.
func (s *Server) leave(ctx context.Context, r throttle.Request) {
	if r.Ticket == (throttle.Ticket{}) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	_ = s.config.Limiter.Line(s.lineOf(r)).Leave(ctx, r.Ticket) // else a take finds it gone
}
