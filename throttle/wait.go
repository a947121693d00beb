package throttle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// Wait is Reserve, but a denied request waits in line until it is granted, until ctx ends, or for Request.MaxWait. If
// it is not granted in time, the error is a *DeniedError whose Cause is context.DeadlineExceeded, at once where Wait
// can tell. With a MaxWait below 0, Wait does not wait, and a denial is a *DeniedError without a Cause. In a job,
// Wait denies up to half a second before ctx ends. If ctx is cancelled, or ends during a call to Redis, the error
// wraps ctx.Err() and its cause. Other errors are Reserve's.
//
// Wait waits by a ticket of its own, a claim, and leaves the line when it returns. Request.Ticket, Key, Front,
// Backlog and Deadline are ignored. Claims and the tickets of jobs take turns as the tickets of different queues do.
// In a job queue, let a denied job wait in line instead: a job that waits here keeps its worker busy.
//
// Two jobs could each hold a slot that the other waits for. So a job that holds slots of
// Concurrency windows waits for other slots only of policies that come later in name order. For
// slots of any other policy it does not wait, as with a MaxWait below 0.
func (l *Limiter) Wait(ctx context.Context, r Request) (Decision, error) {
	r.Ticket, r.Key, r.Front, r.Deadline = Ticket{}, "", false, time.Time{}
	cp, err := l.policyFor(r.Policy, r.Tenant, onlyInForce)
	mayDeadlock := err == nil && cp.script.Leases && l.holdsFrom(r.Policy, CallerFrom(ctx))
	if r.MaxWait >= 0 && !mayDeadlock {
		return l.waitInLine(ctx, r)
	}
	asked := r
	asked.MaxWait = 0
	d, err := l.Reserve(ctx, asked)
	if err == nil && !d.Granted {
		err = &DeniedError{Decision: d, Request: r}
	}
	return d, err
}

// holdsFrom reports whether a job, or its calls, hold slots of this policy or of one later in name order.
func (l *Limiter) holdsFrom(policy string, caller *Caller) (found bool) {
	l.holds.Range(func(_, held any) bool {
		h := held.(*hold)
		found = h.caller == caller && h.policy >= policy
		return !found
	})
	return found
}

// waitInLine waits by a claim. What is not granted in time is denied.
func (l *Limiter) waitInLine(ctx context.Context, r Request) (Decision, error) {
	began, inTime := time.Now(), ctx
	end, mayEnd := ctx.Deadline()
	if inJob := ctx.Value(callerKey{}) != nil; inJob && mayEnd { // once ctx has ended, the job's server fails the job
		most := time.Until(end)
		most -= min(most/4, 500*time.Millisecond) // of 10 s it waits 9.5, of 1 s 0.75
		r.MaxWait = max(1, min(cmp.Or(r.MaxWait, most), most))
	}
	if r.MaxWait > 0 {
		var stop context.CancelFunc
		inTime, stop = context.WithTimeout(ctx, r.MaxWait)
		defer stop()
	}
	r.Deadline, _ = inTime.Deadline()
	r.MaxWait = 0 // the Deadline bounds the wait already
	id := script.NewID()
	for joins := 1; ; joins++ {
		o, err := l.checked(ctx, r)
		if err != nil {
			return Decision{}, err
		}
		d, again, err := o.claims.wait(ctx, o, id, inTime.Done())
		if again {
			continue
		}
		if d.Granted {
			if joins > 1 {
				o.claims.leave(ctx, o, id) // it may have joined again
			}
			tell(l, Start{Late: -1, Policy: d.Policy, Tenant: d.Tenant, Waited: time.Since(began)})
		}
		return d, err
	}
}

// wait joins the line by a claim, and waits for its ticket until it is too late. With again, the claim has to
// join again: it may be lost, or the policy may have changed.
func (c *claims) wait(
	ctx context.Context, o *operation, id string, late <-chan struct{},
) (d Decision, again bool, err error) {
	taken := c.add(id, o.request)
	defer c.remove(id, taken)
	ask := o.reserveRequest()
	ask.Ticket = script.TicketName(c.taker.Claims, id)
	ask.LinePart.Flow = o.flow(c.taker.Claims, o.request)
	d, err = c.line.limiter.send(ctx, o, ask)
	switch {
	case errors.As(err, new(*DeniedError)):
		return Decision{}, false, err
	case err != nil || d.FailedOpen != nil: // the claim may have joined all the same
		go c.leave(ctx, o, id)
		return d, false, err
	case d.Granted:
		return d, false, nil
	}
	d.Queued, d.AlreadyQueued, d.Latest = false, false, 0 // the claim is withdrawn when the call returns
	joined := time.Now()
	c.joined(d.RetryIn, o.script.Leases)
	select {
	case t, ok := <-taken:
		if ok {
			tell(c.line.limiter, t)
			t.Decision.Reservation.Request = o.request
		}
		return t.Decision, !ok, nil
	case <-late:
	}
	c.leave(ctx, o, id)
	if err := ctx.Err(); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return d, false, fmt.Errorf("throttle: %s: %w", d.Reason(), contextError(ctx))
	}
	d.RetryIn = max(d.RetryIn-time.Since(joined), time.Millisecond) // from now, when the caller may act on it
	return Decision{}, false, tooLate(o.request, d)
}

// leave withdraws a claim. If Redis does not answer soon, the claim stays in line. Once taken, it is refunded.
func (c *claims) leave(ctx context.Context, o *operation, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = o.compiledPolicy.leave(ctx, script.TicketName(c.taker.Claims, id))
}
