package throttle

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Reservation is granted capacity. It may be copied. Its methods are safe for concurrent use.
//
// A reservation that failed open has no units, nor has the zero Reservation. Their methods do nothing, except Pause:
// it works after failing open, and fails for the zero Reservation. A decoded one has no limiter: see Limiter.Attach.
type Reservation struct {
	Request
	At time.Time // when it was granted, by the clock of Redis, to the microsecond; zero if it failed open
	ID string    // 16 hex digits; empty if nothing was counted, because the request failed open

	grantor *compiledPolicy // that granted it; nil if nothing was counted
	limiter *Limiter
}

// A Refund describes what Reservation.Cancel did. It is zero for a reservation that failed open.
type Refund struct {
	At          time.Time     // when, by the clock of Redis
	ClockBehind time.Duration // as Decision.ClockBehind
	Cancelled   bool          // by this call; false if it was cancelled before, or had no units
	Windows     []WindowState // after it, in the policy's order
}

// Cancel gives back the units of the reservation that still count. It does so once, however often it is called, and
// ends a Hold. After an error, which is Limiter.Reserve's, the Hold goes on, and units may still count: call it again.
func (r Reservation) Cancel(ctx context.Context) (Refund, error) {
	o, err := r.operation(ctx)
	if o == nil {
		return Refund{}, err
	}
	held, isHeld := r.limiter.holds.Load(r.ID)
	if isHeld {
		held.(*hold).cancels.Add(1)
		defer held.(*hold).cancels.Add(-1)
	}
	a, err := o.askFor(ctx, r, script.Request{Op: script.Cancel, Never: o.neverCounted(r)})
	if err != nil {
		return Refund{}, err
	}
	if isHeld && r.limiter.holds.CompareAndDelete(r.ID, held) {
		held.(*hold).stop()
	}
	o.claims.takeIn(0)
	d := o.decision(a)
	if a.Status == script.Done {
		tell(r.limiter, Correction{Cancelled: true, Reservation: r, Requests: o.change(a.OldCosts, nil)})
	}
	return Refund{d.At, d.ClockBehind, a.Status == script.Done, d.Windows}, nil
}

// Settle corrects the reservation to its real cost, per unit, in all windows but Concurrency windows. Overestimates
// are refunded at once, as far as they still count. Underestimates are charged at once, even above the limit, and
// later requests wait for them. Units that actual does not name stay as they are. After several Settles that charge, a
// refund gives units back as if the first had charged all of them: some may go on counting for up to a period. A higher
// cost after a lower one is charged, even if the lower one came too late to refund anything.
//
// It returns the corrected reservation. Settle and Cancel go by the last correction, whether they are called on the
// old reservation or on the corrected one. After a Cancel, Settle changes nothing. Errors are Limiter.Reserve's.
func (r Reservation) Settle(ctx context.Context, actual map[string]int64) (Reservation, error) {
	o, err := r.operation(ctx)
	if o == nil {
		return r, err
	}
	if err := r.grantor.checkUnits("actual", actual); err != nil && o.checkUnits("actual", actual) != nil {
		return r, err // neither the policy that granted it nor the present one has these units
	}
	costs, never := make([]int64, len(o.windows)), o.neverCounted(r)
	for i, w := range o.windows {
		cost, isNamed := actual[w.Unit]
		hasCounted, isHigher := !slices.Contains(never, i+1), cost > r.CostOf(w.Unit)
		costs[i] = costStays
		if isNamed && !w.Algorithm.Leases() && (hasCounted || isHigher) { // a window that has not counted it has nothing to refund
			costs[i] = cost
		}
	}
	if slices.Max(costs) == costStays {
		return r, nil
	}
	a, err := o.askFor(ctx, r, script.Request{Op: script.Settle, Actual: costs})
	if err != nil {
		return r, err
	}
	if a.Status == script.Done {
		o.claims.takeIn(0)
		tell(r.limiter, Correction{Cost: maps.Clone(actual), Reservation: r, Requests: o.change(a.OldCosts, costs)})
	}
	r.Cost = maps.Collect(maps.All(r.Cost)) // a copy that is not nil
	maps.Copy(r.Cost, actual)
	return r, nil
}

// neverCounted returns the windows, by numbers from 1, that have not counted a reservation, as its policy had other
// windows when it was granted. They must give nothing back for it: those units may be of other reservations.
func (o *operation) neverCounted(r Reservation) (windows []int) {
	if r.grantor == o.compiledPolicy {
		return nil
	}
	now, then := o.Tenants[r.Tenant].Windows, r.grantor.Tenants[r.Tenant].Windows
	for i, w := range o.counting {
		if !slices.ContainsFunc(r.grantor.counting, func(was Window) bool {
			return w.With(now[w.Name]).countsOn(was.With(then[was.Name]))
		}) {
			windows = append(windows, i+1)
		}
	}
	return windows
}

