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

// startWithin is how old a grant may be when its task starts, as its units count from when they
// were taken. An older grant is given back and reserved again.
const startWithin = 100 * time.Millisecond

// decideTimeout bounds how long a task waits for the limiter in its handler slot.
const decideTimeout = 2 * time.Second

// Middleware returns the middleware that throttles. Put it outermost: a middleware around it
// sees denials as errors, and runs at every attempt.
//
// Make the asynq.Server first. It is an error if no server, or more than one, was made with what
// Redis or RedisClient returns, or if Asynq was not called.
func (ad *Adapter) Middleware() (asynq.MiddlewareFunc, error) {
	if ad.asynq.Load() == nil {
		return nil, errors.New("worker: no asynq.Server has the connection that Adapter.Redis returns: make the server " +
			"with it first, or asynq archives tasks that are denied on their last attempt")
	}
	if !ad.configured.Load() {
		return nil, errors.New("worker: Adapter.Asynq was not called: " +
			"make the asynq.Server with Asynq(...), or denials are reported as failures")
	}
	if ad.reused.Load() {
		return nil, errReused
	}
	ad.guarded.Store(true)
	return func(next asynq.Handler) asynq.Handler {
		return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			return ad.process(ctx, task, next)
		})
	}, nil
}

// process runs the task, or returns a *throttle.DeniedError, or the error by which the task fails.
func (ad *Adapter) process(ctx context.Context, task *asynq.Task, next asynq.Handler) error {
	ad.entered.Store(true)
	ref := taskOf(ctx)
	a := ad.attempts.enter(ctx, ref)
	var grant *dispatch.Grant
	if a != nil {
		grant, a.grant = a.grant, nil
	}
	used := false // the grant, or it was given back
	defer func() {
		if !used { // even if a user's function panics
			ad.giveBack(grant)
		}
	}()

	policy, ok := ad.config.Limiter.Match(task.Type())
	switch {
	case !ok:
		return ad.processUnmatched(ctx, a, task, next)
	case ref == asynqredis.Ref{}:
		return fmt.Errorf("worker: task type %q: the context does not come from an asynq.Server: "+
			"middlewares must hand on the one they get", task.Type())
	}
	request, err := ad.identify.request(policy.Name, task)
	if err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok {
		request.MaxHold = max(0, time.Until(deadline))
	}
	switch {
	case a == nil:
		return ad.park(ctx, ref, policy.Name)
	case ctx.Value(serverKey{}) != ad:
		return ad.unavailable(a, request, errOtherConfig)
	}
	if request, err = ad.withTicket(ctx, a, request, policy, grant); err != nil {
		return ad.unavailable(a, request, err)
	}
	// Should the task's time run out meanwhile, asynq goes on at once. The task did not run: it
	// waits.
	waits := ad.attempts.deny(a, newUnavailable(request, errOutOfTime), ad.markIfJoining(a, request))
	used = true
	d, err := ad.decide(ctx, grant, request, policy.Fail)
	if err == nil && !d.Granted && tooLate(a.message, d, grant != nil) != nil &&
		ad.sweeper.sweep(ctx, ad.lineOf(request), ad.asynq.Load(), time.Now()) {
		ad.leave(ctx, request) // it joined behind tasks that were deleted
		d, err = ad.decide(ctx, nil, request, policy.Fail)
	}
	if err != nil {
		ad.giveBack(grant) // it may have been used or not
	}
	switch {
	case isInvalid(err):
		ad.attempts.allow(a)
		return fmt.Errorf("worker: task type %q: %w", task.Type(), err)
	case err != nil && ctx.Err() == nil:
		return ad.unavailable(a, request, err)
	case ctx.Err() != nil:
		ad.outOfTime(ctx, request, d)
		return waits
	case d.FailedOpen != nil:
		ad.outages.Failed(d.FailedOpen, "policy", d.Policy, "fails", "open")
	default:
		ad.outages.Decided()
		ad.outages.ClockBehind(d.ClockBehind, "policy", d.Policy, "tenant", d.Tenant)
		ad.outages.ClockAhead(d.Policy, d.At)
	}
	if d.Granted {
		ad.attempts.allow(a)
	}
	if ad.config.OnDecision != nil {
		ad.config.OnDecision(ctx, task, d)
	}
	if d.Granted {
		ad.started(d, grant)
		return ad.run(ctx, a, task, next, request, d)
	}
	if late := tooLate(a.message, d, wasTaken(grant)); late != nil {
		ad.leave(ctx, request)
		ad.attempts.allow(a)
		return notAgain{late}
	}
	return ad.deny(a, request, d, d.EarliestReset())
}

