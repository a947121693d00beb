package throttle

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"
)

// A hold renews the lease of a reservation: see Reservation.Hold. Limiter.holds has it until it is released or cancelled.
type hold struct {
	caller *Caller
	cancel context.CancelCauseFunc // of the work
	policy string
	stop   context.CancelFunc // of the renewing

	cancels atomic.Int32 // calls of Cancel under way: a renewal that is refused meanwhile is no loss
}

// Hold keeps what Concurrency windows lend to the reservation: it renews the lease three times a lease, until Release,
// Cancel or the loss of the lease, whatever becomes of ctx. Until then the Caller of ctx counts as holding slots: see
// Limiter.Wait. Without a lease it does nothing, and returns ctx. Call it once.
//
// The context returned is for the work. It ends with ctx and at Release. It ends with the cause ErrLeaseLost if no
// renewal succeeded in time, or others have the room. After a Cancel only ctx ends it.
func (r Reservation) Hold(ctx context.Context) context.Context {
	lease := r.Lease()
	if lease == 0 {
		return ctx
	}
	work, cancel := context.WithCancelCause(ctx)
	renewing, stop := context.WithCancel(context.WithoutCancel(ctx))
	h := &hold{caller: CallerFrom(ctx), cancel: cancel, policy: r.Policy, stop: stop}
	if earlier, held := r.limiter.holds.Swap(r.ID, h); held {
		earlier.(*hold).stop()
	}
	go r.keepRenewing(renewing, h, lease)
	return work
}

// keepRenewing renews three times a lease, until ctx ends. If renewals fail, it ends the work shortly before the
// lease runs out, and goes on trying. A renewal that is refused, as others have the room, ends the work.
func (r Reservation) keepRenewing(ctx context.Context, h *hold, lease time.Duration) {
	// A timer ends the work in time, as a renewal may wait for Redis for longer than the lease lasts.
	expiry := time.AfterFunc(lease-lease/10, func() { h.cancel(ErrLeaseLost) })
	defer expiry.Stop()
	for delay := lease / 3; ; {
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return
		}
		asked := time.Now()
		renewal, cancel := context.WithTimeout(ctx, lease/3)
		renewed, err := r.Renew(renewal)
		cancel()
		cancelling := h.cancels.Load() > 0 // read before holds: a Cancel deletes the hold first, and then lowers cancels
		_, stands := r.limiter.holds.Load(r.ID)
		isRefused := err == nil && !renewed && stands && !cancelling // the lease is lost: see Renew
		switch {
		case renewed:
			lease = cmp.Or(r.Lease(), lease) // the policy's lease may be another by now
			expiry.Reset(lease - lease/10 - time.Since(asked))
			delay = lease / 3
		case isRefused:
			h.cancel(ErrLeaseLost)
			return
		default: // it failed; or a Release has ended the lease, or a Cancel, which may still fail
			delay = lease / 20
		}
	}
}