// countsOn reports whether a window goes on with the units that another version of it has counted.
func (w Window) countsOn(was Window) bool {
	sameCount := w.Name == was.Name && w.Algorithm == was.Algorithm && w.Unit == was.Unit && slices.Equal(w.Per, was.Per)
	sameTimes := w.Period == was.Period && w.Margin == was.Margin && w.Resets == was.Resets && w.Timezone == was.Timezone
	sameRate := w.Burst == 0 || w.Limit == was.Limit // GCRA windows, which alone have a Burst, drain by their Limit
	return sameCount && sameTimes && sameRate
}

// costStays, as script.Request.Actual of a window, leaves its units as they are.
const costStays = -1

// change returns how many more Requests a correction charged. `old` is the cost in Redis, by window, or nil if this is
// the first correction. `actual` is the corrected one, or nil if all was given back.
func (o *operation) change(old, actual []int64) int64 {
	i := slices.IndexFunc(o.windows, func(w Window) bool {
		return w.Unit == Requests && !w.Algorithm.Leases() // leases keep no correction
	})
	was := o.request.CostOf(Requests)
	if i >= 0 && old != nil {
		was = old[i]
	}
	switch {
	case actual == nil:
		return -was
	case i < 0 || actual[i] == costStays:
		return 0
	}
	return actual[i] - was
}

// releaseTimeout bounds a release, which does not end with the work's context.
const releaseTimeout = 5 * time.Second

// Release gives back what Concurrency windows hold for the reservation, at the end of the work, and ends a Hold. It
// takes 5 seconds at most, even if ctx has ended. A second one, or one after the lease expired, frees nothing. Errors
// are Limiter.Reserve's. After an error the units stay held until their lease ends.
func (r Reservation) Release(ctx context.Context) error {
	cp, err := r.policy()
	if cp == nil {
		return err
	}
	if held, ok := r.limiter.holds.LoadAndDelete(r.ID); ok {
		h := held.(*hold)
		h.stop() // Redis refuses a renewal that is still on its way
		defer h.cancel(context.Canceled)
	}
	if !cp.script.Leases { // not Lease() == 0: it is 0 when the cost was settled to 0, and units stay held
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	o, err := r.operation(ctx)
	if err != nil {
		return err
	}
	if _, err = o.askFor(ctx, r, script.Request{Op: script.Release}); err == nil {
		o.claims.takeIn(0)
	}
	return err
}

// Renew extends what Concurrency windows hold for the reservation to one lease from now. It returns false if the
// units were given back, or if the lease expired and others have the room or wait for it: the work must end. Hold
// calls Renew in time. Errors are Limiter.Reserve's.
func (r Reservation) Renew(ctx context.Context) (held bool, err error) {
	o, err := r.operation(ctx)
	if err != nil || r.Lease() == 0 { // without a lease there is none to lose
		return err == nil, err
	}
	a, err := o.askFor(ctx, r, script.Request{Op: script.Renew, Never: o.neverCounted(r)})
	return a.Status == script.Done, err
}

// Lease returns how long Concurrency windows hold the reservation's units without a Renew: the
// shortest Window.Lease among them; 0 if they hold none, or after a Settle to 0: then Renew the original.
func (r Reservation) Lease() time.Duration {
	cp, err := r.policy()
	if cp == nil || err != nil {
		return 0
	}
	lease := time.Duration(0)
	for _, w := range cp.counting {
		if w.Algorithm.Leases() && r.CostOf(w.Unit) > 0 && (lease == 0 || w.Lease < lease) {
			lease = w.Lease
		}
	}
	return lease
}

// policy returns the policy of the reservation, even if it was removed, or nil if nothing was counted.
func (r Reservation) policy() (*compiledPolicy, error) {
	switch {
	case r.grantor != nil:
		return r.limiter.policyOfLine(r.grantor.line, orRemoved)
	case r.ID != "":
		return nil, r.bad("id", r.ID, "must be of a reservation that a limiter of this process made")
	}
	return nil, nil
}

// operation prepares the reservation's request, or returns nil if there is nothing to do.
func (r Reservation) operation(ctx context.Context) (*operation, error) {
	cp, err := r.policy()
	if cp == nil || err != nil {
		return nil, err
	}
	tenant, _ := r.limiter.tenant(ctx, cp, r.Tenant)
	o, err := cp.newOperation(r.Request, tenant, allValues)
	if err != nil { // the policy has other scopes by now, which have not counted the reservation
		return cp.newOperation(r.Request, tenant, orPartial)
	}
	return o, err
}

// askFor completes a request about a reservation, and sends it. The caller has set the verb and its fields.
func (o *operation) askFor(ctx context.Context, r Reservation, ask script.Request) (script.Answer, error) {
	ask.ID, ask.Settings, ask.Keys, ask.Cost = r.ID, o.tenantSettings(), o.keys, o.costsText(o.request)
	ask.At = max(0, r.At.UnixMicro())
	return o.do(ctx, ask)
}