// withTicket returns the request with the ticket by which a denied task waits, if it waits in line.
func (ad *Adapter) withTicket(ctx context.Context, a *attempt, r throttle.Request, policy throttle.PolicyInfo, grant *dispatch.Grant) (throttle.Request, error) {
	if policy.Requeue == throttle.RequeueEarliestReset {
		return r, nil
	}
	identity, err := ad.asynq.Load().Identity(ctx)
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

// processUnmatched runs a task whose type no policy matches, or returns the error by which it
// fails.
func (ad *Adapter) processUnmatched(ctx context.Context, a *attempt, task *asynq.Task, next asynq.Handler) error {
	ad.unmatched.attempt(task.Type())
	if ad.config.Unmatched == UnmatchedReject {
		return &UnmatchedError{TaskType: task.Type()}
	}
	id, _ := IdentityOf(task) // of the calls that the handler makes
	request := throttle.Request{Attributes: id.Attributes, Tenant: id.Tenant}
	return ad.run(ctx, a, task, next, request, throttle.Decision{})
}

// decide returns what was decided for the task before it had a slot, if that is still right, and else
// asks the limiter.
func (ad *Adapter) decide(ctx context.Context, grant *dispatch.Grant, request throttle.Request, fail throttle.FailMode) (d throttle.Decision, err error) {
	ask := func(ctx context.Context) error {
		d, err = ad.config.Limiter.Reserve(ctx, request)
		return err
	}
	if grant != nil && !grant.NeverFits {
		line := ad.config.Limiter.Line(grant.Line)
		denied := grant.Decision.Queued && grant.Decision.Policy == request.Policy
		if time.Since(grant.Sent) <= startWithin && (denied || line.Matches(grant.TakenTicket, request)) {
			return grant.Decision, nil
		}
		ask = func(ctx context.Context) error {
			d, err = line.ReserveAgain(ctx, grant.TakenTicket, request)
			return err
		}
	}
	err = ad.silence.Bound(ctx, decideTimeout, ask)
	if errors.Is(err, throttle.ErrUnavailable) && fail == throttle.FailOpen && ctx.Err() == nil {
		d = throttle.Decision{At: time.Now(), FailedOpen: err, Granted: true, Policy: request.Policy, Tenant: request.Tenant}
		if report := ad.config.Limiter.Observer().Decided; report != nil {
			report(d)
		}
		return d, nil
	}
	return d, err
}

var (
	errOtherConfig     = errors.New("worker: the asynq.Server was not made with the config that Adapter.Asynq returned")
	errOtherConnection = errors.New("worker: the asynq.Server was not made with the connection that Adapter.Redis returned")
)

// parkMargin is how long before its time limit a parked task is put back.
const parkMargin = time.Second

// park keeps a task that a server without our connection has picked up. That server would archive
// it if it were denied on its last attempt. So the task is not denied: it occupies its slot until
// the server shuts down, which makes it pending again. A server all of whose slots are occupied
// picks up no more tasks.
//
// Asynq would fail the task when its own time limit ends. Shortly before, it is put back by our
// connection, so that asynq does not find it any more.
func (ad *Adapter) park(ctx context.Context, ref asynqredis.Ref, policy string) error {
	ad.outages.Failed(errOtherConnection, "policy", policy, "fails", "closed")
	if limit, ok := ctx.Deadline(); ok {
		select {
		case <-time.After(time.Until(limit) - parkMargin):
			call, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
			defer cancel()
			at := limit.Add(asynqredis.LeaseFor) // asynq may repeat its call until then
			if err := ad.asynq.Load().Restore(call, ref.Queue, "", []string{ref.ID}, at); err != nil {
				ad.outages.Failed(fmt.Errorf("%w: putting task %s back: %w", errOtherConnection, ref.ID, err), "policy", policy)
			}
		case <-ctx.Done():
		}
	}
	<-ctx.Done()
	return errOtherConnection
}

// outOfTime gives back what was granted to a task whose time ran out before it could start.
func (ad *Adapter) outOfTime(ctx context.Context, r throttle.Request, d throttle.Decision) {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		ad.outages.Failed(errOutOfTime, "fails", "closed")
		ad.undecided(r, errOutOfTime)
	}
	if d.Granted {
		// What cannot be given back counts until its windows have passed.
		ad.dispatcher().Later(func(ctx context.Context) error {
			_, err := d.Reservation.Cancel(ctx)
			return err
		})
	}
}

// isInvalid reports whether the error says that the request can never be granted.
func isInvalid(err error) bool {
	return errors.As(err, new(*throttle.RequestError)) || errors.As(err, new(*throttle.NeverFitsError))
}

// serverKey is the key of the adapter in the contexts of its server.
type serverKey struct{}

// started reports to the limiter's observer that a task's handler is about to be called.
func (ad *Adapter) started(d throttle.Decision, grant *dispatch.Grant) {
	report := ad.config.Limiter.Observer().Started
	if report == nil {
		return
	}
	s := throttle.Start{Late: -1, Policy: d.Policy, Tenant: d.Tenant}
	if wasTaken(grant) {
		s.Waited = grant.Waited + max(0, time.Since(grant.Sent))
		if !grant.Due.IsZero() {
			s.Late = max(0, time.Since(grant.Due))
		}
	}
	report(s)
}

// undecided reports a task that is requeued because the limiter could not decide.
func (ad *Adapter) undecided(r throttle.Request, err error) {
	if report := ad.config.Limiter.Observer().Undecided; report != nil {
		report(r.Policy, r.Tenant, err)
	}
}
