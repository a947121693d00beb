package throttle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// Wait is Reserve, but a denied request waits in line until it is granted, until ctx ends, or for
// Request.MaxWait. A request that is not granted in time is a *DeniedError whose Cause is
// context.DeadlineExceeded, at once where that is known. With a MaxWait below 0, Wait does not
// wait, and a denial is a *DeniedError without a Cause. If ctx is cancelled, or ends during a call
// to Redis, the error wraps that of ctx and its cause. Other errors are Reserve's.
//
// Wait waits by a ticket of its own, a claim, and leaves the line when it returns. Request.Ticket,
// Key, Front, Backlog and Deadline are ignored. Claims and the tickets of jobs take turns as those
// of different queues do. In a job queue, let a denied job wait in line instead: a job that waits
// here keeps its worker busy.
//
// Two jobs could each hold a slot that the other waits for. So a job that holds slots of
// Concurrency windows waits for other slots only of policies that come later in name order. For
// slots of any other policy it does not wait, as with a MaxWait below 0.
func (l *Limiter) Wait(ctx context.Context, r Request) (Decision, error) {
	r.Ticket, r.Key, r.Front, r.Deadline = Ticket{}, "", false, time.Time{}
	asked := r
	asked.MaxWait = 0
	cp, err := l.policyFor(r.Policy, r.Tenant, false)
	mayDeadlock := err == nil && cp.script.Leases && l.holdsFrom(r.Policy, CallerFrom(ctx))
	if r.MaxWait < 0 || mayDeadlock {
		d, err := l.Reserve(ctx, asked)
		if err == nil && !d.Granted {
			err = &DeniedError{Decision: d, Request: r}
		}
		return d, err
	}
	began := time.Now()
	asked.Deadline, _ = ctx.Deadline()
	if end := began.Add(r.MaxWait); r.MaxWait > 0 && (asked.Deadline.IsZero() || end.Before(asked.Deadline)) {
		asked.Deadline = end
	}
	d, err := l.waitInLine(ctx, asked)
	if err == nil {
		tell(l, Start{Late: -1, Policy: d.Policy, Tenant: d.Tenant, Waited: time.Since(began)})
	}
	return d, err
}

// waitInLine waits by a claim, until the request's deadline.
func (l *Limiter) waitInLine(ctx context.Context, r Request) (Decision, error) {
	w := &waiter{}
	defer func() { w.end() }()
	for {
		o, err := l.checked(ctx, r)
		if err != nil {
			return Decision{}, err
		}
		if w.claims != o.claims { // at first, and when Policy.Shards has changed
			w.end()
			w = o.claims.add()
		}
		d, err := w.join(ctx, o, r)
		if err != nil || d.Granted {
			return d, err
		}
		ticket, err := w.await(ctx, o, d, r)
		switch {
		case err != nil:
			return Decision{}, err
		case ticket == nil:
			continue
		}
		if d, ok := w.use(ctx, o, *ticket, r); ok {
			return d, nil
		}
		w.end()
		w = &waiter{}
	}
}

// join reserves, and joins the line by the claim if that is denied.
func (w *waiter) join(ctx context.Context, o *operation, r Request) (Decision, error) {
	ask := o.reserveRequest(Reservation{})
	ask.Ticket = script.TicketName(w.claims.taker.Claims, w.id)
	ask.Place.Flow = o.flow(w.claims.taker.Claims, r)
	w.joins++
	d, err := w.claims.limiter.send(ctx, o, ask)
	switch {
	case errors.As(err, new(*DeniedError)):
		return Decision{}, err
	case err != nil || d.FailedOpen != nil: // the claim may have joined all the same
		go w.leave(ctx, o)
	case !d.Granted:
		d.Queued, d.AlreadyQueued = false, false // it is withdrawn when the call returns
		w.claims.joined(d.RetryIn, o.script.Leases)
	}
	return d, err
}

// await waits for the claim's ticket. It returns nil if the claim has to join again. After an error the
// claim has left the line.
func (w *waiter) await(ctx context.Context, o *operation, d Decision, r Request) (*TakenTicket, error) {
	asked := time.Now()
	var late <-chan time.Time
	if !r.Deadline.IsZero() {
		late = time.After(time.Until(r.Deadline))
	}
	select {
	case ticket := <-w.taken:
		return ticket, nil
	case <-late:
	case <-ctx.Done():
	}
	w.leave(ctx, o)
	if err := ctx.Err(); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("throttle: %s: %w", d.Reason(), contextError(ctx))
	}
	// Let these durations count from now, as the caller may act on them.
	d.RetryIn = max(d.RetryIn-time.Since(asked), time.Millisecond)
	if d.Latest > 0 {
		d.Latest = max(d.Latest-time.Since(asked), d.RetryIn)
	}
	return nil, tooLate(r, d)
}

// use returns the decision of a claim that was taken. If it no longer matches the policy, use gives it back and
// returns false.
func (w *waiter) use(ctx context.Context, o *operation, t TakenTicket, r Request) (Decision, bool) {
	l := w.claims.limiter
	if w.joins > 1 {
		w.leave(ctx, o) // it may have joined again
	}
	tell(l, t)
	cp, err := l.policyFor(r.Policy, r.Tenant, true)
	if err != nil || !cp.matches(t, r) {
		l.refundLater(o.line, t)
		return Decision{}, false
	}
	t.Decision.Reservation.Request = r
	return t.Decision, true
}

const leaveTimeout = time.Second

// leave withdraws the claim. If Redis does not answer, the claim stays in line. Once taken, it is
// refunded.
func (w *waiter) leave(ctx context.Context, o *operation) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	_ = o.compiledPolicy.leave(ctx, script.TicketName(w.claims.taker.Claims, w.id))
}
