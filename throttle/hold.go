package throttle

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// releaseTimeout bounds a release, which is made also after the work's context has ended.
const releaseTimeout = 5 * time.Second

// A Hold keeps a reservation for as long as its work goes on: see Reservation.Hold. It is safe for
// concurrent use.
type Hold struct {
	cancel context.CancelCauseFunc // nil if nothing is held by a lease, as stop
	stop   func()

	cancelled atomic.Bool
	release   sync.Once
	released  error

	mu          sync.Mutex // held while the reservation is corrected or cancelled
	reservation Reservation
}

// Hold keeps what Concurrency windows hold for the reservation, by renewing it until Hold.Release,
// also after ctx has ended. The context returned is for the work. It ends with the cause
// ErrLeaseLost when the lease is lost: it could not be renewed in time, or others have the room. It
// also ends at Hold.Release.
//
// Where nothing is held by a lease the context is ctx, and Hold.Release does nothing.
func (r Reservation) Hold(ctx context.Context) (context.Context, *Hold) {
	h := &Hold{reservation: r}
	if r.Lease() == 0 {
		return ctx, h
	}
	work, cancel := context.WithCancelCause(ctx)
	h.cancel = cancel
	h.stop = r.KeepRenewing(ctx, func(refused bool) {
		if refused { // perhaps by a Cancel that is under way
			h.mu.Lock()
			defer h.mu.Unlock()
		}
		if !h.cancelled.Load() {
			cancel(ErrLeaseLost)
		}
	})
	return work, h
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

// Cancel is Reservation.Cancel, and ends the renewing. The context that Reservation.Hold returned
// goes on until Release.
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

// Release ends the renewing and the work's context, and gives back what is held. It does so once:
// later calls return the same error. It takes no longer than some seconds, and does not heed the end
// of ctx. After an error, what is held ends with its lease.
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

// KeepRenewing renews what Concurrency windows hold for the reservation, three times a lease, until
// stop is called, also after ctx has ended. Hold is the same with a context and a release.
//
// It calls lost once, shortly before a lease runs out that could not be renewed, and goes on trying.
// If a renewal is refused, because others have the room, it calls lost with refused and ends. Stop
// waits for a renewal under way; a Release should follow. If nothing is held by a lease, neither
// KeepRenewing nor stop does anything. Lost may be nil. Until stop, the Job of ctx counts as holding
// slots: see Limiter.WaitUpTo.
func (r Reservation) KeepRenewing(ctx context.Context, lost func(refused bool)) (stop func()) {
	lease := r.Lease()
	if lease == 0 {
		return func() {}
	}
	if lost == nil {
		lost = func(bool) {}
	}
	job := JobFrom(ctx)
	job.hold(r)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		r.keepRenewing(ctx, lease, lost)
	}()
	return func() {
		cancel()
		<-stopped
		job.drop(r)
	}
}

func (r Reservation) keepRenewing(ctx context.Context, lease time.Duration, lost func(refused bool)) {
	// Not by the end of a renewal, which may wait for Redis for longer than the lease lasts.
	expiry := time.AfterFunc(lease-lease/10, func() { lost(false) })
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
			lost(true)
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
