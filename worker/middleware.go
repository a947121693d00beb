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
)

// startWithin is how old a grant may be when its task begins: its units count from when they were taken. An
// older one is given back and reserved once more.
const startWithin = 100 * time.Millisecond

// Middleware returns the middleware that throttles. Put it outermost: what stands outside of it
// sees denials as errors and runs at every attempt. It is an error if Redis or Asynq was not
// called before.
func (t *Throttle) Middleware() (asynq.MiddlewareFunc, error) {
	if !t.connected.Load() {
		return nil, errors.New("worker: Throttle.Redis was not called: " +
			"make the asynq.Server with Redis(...), or tasks that are denied on their last attempt are archived")
	}
	if !t.configured.Load() {
		return nil, errors.New("worker: Throttle.Asynq was not called: " +
			"make the asynq.Server with Asynq(...), or denials are reported as failures")
	}
	t.guarded.Store(true)
	return func(next asynq.Handler) asynq.Handler {
		return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			return t.process(ctx, task, next)
		})
	}, nil
}

// process runs the task, or returns a *DeniedError, or the error by which it fails.
func (t *Throttle) process(ctx context.Context, task *asynq.Task, next asynq.Handler) error {
	t.entered.Store(true)
	ref := taskOf(ctx)
	a := t.attempts.enter(ctx, ref)
	var grant *dispatch.Grant
	if a != nil {
		grant, a.grant = a.grant, nil
	}
	granted := false // it was seen to
	defer func() {
		if !granted { // also if a function of the user's panics
			t.giveBack(grant)
		}
	}()

	policy, ok := t.config.Limiter.Match(task.Type())
	switch {
	case !ok && t.config.Unmatched == Reject:
		return fmt.Errorf("worker: no policy matches task type %q: add one, or set Config.Unmatched to %q", task.Type(), string(Run))
	case !ok:
		id, _ := IdentityOf(task) // for the calls that it makes
		t.giveBack(grant)
		granted = true
		return t.run(ctx, a, task, next, throttle.Request{Attributes: id.Attributes, Tenant: id.Tenant}, throttle.Reservation{})
	case ref == asynqredis.Ref{}:
		return fmt.Errorf("worker: task type %q: the context does not come from an asynq.Server: "+
			"middlewares must hand on the one they get", task.Type())
	}
	request, err := t.identify.request(policy.Name, task)
	if err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok {
		request.MaxHold = max(0, time.Until(deadline))
	}
	if err := t.miswired(ctx, a != nil); err != nil {
		return t.unavailable(a, request, err)
	}
	if policy.Requeue != throttle.RequeueEarliestReset {
		identity, err := t.asynq.Load().Identity(ctx)
		if err != nil {
			return t.unavailable(a, request, err)
		}
		retried, _ := asynq.GetRetryCount(ctx)
		request.Front = retried > 0 || grant != nil // it had its turn
		request.Key = a.message.JoinKey()
		request.Ticket = throttle.TicketID{Queue: identity + "/" + ref.Queue, ID: ref.ID}
	}
	// Should the task's time run out meanwhile, asynq goes on at once. It did not run: it waits.
	waits := t.attempts.deny(a, newUnavailable(request, errOutOfTime), t.markIfLined(a, request))
	granted = true
	d, err := t.decide(ctx, grant, request)
	if err != nil {
		t.giveBack(grant) // nobody knows whether it was
	}
	switch {
	case isRefusal(err):
		t.attempts.allow(a)
		return fmt.Errorf("worker: task type %q: %w", task.Type(), err)
	case err != nil && ctx.Err() == nil:
		return t.unavailable(a, request, err)
	case ctx.Err() != nil:
		t.outOfTime(ctx, d)
		return waits
	case d.FailedOpen != nil:
		t.outages.failed(d.FailedOpen, "policy", d.Policy, "fails", "open")
	default:
		t.outages.decided()
		t.outages.clock(d)
	}
	if d.Granted {
		t.attempts.allow(a)
	}
	if t.config.OnDecision != nil {
		t.config.OnDecision(ctx, task, d)
	}
	if !d.Granted {
		if late := tooLate(a.message, d); late != nil {
			t.leave(ctx, request)
			t.attempts.allow(a)
			return notAgain{late}
		}
		return t.deny(a, d, d.EarliestReset())
	}
	return t.run(context.WithValue(ctx, decisionKey{}, d), a, task, next, request, d.Reservation)
}

// decide returns what the task was granted in line, if that is still right, or else asks.
func (t *Throttle) decide(ctx context.Context, grant *dispatch.Grant, request throttle.Request) (throttle.Decision, error) {
	switch {
	case grant == nil || grant.NeverFits:
		return t.config.Limiter.Reserve(ctx, request)
	case time.Since(grant.Sent) <= startWithin && t.config.Limiter.Line(grant.Policy).Matches(grant.TakenTicket, request):
		return grant.Decision, nil
	}
	return t.config.Limiter.Line(grant.Policy).ReserveAgain(ctx, grant.TakenTicket, request)
}

// miswired returns an error if the server that made the context was given something else.
func (t *Throttle) miswired(ctx context.Context, known bool) error {
	if ctx.Value(serverKey{}) != t {
		return errors.New("worker: the asynq.Server was not made with the config that Throttle.Asynq returned")
	}
	if !known {
		return errors.New("worker: the asynq.Server was not made with the connection that Throttle.Redis returned")
	}
	return nil
}

type (
	decisionKey struct{}
	serverKey   struct{}
)

// DecisionFrom returns the decision by which the task runs, to its handler. There is none for
// tasks that no policy matches.
func DecisionFrom(ctx context.Context) (throttle.Decision, bool) {
	d, ok := ctx.Value(decisionKey{}).(throttle.Decision)
	return d, ok
}
