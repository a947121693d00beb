package throttle

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// Wait reserves, and while the request is denied it waits in line. It stands there by a ticket of
// its own, a claim, whatever the request's ticket: fair to the tickets of jobs, and withdrawn when
// Wait returns. It is for use outside of a job queue: inside one, a denied job gives its worker
// back. A request with an IdempotencyKey is charged once when it is granted.
//
// It returns a *TooLateError if the context's deadline comes first, at once if that is known. The
// error is a *DeniedError too, as whose Cause it comes. It returns a plain *DeniedError, at once, if
// the context's Job holds slots for which others may wait that this call would wait for: see
// WaitUpTo. If the context is cancelled, errors.Is finds the context's error and its cause in what
// it returns. Other errors are Reserve's.
func (l *Limiter) Wait(ctx context.Context, r Request) (Decision, error) {
	return l.wait(ctx, r, math.MaxInt64)
}

// WaitUpTo is Wait for maxWait at most. If that is over, or the request cannot fit within it, it
// returns a *DeniedError without a Cause, at once if that is known. With 0 it does not wait, and a
// ticket of the request joins the line as by Reserve.
//
// It also returns that error at once if the context's Job holds slots of a Concurrency window, and
// the request's policy has such windows and does not come later in name order. Otherwise two jobs
// could each hold a slot that the other waits for.
func (l *Limiter) WaitUpTo(ctx context.Context, r Request, maxWait time.Duration) (Decision, error) {
	return l.wait(ctx, r, max(0, maxWait))
}

func (l *Limiter) wait(ctx context.Context, r Request, most time.Duration) (Decision, error) {
	if most > 0 {
		r.Ticket, r.Key, r.Front = TicketID{}, "", false
	}
	if most == 0 || l.mayDeadlock(ctx, r.Policy) {
		d, err := l.Reserve(ctx, r)
		if err == nil && !d.Granted {
			err = &DeniedError{Decision: d, Request: r}
		}
		return d, err
	}
	w := waiter{limiter: l, request: r, began: time.Now(), most: most}
	return w.wait(ctx)
}

// mayDeadlock reports whether the job holds slots of a policy that does not come before this one.
func (l *Limiter) mayDeadlock(ctx context.Context, policy string) bool {
	job := JobFrom(ctx)
	cp, err := l.find(policy, false)
	return job != nil && err == nil && cp.leases && job.holdsFrom(policy)
}

// A waiter is one call that waits in place.
type waiter struct {
	limiter *Limiter
	request Request
	began   time.Time
	most    time.Duration // math.MaxInt64 is no limit

	claims *claims
	claim  *claim
	last   Decision // the newest denial
}

// left is how long the call may go on waiting, and whether the context's deadline says so.
func (w *waiter) left(ctx context.Context) (left time.Duration, byDeadline bool) {
	left = math.MaxInt64
	if w.most < math.MaxInt64 {
		left = w.most - time.Since(w.began)
	}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < left {
		return time.Until(deadline), true
	}
	return left, false
}

func (w *waiter) wait(ctx context.Context) (Decision, error) {
	defer w.end()
	for {
		o, err := w.limiter.checked(ctx, w.request)
		if err != nil {
			return Decision{}, err
		}
		if w.claim == nil {
			w.claims, w.claim = o.claims, o.claims.add()
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
			w.leaveLater(ctx, o)
			return w.limiter.failsOpen(ctx, o, got.err)
		case got.ticket == nil:
			continue // it is not in line any more
		case !w.matches(got.ticket):
			w.limiter.giveBackLater(w.request.Policy, *got.ticket)
			w.end()
			w.claim = nil // what was taken is told no more
			continue
		}
		return w.taken(ctx, o, got.ticket)
	}
}

// ask reserves, or has the claim join the line: then it is not done.
func (w *waiter) ask(ctx context.Context, o *operation) (d Decision, done bool, err error) {
	left, byDeadline := w.left(ctx)
	ask := o.reserving(reservationID(w.request))
	ask.Ticket = script.ClaimTicket(o.claims.queue, w.claim.id)
	ask.Place.Flow = script.ClaimFlow(o.claims.queue, o.flowMark, o.flowValues(w.request))
	if left < math.MaxInt64 {
		ask.Place.Deadline = max(1, left.Microseconds())
	}
	d, err = w.limiter.send(ctx, o, ask)
	switch {
	case err != nil:
		w.leaveLater(ctx, o) // it may have joined all the same
		return d, true, err
	case d.Granted:
		if d.FailedOpen != nil {
			w.leaveLater(ctx, o)
		}
		return d, true, nil
	case !d.Queued:
		return d, true, w.inTime(ctx, d, byDeadline)
	}
	d.Queued, d.AlreadyQueued = false, false // it is withdrawn when the call returns
	w.last = d
	o.claims.joined(w.claim, w.limiter, o.compiledPolicy, d)
	return d, false, nil
}

