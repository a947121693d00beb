package throttle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// Cancel gives the units of a reservation back, as far as they still count: never more than it
// took, and once, however often it is called. The decision returned carries the windows as
// they are then; Granted says that something was done. A reservation that failed open took nothing, and
// cancelling it does nothing. Errors are Reserve's.
func (l *Limiter) Cancel(ctx context.Context, r Reservation) (Decision, error) {
	if r.ID == "" {
		return Decision{}, nil
	}
	o, err := l.reserved(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	a, err := o.settle(ctx, r, script.Cancel, "")
	if err != nil {
		return Decision{}, err
	}
	o.claims.freed()
	return o.decision(a), nil
}

// Release gives back what Concurrency windows hold for a reservation, at the end of its attempt. Of
// all other windows it changes nothing. Releasing twice, or what ran out, does nothing. Errors are
// Reserve's, but an unknown policy holds nothing.
func (l *Limiter) Release(ctx context.Context, r Reservation) error {
	cp, err := l.find(r.Policy, true)
	if err != nil || r.ID == "" || !cp.leases {
		return nil
	}
	o, err := l.reserved(ctx, r)
	if err != nil {
		return err
	}
	if _, err = o.settle(ctx, r, script.Release, ""); err == nil {
		JobFrom(ctx).drop(r)
		o.claims.freed()
	}
	return err
}

// Renew keeps what Concurrency windows hold for a reservation for another lease, from now on. It is
// false if that ran out, or was given back, and the room is somebody else's now: the attempt must end.
// Errors are Reserve's.
func (l *Limiter) Renew(ctx context.Context, r Reservation) (held bool, err error) {
	if l.Lease(r) == 0 {
		return true, nil
	}
	o, err := l.reserved(ctx, r)
	if err != nil {
		return false, err
	}
	a, err := o.settle(ctx, r, script.Renew, "")
	return a.Status == script.Granted, err
}

// Lease is the shortest lease of the Concurrency windows in which a reservation holds something, or
// 0 if there are none: it has to be renewed before, and released in the end.
func (l *Limiter) Lease(r Reservation) time.Duration {
	cp, err := l.find(r.Policy, true)
	if err != nil || r.ID == "" || !cp.leases {
		return 0
	}
	lease := time.Duration(0)
	for i, w := range cp.Windows {
		if cp.known[i].leases && r.Request.costOf(w.Unit) > 0 && (lease == 0 || w.Lease < lease) {
			lease = w.Lease
		}
	}
	return lease
}

// KeepRenewing renews what Concurrency windows hold for a reservation, three times a lease, until
// stop is called, also after the context has ended: what it is held for may go on. Stop waits for a
// renewal under way; Release must follow. Once, shortly before a lease runs out that could not be
// renewed, it calls lost, and goes on; if a renewal is refused, because the room is somebody
// else's, it calls lost with refused and ends. If the reservation holds nothing by leases (Lease is
// 0), it does nothing; neither does stop. Until stop, the context's Job counts as holding slots: see
// WaitUpTo.
func (l *Limiter) KeepRenewing(ctx context.Context, r Reservation, lost func(refused bool)) (stop func()) {
	lease := l.Lease(r)
	if lease == 0 {
		return func() {}
	}
	job := JobFrom(ctx)
	job.hold(r)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		l.keepRenewing(ctx, r, lease, lost)
	}()
	return func() {
		cancel()
		<-stopped
		job.drop(r)
	}
}

func (l *Limiter) keepRenewing(ctx context.Context, r Reservation, lease time.Duration, lost func(refused bool)) {
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
		held, err := l.Renew(renewal, r)
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
			if now := l.Lease(r); now > 0 {
				lease = now // the policy's lease may be another by now
			}
			expiry.Reset(lease - lease/10 - time.Since(asked))
			timer.Reset(lease / 3)
		}
	}
}

// Settle says what a reservation really cost, per unit, and corrects it in all windows of the unit
// but Concurrency windows. Overestimates are refunded at once, as far as they still count.
// Underestimates are charged at once, even above the limit, and later requests wait for them. Units
// that are not named stay as they are.
//
// It returns the reservation as it is then, for a later Settle or Cancel. After a Cancel it changes
// nothing. The same correction, asked for again, is made once. Errors are Reserve's.
func (l *Limiter) Settle(ctx context.Context, r Reservation, actual map[string]int64) (Reservation, error) {
	if r.ID == "" {
		return r, nil
	}
	o, err := l.reserved(ctx, r)
	if err != nil {
		return r, err
	}
	if err := o.checkUnits("actual", actual); err != nil {
		return r, err
	}
	change, before := false, slices.Clone(o.costs)
	for i, w := range o.windows {
		cost, ok := actual[w.Unit]
		if o.costs[i] = cost - o.costs[i]; !ok || o.known[i].leases {
			o.costs[i] = 0
		}
		change = change || o.costs[i] != 0
	}
	if !change {
		return r, nil
	}
	correction := sha256.Sum256(fmt.Append(nil, before, o.costs))
	if _, err := o.settle(ctx, r, script.Settle, script.SettleWord(hex.EncodeToString(correction[:8]), o.costs)); err != nil {
		return r, err
	}
	settled := maps.Clone(r.Cost)
	if settled == nil {
		settled = map[string]int64{}
	}
	maps.Copy(settled, actual)
	r.Cost = settled
	return r, nil
}

// reserved makes the request of a reservation ready, also of a policy that was removed since.
func (l *Limiter) reserved(ctx context.Context, r Reservation) (*operation, error) {
	cp, err := l.find(r.Policy, true)
	if err != nil {
		return nil, err
	}
	return l.operation(ctx, cp, r.Request)
}

// settle sends what becomes of a reservation after it was granted.
func (o *operation) settle(ctx context.Context, r Reservation, op, word string) (script.Answer, error) {
	ask := o.ask(op, r.ID)
	if ask.Word = word; !r.At.IsZero() {
		ask.At = r.At.UnixMicro()
	}
	return o.do(ctx, ask)
}
