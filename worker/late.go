package worker

import (
	"context"
	"strings"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// notAgain has asynq archive the task. A throttle.TooLateError by itself does not: a handler may return that
// of another task, which it could not enqueue.
type notAgain struct{ *throttle.TooLateError }

func (e notAgain) Unwrap() []error { return []error{e.TooLateError, asynq.SkipRetry} }

// tooLate returns why the task of the message, which was denied, can never run, or nil if it can.
func tooLate(message asynqredis.Message, d throttle.Decision) *throttle.TooLateError {
	deadline, startsAt := message.Deadline(), time.Now().Add(d.RetryInLeast)
	if deadline.IsZero() || startsAt.Before(deadline) || d.RetryInIsBound() {
		return nil
	}
	return &throttle.TooLateError{Deadline: deadline, Decision: d, StartsAt: startsAt}
}

// missed is for a deadline that has passed already.
func missed(policy, tenant string, deadline, now time.Time) *throttle.TooLateError {
	return &throttle.TooLateError{Deadline: deadline, Decision: throttle.Decision{At: now, Policy: policy, Tenant: tenant}, StartsAt: now}
}

// missedDeadline returns why a task that was just picked up does not run, or nil. Asynq does not
// hand it on to any middleware once its deadline has passed, but fails it again and again until its
// retries are used up. That is right for one that ran and failed. For one that could not run in time
// because it waited, once says it.
func (t *Throttle) missedDeadline(message asynqredis.Message, now time.Time) *throttle.TooLateError {
	deadline := message.Deadline()
	if deadline.IsZero() || now.Before(deadline) {
		return nil
	}
	last := message.LastError()
	policy, matched := t.config.Limiter.Match(message.Type())
	if !matched || last != "" && !strings.HasPrefix(last, "throttled: ") {
		return nil
	}
	return missed(policy.Name, "", deadline, now)
}

// leaveLate takes the task out of the line whose deadline had passed when it was picked up.
func (t *Throttle) leaveLate(ctx context.Context, task *asynq.Task, late *throttle.TooLateError) {
	request, err := t.identify.request(late.Decision.Policy, task)
	if err != nil {
		return
	}
	late.Decision.Tenant = request.Tenant
	ref := taskOf(ctx)
	if identity, err := t.asynq.Load().Identity(ctx); err == nil {
		request.Ticket = throttle.TicketID{Queue: identity + "/" + ref.Queue, ID: ref.ID}
		t.leave(ctx, request)
	}
}

// leave gives the request's place in line back, if it has one.
func (t *Throttle) leave(ctx context.Context, r throttle.Request) {
	if r.Ticket == (throttle.TicketID{}) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	_ = t.config.Limiter.Line(r.Policy).Leave(ctx, r.Ticket) // or it is found to be gone when it is taken
}
