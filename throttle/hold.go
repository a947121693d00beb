package throttle

import (
	"context"
	"time"
)

// A hold renews the lease of a reservation: see Reservation.Hold. It is in Limiter.holds until the
// reservation is released or cancelled.
type hold struct {
	caller  *Caller
	cancel  context.CancelCauseFunc // of the work
	policy  string
	stop    context.CancelFunc // of the renewing
	stopped chan struct{}      // closed when the renewing has ended
}

// Hold keeps what Concurrency windows lend to the reservation: it renews the lease three times a
// lease, until Release or Cancel, whatever becomes of ctx. Until then the Caller of ctx counts as
// holding slots: see Limiter.Wait. Without a lease it does nothing, and returns ctx. Call it once.
//
// The context returned is for the work. It ends with ctx and at Release. It ends with the cause
// ErrLeaseLost if no renewal succeeded in time, or others have the room. After a Cancel only ctx
// ends it.
func (r Reservation) Hold(ctx context.Context) context.Context {
	lease := r.Lease()
	if lease == 0 {
		return ctx
	}
	work, cancel := context.WithCancelCause(ctx)
	renewing, stop := context.WithCancel(context.WithoutCancel(ctx))
	h := &hold{CallerFrom(ctx), cancel, r.Policy, stop, make(chan struct{})}
	if before, held := r.limiter.holds.Swap(r.ID, h); held {
		before.(*hold).end()
	}
	go func() {
		defer close(h.stopped)
		r.keepRenewing(renewing, h, lease)
	}()
	return work
}

// end ends the renewing, and waits for a renewal that is under way.
func (h *hold) end() {
	h.stop()
	<-h.stopped
}

// holdsFrom reports whether calls of a job hold slots of this policy or of one later in name order.
func (l *Limiter) holdsFrom(policy string, caller *Caller) (found bool) {
	l.holds.Range(func(_, held any) bool {
		h := held.(*hold)
		found = caller != nil && h.caller == caller && h.policy >= policy
		return !found
	})
	return found
}

// endWork ends the work, as the lease is lost, and reports true. It does nothing while the reservation is being
// released or cancelled.
func (r Reservation) endWork(h *hold) bool {
	now, _ := r.limiter.holds.Load(r.ID)
	if now != h {
		return false
	}
	h.cancel(ErrLeaseLost)
	return true
}

// keepRenewing renews three times a lease, until ctx ends. If renewals fail, it ends the work shortly before the
// lease runs out, and goes on trying. A renewal that is refused, because others have the room, ends both.
func (r Reservation) keepRenewing(ctx context.Context, h *hold, lease time.Duration) {
	// A timer ends the work in time, as a renewal may wait for Redis for longer than the lease lasts.
	expiry := time.AfterFunc(lease-lease/10, func() { r.endWork(h) })
	defer expiry.Stop()
	timer := time.NewTimer(lease / 3)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		asked := time.Now()
		renewal, cancel := context.WithTimeout(ctx, lease/3)
		held, err := r.Renew(renewal)
		cancel()
		switch {
		case ctx.Err() != nil || err == nil && !held && r.endWork(h):
			return
		case err != nil || !held: // if refused, perhaps by a Cancel that is under way
			timer.Reset(lease / 20)
		default:
			if now := r.Lease(); now > 0 {
				lease = now // the policy's lease may be another by now
			}
			expiry.Reset(lease - lease/10 - time.Since(asked))
			timer.Reset(lease / 3)
		}
	}
}
