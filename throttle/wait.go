package throttle

import (
	"context"
	"errors"
	"fmt"
	"math"
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
	cp, err := l.find(r.Policy, r.Tenant)
	mayDeadlock := err == nil && cp.leases && CallerFrom(ctx).holdsFrom(r.Policy)
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
	w := waiter{limiter: l, request: asked}
	d, err := w.wait(ctx)
	if denied, ok := err.(*DeniedError); ok {
		denied.Request = r
	}
	if err == nil {
		l.config.Observer.Started(Start{Late: -1, Policy: d.Policy, Tenant: d.Tenant, Waited: time.Since(began)})
	}
	return d, err
}

func (w *waiter) wait(ctx context.Context) (Decision, error) {
	defer w.end()
	for {
		o, err := w.limiter.checked(ctx, w.request)
		if err != nil {
			return Decision{}, err
		}
		if w.id != "" && w.operation.claims != o.claims { // Policy.Shards has changed
			go w.operation.leave(ctx, w.id)
			w.end()
		}
		if w.operation = o; w.id == "" {
			o.claims.add(w)
		}
		d, done, err := w.ask(ctx, o)
		if done {
			return d, err
		}
		got, err := w.await(ctx, o)
		switch {
		case err != nil:
			return w.last, err
		case got.err != nil:
			go o.leave(ctx, w.id)
			return w.limiter.failOpen(ctx, o, got.err)
		case got.ticket == nil:
			continue // it is not in line any more
		case !w.matches(got.ticket):
			w.limiter.refundLater(o.line, *got.ticket)
		default:
			if d, err = w.taken(ctx, o, got.ticket); err != nil || d.Granted {
				return d, err
			}
		}
		w.end()
	}
}

// ask reserves. It is not done if the claim joined the line instead.
func (w *waiter) ask(ctx context.Context, o *operation) (d Decision, done bool, err error) {
	ask := o.reserveRequest(Reservation{})
	ask.Ticket = script.TicketName(o.claims.queue, w.id)
	ask.Place.Flow = o.flow(o.claims.queue, w.request)
	d, err = w.limiter.send(ctx, o, ask)
	var late *TooLateError
	switch {
	case errors.As(err, &late):
		return late.Decision, true, denial(late.Decision)
	case err != nil || d.FailedOpen != nil: // it may have joined all the same
		go o.leave(ctx, w.id)
		return d, true, err
	case d.Granted:
		return d, true, nil
	case !d.Queued:
		return d, true, denial(d)
	}
	d.Queued, d.AlreadyQueued = false, false // it is withdrawn when the call returns
	w.last = d
	o.claims.joined(w, o.leases)
	return d, false, nil
}

func denial(d Decision) error { return &DeniedError{Cause: context.DeadlineExceeded, Decision: d} }

// await waits for the claim's result. After an error the claim has left the line.
func (w *waiter) await(ctx context.Context, o *operation) (result, error) {
	asked, left := time.Now(), time.Duration(math.MaxInt64)
	if !w.request.Deadline.IsZero() {
		left = w.request.Deadline.Sub(asked)
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	var err error
	select {
	case got := <-w.result:
		return got, nil
	case <-ctx.Done():
		err = fmt.Errorf("throttle: %s: %w", w.last.Reason(), contextError(ctx))
	case <-timer.C:
	}
	if err == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		// The caller may act on these: they count from now on.
		w.last.RetryIn = max(w.last.RetryIn-time.Since(asked), time.Millisecond)
		if w.last.Latest > 0 {
			w.last.Latest = max(w.last.Latest-time.Since(asked), w.last.RetryIn)
		}
		err = denial(w.last)
	}
	o.leave(ctx, w.id)
	return result{}, err
}

func (w *waiter) taken(ctx context.Context, o *operation, t *script.TakenTicket) (Decision, error) {
	if w.joins > 1 {
		o.leave(ctx, w.id) // it may have joined again
	}
	ticket := o.taken(*t)
	w.limiter.config.Observer.Taken(o.Name, []TakenTicket{ticket})
	if w.request.IdempotencyKey != "" { // it is granted once more, to record the key
		d, err := w.limiter.replace(ctx, o, ticket, true)
		if err != nil || d.FailedOpen != nil {
			w.limiter.refundLater(o.line, *t)
		}
		return d, err
	}
	d := ticket.Decision
	d.Reservation.Request, d.Reservation.limiter = w.request, w.limiter
	if len(t.Windows) == len(o.windows) {
		d.Windows = o.states(t.Windows, t.At, true)
	}
	return d, nil
}

const leaveTimeout = time.Second

// leave withdraws a claim. If Redis does not answer, the claim stays in line. Once taken, it is
// refunded.
func (o *operation) leave(ctx context.Context, claim string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	_, _ = o.do(ctx, script.Request{
		Op: script.Leave, Ticket: script.TicketName(o.claims.queue, claim), Keys: make([]string, len(o.scopes)),
	})
}

// matches reports whether the policy, as it is now, would have such a ticket wait for the request.
func (w *waiter) matches(t *script.TakenTicket) bool {
	cp, err := w.limiter.decides(w.operation.line, w.request)
	return err == nil && cp.claims == w.operation.claims && t.Granted != "" &&
		t.Costs == cp.costsText(w.request) && t.Flow == cp.flow(cp.claims.queue, w.request)
}

// end ends the claim, and gives back what it got and nobody read.
func (w *waiter) end() {
	if w.id == "" {
		return
	}
	w.operation.claims.drop(w) // first: it gets nothing afterwards
	w.id = ""
	select {
	case got := <-w.result:
		if got.ticket != nil {
			w.limiter.refundLater(w.operation.line, *got.ticket)
		}
	default:
	}
}
