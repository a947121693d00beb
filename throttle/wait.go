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
	r.Ticket, r.Key, r.Front = Ticket{}, "", false
	cp, err := l.find(r.Policy, r.Tenant)
	mayDeadlock := err == nil && cp.leases && CallerFrom(ctx).holdsFrom(r.Policy)
	if r.MaxWait < 0 || mayDeadlock {
		asked := r
		asked.Deadline, asked.MaxWait = time.Time{}, 0
		d, err := l.Reserve(ctx, asked)
		if err == nil && !d.Granted {
			err = &DeniedError{Decision: d, Request: r}
		}
		return d, err
	}
	began := time.Now()
	until, limited := ctx.Deadline()
	if end := began.Add(r.MaxWait); r.MaxWait > 0 && (!limited || end.Before(until)) {
		until = end
	}
	w := waiter{limiter: l, request: r, until: until}
	d, err := w.wait(ctx)
	if err == nil {
		l.config.Observer.Started(Start{Late: -1, Policy: d.Policy, Tenant: d.Tenant, Waited: time.Since(began)})
	}
	return d, err
}

// A waiter is one call that waits in place.
type waiter struct {
	limiter *Limiter
	request Request
	until   time.Time // zero is no limit

	claims    *claims
	claim     *claim
	operation *operation // by which the claim joined last
	last      Decision   // the newest denial
}

// left returns how long the call may go on waiting.
func (w *waiter) left() time.Duration {
	if w.until.IsZero() {
		return math.MaxInt64
	}
	return time.Until(w.until)
}

func (w *waiter) wait(ctx context.Context) (Decision, error) {
	defer w.end()
	for {
		o, err := w.limiter.checked(ctx, w.request)
		if err != nil {
			return Decision{}, err
		}
		if w.claim != nil && w.claims != o.claims {
			w.leaveLater(ctx, w.operation) // Policy.Shards has changed
			w.end()
			w.claim = nil
		}
		if w.claim == nil {
			w.claims, w.claim = o.claims, o.claims.add()
		}
		w.operation = o
		d, done, err := w.ask(ctx, o)
		if done {
			return d, err
		}
		got, err := w.await(ctx, o)
		switch {
		case err != nil:
			return w.last, err
		case got.err != nil:
			w.leaveLater(ctx, o)
			return w.limiter.failOpen(ctx, o, got.err)
		case got.ticket == nil:
			continue // it is not in line any more
		case !w.matches(got.ticket):
			w.limiter.refundLater(w.operation.line, *got.ticket)
			w.end()
			w.claim = nil // its results are read no more
			continue
		}
		if d, err = w.taken(ctx, o, got.ticket); err != nil || d.Granted {
			return d, err
		}
		w.end()
		w.claim = nil // what it got does not fit any more
	}
}

// ask reserves. It is not done if the claim joined the line instead.
func (w *waiter) ask(ctx context.Context, o *operation) (d Decision, done bool, err error) {
	ask := o.reserveRequest(Reservation{})
	left := w.left()
	ask.Place.MaxWait, ask.Place.Deadline = 0, 0 // it waits until then
	ask.Ticket = script.TicketName(o.claims.queue, w.claim.id)
	ask.Place.Flow = o.flow(o.claims.queue, w.request)
	if left < math.MaxInt64 {
		ask.Place.Deadline = max(1, left.Microseconds())
	}
	d, err = w.limiter.send(ctx, o, ask)
	var late *TooLateError
	switch {
	case errors.As(err, &late):
		return late.Decision, true, w.denial(late.Decision)
	case err != nil:
		w.leaveLater(ctx, o) // it may have joined all the same
		return d, true, err
	case d.Granted:
		if d.FailedOpen != nil {
			w.leaveLater(ctx, o)
		}
		return d, true, nil
	case !d.Queued:
		return d, true, w.denial(d)
	}
	d.Queued, d.AlreadyQueued = false, false // it is withdrawn when the call returns
	w.last = d
	o.claims.joined(w.claim, w.limiter, o.compiledPolicy, d)
	return d, false, nil
}

func (w *waiter) denial(d Decision) error {
	return &DeniedError{Cause: context.DeadlineExceeded, Decision: d, Request: w.request}
}

// await waits for the claim's result. After an error the claim has left the line.
func (w *waiter) await(ctx context.Context, o *operation) (result, error) {
	asked, timer := time.Now(), time.NewTimer(w.left())
	defer timer.Stop()
	var err error
	select {
	case got := <-w.claim.result:
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
		err = w.denial(w.last)
	}
	w.leave(ctx, o)
	return result{}, err
}

func (w *waiter) taken(ctx context.Context, o *operation, t *script.TakenTicket) (Decision, error) {
	if w.claim.joins > 1 {
		w.leave(ctx, o) // it may have joined again
	}
	ticket := o.taken(*t)
	w.limiter.config.Observer.Taken(o.Name, []TakenTicket{ticket})
	if w.request.IdempotencyKey != "" { // it is granted once more, to record the key
		d, err := w.limiter.replace(ctx, o, ticket)
		if err != nil || d.FailedOpen != nil {
			w.limiter.refundLater(w.operation.line, *t)
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

// leave withdraws the claim. If Redis does not answer, the claim stays in line. Once taken, it is
// refunded.
func (w *waiter) leave(ctx context.Context, o *operation) {
	o.claims.drop(w.claim)
	o.leave(ctx, w.claim)
}

func (o *operation) leave(ctx context.Context, c *claim) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	_, _ = o.do(ctx, script.Request{
		Op: script.Leave, Ticket: script.TicketName(o.claims.queue, c.id), Keys: make([]string, len(o.scopes)),
	})
}

// leaveLater is leave in the background, as Redis may not answer.
func (w *waiter) leaveLater(ctx context.Context, o *operation) {
	o.claims.drop(w.claim)
	go o.leave(ctx, w.claim)
}

// matches reports whether the policy, as it is now, would have such a ticket wait for the request.
func (w *waiter) matches(t *script.TakenTicket) bool {
	cp, err := w.limiter.find(w.request.Policy, w.request.Tenant)
	if err != nil { // it was removed
		cp, err = w.limiter.findLine(w.operation.line, true)
	}
	return err == nil && cp.claims == w.claims && t.Granted != "" && t.Costs == cp.costsText(w.request) &&
		t.Flow == cp.flow(w.claims.queue, w.request)
}

// end ends the claim, and gives back what it got meanwhile.
func (w *waiter) end() {
	if w.claim == nil {
		return
	}
	w.claims.drop(w.claim) // first: it gets nothing afterwards
	select {
	case got := <-w.claim.result:
		if got.ticket != nil {
			w.limiter.refundLater(w.operation.line, *got.ticket)
		}
	default:
	}
}

func (l *Limiter) refundLater(line string, tickets ...script.TakenTicket) {
	cp, err := l.findLine(line, true)
	if err != nil || len(tickets) == 0 {
		return
	}
	taken := make([]TakenTicket, len(tickets))
	for i, t := range tickets {
		taken[i] = cp.taken(t)
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
		defer cancel()
		_ = l.Line(line).Refund(ctx, taken) // or they run out
	}()
}
