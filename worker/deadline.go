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

// tooLate returns why the denied task of the message can never run, or nil if it can.
func tooLate(message asynqredis.Message, d throttle.Decision) *throttle.TooLateError {
	deadline, startsAt := message.Deadline(), time.Now().Add(d.RetryInLeast)
	if deadline.IsZero() || startsAt.Before(deadline) || d.RetryInIsBound() {
		return nil
	}
	return &throttle.TooLateError{Deadline: deadline, Decision: d, StartsAt: startsAt}
}

// missed returns the error for a deadline that has passed already.
func missed(policy, tenant string, deadline, now time.Time) *throttle.TooLateError {
	return &throttle.TooLateError{Deadline: deadline, Decision: throttle.Decision{At: now, Policy: policy, Tenant: tenant}, StartsAt: now}
}

// missedDeadline returns why a task that was just picked up does not run, or nil. Once a task's
// deadline has passed asynq gives it to no middleware, but fails it at every attempt until its
// retries are used up. That is right for a task that ran and failed. A task that only waited fails
// once.
func (ad *Adapter) missedDeadline(message asynqredis.Message, now time.Time) *throttle.TooLateError {
	deadline := message.Deadline()
	if deadline.IsZero() || now.Before(deadline) {
		return nil
	}
	policy, matched := ad.config.Limiter.Match(message.Type())
	if !matched || message.LastError() != "" && !message.Denied() {
		return nil
	}
	return missed(policy.Name, "", deadline, now)
}

// leaveLate takes a task out of the line whose deadline had passed when it was picked up.
func (ad *Adapter) leaveLate(ctx context.Context, task *asynq.Task, late *throttle.TooLateError) {
	request, err := ad.identify.request(late.Decision.Policy, task)
	if err != nil {
		return
	}
	late.Decision.Tenant = request.Tenant
	ref := taskOf(ctx)
	if identity, err := ad.asynq.Load().Identity(ctx); err == nil {
		request.Ticket = throttle.TicketID{Queue: identity + "/" + ref.Queue, ID: ref.ID}
		ad.leave(ctx, request)
	}
}

// leave withdraws the request's ticket, if it has one.
func (ad *Adapter) leave(ctx context.Context, r throttle.Request) {
	if r.Ticket == (throttle.TicketID{}) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	_ = ad.config.Limiter.Line(r.Policy).Leave(ctx, r.Ticket) // else a take finds it gone
}
