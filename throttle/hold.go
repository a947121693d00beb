package throttle

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// releaseTimeout bounds a release, which does not end with the work's context.
const releaseTimeout = 5 * time.Second

// A Hold keeps a reservation while its work goes on: see Reservation.Hold. It is safe for
// concurrent use.
type Hold struct {
	cancel context.CancelCauseFunc // of the work; nil without a lease
	stop   func()                  // stops the renewing; nil without a lease

	cancelled atomic.Bool
	release   sync.Once
	released  error

	mu          sync.Mutex // held while the reservation is corrected or cancelled
	reservation Reservation
}

// Hold keeps what Concurrency windows lend to the reservation: it renews the lease three times a
// lease, until Hold.Release, whatever becomes of ctx. Until then the Caller of ctx counts as holding
// slots: see Limiter.Wait. Without a lease it does nothing, and the context returned is ctx.
//
// The context is for the work. It ends with ctx and at Hold.Release. It ends with the cause
// ErrLeaseLost if no renewal succeeded in time, or others have the room.
func (r Reservation) Hold(ctx context.Context) (context.Context, *Hold) {
	h := &Hold{reservation: r}
	lease := r.Lease()
	if lease == 0 {
		return ctx, h
	}
	work, cancel := context.WithCancelCause(ctx)
	h.cancel = cancel
	caller := CallerFrom(ctx)
	caller.hold(r)
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		h.renew(ctx, r, lease)
	}()
	h.stop = func() {
		stop()
		<-stopped // a renewal under way
		caller.drop(r)
	}
	return work, h
}

// lost ends the work's context, unless a Cancel was the reason.
func (h *Hold) lost(refused bool) {
	if refused { // perhaps by a Cancel that is under way
		h.mu.Lock()
		defer h.mu.Unlock()
	}
	if !h.cancelled.Load() {
		h.cancel(ErrLeaseLost)
	}
}

// Reservation returns the reservation as it was settled last.
func (h *Hold) Reservation() Reservation {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.reservation
}

// Settle is Reservation.Settle. A later Settle or Cancel goes on from the correction.
func (h *Hold) Settle(ctx context.Context, actual map[string]int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	settled, err := h.reservation.Settle(ctx, actual)
	h.reservation = settled
	return err
}

// Cancel is Reservation.Cancel, and stops the renewing. The work's context goes on until Release.
// After an error, the reservation is still held.
func (h *Hold) Cancel(ctx context.Context) error {
	h.mu.Lock()
	_, err := h.reservation.Cancel(ctx)
	if err == nil {
		h.cancelled.Store(true)
	}
	h.mu.Unlock()
	if err == nil && h.stop != nil {
		h.stop()
	}
	return err
}

// Release stops the renewing, gives back what is held, and ends the work's context. It takes 5
// seconds at most, even if ctx has ended. Later calls only return the same error. Errors are
// Reservation.Release's.
func (h *Hold) Release(ctx context.Context) error {
	h.release.Do(func() {
		if h.stop == nil {
			return
		}
		h.stop() // a renewal after the release would take the room again
		defer h.cancel(context.Canceled)
		if h.cancelled.Load() {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		h.released = h.Reservation().Release(ctx)
	})
	return h.released
}

// renew renews three times a lease, until ctx ends. Shortly before a lease runs out that could not be
// renewed, the work ends, and renew goes on trying. A renewal that is refused, because others have the
// room, ends both.
func (h *Hold) renew(ctx context.Context, r Reservation, lease time.Duration) {
	// Not by the end of a renewal, which may wait for Redis for longer than the lease lasts.
	expiry := time.AfterFunc(lease-lease/10, func() { h.lost(false) })
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
		case ctx.Err() != nil:
			return
		case err != nil:
			timer.Reset(lease / 20)
		case !held:
			h.lost(true)
			return
		default:
			if now := r.Lease(); now > 0 {
				lease = now // the policy's lease may be another by now
			}
			expiry.Reset(lease - lease/10 - time.Since(asked))
			timer.Reset(lease / 3)
		}
	}
}
