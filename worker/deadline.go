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

// missed returns the error for a deadline that will have passed when the task starts.
func missed(policy, tenant string, deadline, startsAt time.Time) *throttle.TooLateError {
	d := throttle.Decision{At: time.Now(), Policy: policy, Tenant: tenant}
	return &throttle.TooLateError{Deadline: deadline, Decision: d, StartsAt: startsAt}
}

// lateFor is the time that asynq gives the middleware to fail a task whose deadline has passed.
const lateFor = time.Minute

// isLate reports whether the deadline of a task had passed when it was picked up, and the task only
// waited: it fails once. A task that ran and failed is asynq's to fail, at every attempt.
func (s *Server) isLate(a *attempt) bool {
	deadline := a.message.Deadline()
	if deadline.IsZero() || a.begun.Before(deadline) || a.message.LastError() != "" && !a.message.Denied() {
		return false
	}
	_, matched := s.config.Limiter.Match(a.message.Type(), true)
	return matched
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