// inTime is the error of a call that does not fit in time.
func (w *waiter) inTime(ctx context.Context, d Decision, byDeadline bool) error {
	denied := &DeniedError{Decision: d, Request: w.request}
	if deadline, ok := ctx.Deadline(); ok && byDeadline {
		denied.Cause = &TooLateError{Decision: d, StartsAt: time.Now().Add(d.RetryInLeast), Deadline: deadline}
	}
	return denied
}

// await waits for what becomes of the claim. If it does not wait any longer, it leaves the line.
func (w *waiter) await(ctx context.Context, o *operation) (outcome, error) {
	var over <-chan time.Time
	if w.most < math.MaxInt64 {
		timer := time.NewTimer(w.most - time.Since(w.began))
		defer timer.Stop()
		over = timer.C
	}
	var err error
	asked := time.Now()
	select {
	case got := <-w.claim.got:
		return got, nil
	case <-over:
		// As the caller may act on it: how long it is from now on.
		w.last.RetryIn = max(w.last.RetryIn-time.Since(asked), time.Millisecond)
		w.last.RetryInMost = max(w.last.RetryInMost-time.Since(asked), w.last.RetryIn)
		err = w.inTime(ctx, w.last, false)
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = w.inTime(ctx, w.last, true)
		} else {
			err = fmt.Errorf("throttle: %s: %w", w.last.Reason(), ended(ctx))
		}
	}
	w.leave(ctx, o)
	return outcome{}, err
}

// taken is the decision about a claim that was taken from the line.
func (w *waiter) taken(ctx context.Context, o *operation, t *script.TakenTicket) (Decision, error) {
	if w.claim.asked > 1 {
		w.leave(ctx, o) // it may have joined again
	}
	if w.request.IdempotencyKey != "" {
		return w.byKey(ctx, o, t)
	}
	d := o.taken(*t).Decision
	d.Reservation.Request, d.Reservation.limiter = w.request, w.limiter
	if len(t.Windows) == len(o.windows) {
		d.Windows = o.states(t.Windows, t.At, true)
	}
	return d, nil
}

// byKey grants anew what was taken, so that its key is remembered.
func (w *waiter) byKey(ctx context.Context, o *operation, t *script.TakenTicket) (Decision, error) {
	ask := o.reserving(t.Granted)
	ask.At = t.At
	a, err := o.do(ctx, ask)
	if err != nil {
		w.limiter.giveBackLater(w.request.Policy, *t)
		return w.limiter.failsOpen(ctx, o, err)
	}
	d := o.decision(a)
	if !d.Granted {
		return d, w.inTime(ctx, d, false)
	}
	if a.Status == script.GrantedBefore { // to another call with the key
		w.limiter.giveBackLater(w.request.Policy, *t)
	}
	d.Reservation = Reservation{Request: w.request, At: d.At, ID: ask.ID, limiter: w.limiter}
	return d, nil
}

const leaveTimeout = time.Second

// leave withdraws the claim. One that stays, as Redis does not answer, is nobody's: it is given back
// if it is taken.
func (w *waiter) leave(ctx context.Context, o *operation) {
	o.claims.drop(w.claim)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	_, _ = o.do(ctx, script.Request{
		Op: script.Leave, Ticket: script.ClaimTicket(o.claims.queue, w.claim.id), Keys: make([]string, len(o.scopes)),
	})
}

// leaveLater is leave for when Redis may not answer.
func (w *waiter) leaveLater(ctx context.Context, o *operation) {
	o.claims.drop(w.claim)
	go w.leave(ctx, o)
}

// matches reports whether a ticket that was taken is what the policy, as it is now, would have wait.
func (w *waiter) matches(t *script.TakenTicket) bool {
	cp, err := w.limiter.find(w.request.Policy, true)
	return err == nil && t.Granted != "" && t.Costs == cp.costsText(w.request) &&
		t.Flow == script.ClaimFlow(w.claims.queue, cp.flowMark, cp.flowValues(w.request))
}

// end ends the claim, and gives back what it got meanwhile.
func (w *waiter) end() {
	if w.claim == nil {
		return
	}
	w.claims.drop(w.claim) // first: it gets nothing afterwards
	select {
	case got := <-w.claim.got:
		if got.ticket != nil {
			w.limiter.giveBackLater(w.request.Policy, *got.ticket)
		}
	default:
	}
}

func (l *Limiter) giveBackLater(policy string, tickets ...script.TakenTicket) {
	cp, err := l.find(policy, true)
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
		_ = l.Line(policy).Refund(ctx, taken) // or they run out
	}()
}

// ended is the context's error, with its cause if that is another.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}
