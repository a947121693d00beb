package throttle

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Refusal is the effect of a refusal by the upstream.
type Refusal struct {
	// Adapted is the rate in force, or nil unless this refusal changed it or began to spread calls.
	Adapted *Adapted

	// Pause is the length of a pause that begins by this refusal. It is 0 if the refusal only extends one, or, in a
	// policy that adapts, if its length is a guess and Adapted is nil.
	Pause time.Duration

	Policy string
	Tenant string // whose call was refused; empty if it had no tenant
}

// Resume ends at once a pause that the upstream asked for, if any, and restores the rate that the policy adapted
// (Policy.KeepRate), for the scopes of the request that Policy.UpstreamShared selects. Errors are Reserve's.
func (l *Limiter) Resume(ctx context.Context, r Request) error {
	_, _, err := Reservation{Request: r, limiter: l}.report(ctx, script.Request{Op: script.Resume})
	return err
}

// Pause reports that the upstream refused the reservation's call, and for how long. It stops grants
// on all workers, for the scopes of the reservation that Policy.UpstreamShared selects. A later refusal
// extends the pause. After it, grants follow Policy.KeepRate. Denied requests find it in
// Decision.Pause, with the cause, such as "429": at most 128 bytes, or empty.
//
// A pause below a millisecond, even below 0, means that the upstream did not say how long: so time.Until of a reset
// may be passed on. A policy that adapts then pauses for an eighth of its shortest period, at most 1 second, and
// doubles that while refusals go on. With KeepRate, or if no window that the refusal applies to has a Period, the
// pause is DefaultPause. Policy.MaxPause bounds every pause.
//
// Pause returns the refusal's effect, empty if an earlier one covers it. Errors are Limiter.Reserve's.
func (r Reservation) Pause(ctx context.Context, pause time.Duration, cause string) (Refusal, error) {
	switch {
	case r.limiter == nil:
		return Refusal{}, fmt.Errorf("%w %q", ErrUnknownPolicy, r.Policy)
	case len(cause) > 128:
		return Refusal{}, r.bad("cause", cause, "must be at most 128 bytes")
	}
	cp, err := r.limiter.policyFor(r.Policy, r.Tenant, orRemoved)
	if err != nil {
		return Refusal{}, err
	}
	refused := script.Refused{Adapt: !cp.KeepRate, Reporter: r.limiter.config.Name, Cause: cause, Tenant: r.Tenant}
	if pause < time.Millisecond {
		pause, refused.Guess = DefaultPause, cp.MaxPause.Microseconds()
	}
	pause = min(pause, cp.MaxPause)
	refused.Wait = pause.Microseconds()
	refusal := Refusal{Policy: r.Policy, Tenant: r.Tenant}
	o, a, err := r.report(ctx, script.Request{Op: script.Pause, Refused: &refused})
	if err != nil {
		return refusal, err
	}
	if a.Status == script.Done {
		refusal.Pause = pause // all that is known if an earlier reply was lost
		if a.Pause.Until > a.At {
			refusal.Pause = micros(a.Pause.Until - a.At)
		}
		if a.Adapted.Changed == a.At {
			refusal.Adapted = o.adapted(a.Adapted)
		}
	}
	if refusal.Pause > 0 {
		about := []any{"policy", refusal.Policy, "tenant", refusal.Tenant, "for", refusal.Pause}
		if refusal.Adapted != nil {
			about = append(about, "rate", refusal.Adapted.String())
		}
		r.limiter.config.Logger.Warn("throttle: the upstream refused a call: its policy pauses", about...)
	}
	tell(r.limiter, refusal)
	return refusal, nil
}

// ReportRemaining reports what the upstream has left, by its answer to the reservation's call: 0 to MaxLimit units,
// until a reset in more than 0 and at most MaxPeriod. Until then windows of the unit grant no more than that, less
// their grants since the reservation: at a first report only sliding windows know these. Scopes and errors are Pause's.
func (r Reservation) ReportRemaining(ctx context.Context, unit string, units int64, reset time.Duration) error {
	cp, err := r.policy()
	switch {
	case cp == nil || err != nil:
		return err
	case !slices.Contains(cp.units, unit):
		return r.bad("unit", unit, cp.unitsHint())
	case units < 0 || units > MaxLimit:
		return r.bad("units", units, fmt.Sprintf("must be 0 to %d", int64(MaxLimit)))
	case reset <= 0 || reset > MaxPeriod:
		return r.bad("reset", reset, fmt.Sprintf("must be above 0 and at most %v", MaxPeriod))
	}
	left := &script.Left{Unit: unit, Units: units, Reset: max(1, reset.Microseconds())}
	_, _, err = r.report(ctx, script.Request{Op: script.Remaining, Left: left})
	return err
}

// report sends what the upstream says about the scopes that Policy.UpstreamShared selects, even of a removed policy.
func (r Reservation) report(ctx context.Context, ask script.Request) (*operation, script.Answer, error) {
	cp, err := r.limiter.policyFor(r.Policy, r.Tenant, orRemoved)
	if err != nil {
		return nil, script.Answer{}, err
	}
	tenant, _ := r.limiter.tenant(ctx, cp, r.Tenant)
	o, err := cp.newOperation(r.Request, tenant, allValues)
	if err != nil {
		return nil, script.Answer{}, err
	}
	ask.Scopes = o.upstream
	a, err := o.askFor(ctx, r, ask)
	return o, a, err
}
