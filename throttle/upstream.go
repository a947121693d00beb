package throttle

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// After a pause, one window's worth is let out evenly over a ramp: as long as the pause was, within
// minRamp and maxRamp. Whatever is refused on the ramp or shortly after it doubles the next one.
const (
	minRamp = time.Second
	maxRamp = time.Minute
)

// Pause grants nothing for a while, from now on, in the scopes that the policy's Upstream names,
// with the values of the request. It is Reservation.Pause by hand: the request needs a policy and
// what its scopes are counted by. Resume ends it.
//
// The pause is above 0 and at most MaxPeriod. Errors are Reserve's.
func (l *Limiter) Pause(ctx context.Context, r Request, pause time.Duration) error {
	return l.pause(ctx, Reservation{Request: r}, pause)
}

// Resume ends a pause at once, and also the gradual opening after one. The scopes are those of
// Pause. Errors are Reserve's.
func (l *Limiter) Resume(ctx context.Context, r Request) error {
	return l.hear(ctx, Reservation{Request: r}, script.Resume, script.ResumeWord)
}

// Pause passes on that the upstream refused the reservation's call, and for how long. Until then
// nothing is granted, on any worker, in the scopes that the policy's Upstream names, with the values
// by which the reservation was granted. Tickets that wait keep their places. A later refusal extends
// the pause. Afterwards the windows open gradually.
//
// The pause is above 0 and at most MaxPeriod. Errors are Limiter.Reserve's and ErrDetached.
func (r Reservation) Pause(ctx context.Context, pause time.Duration) error {
	if r.limiter == nil {
		return ErrDetached
	}
	if r.ID == "" {
		r.At = time.Time{} // by this machine's clock
	}
	return r.limiter.pause(ctx, r, pause)
}

func (l *Limiter) pause(ctx context.Context, r Reservation, pause time.Duration) error {
	if pause <= 0 || pause > MaxPeriod {
		return &RequestError{Policy: r.Policy, Field: "pause", Value: pause, Hint: fmt.Sprintf("must be above 0 and at most %v", MaxPeriod)}
	}
	ramp := min(max(pause, minRamp), maxRamp)
	return l.hear(ctx, r, script.Pause, func(places []int) string {
		return script.PauseWord(places, max(1, pause.Microseconds()), ramp.Microseconds(), maxRamp.Microseconds())
	})
}

// Remaining is what an upstream says of its own limit.
type Remaining struct {
	Unit  string        // what it counts; "" is Requests
	Units int64         // how many are left: 0 to MaxLimit
	Reset time.Duration // how long until it counts anew: above 0 and at most MaxPeriod
}

// ReportRemaining passes on how many units the upstream has left, by its answer to the reservation's
// call. What was granted since then is subtracted. Until the upstream's reset, windows of the unit
// grant no more than that, even if they have more room: others may use the same key. The scopes are
// those of Pause.
//
// Errors are Limiter.Reserve's and ErrDetached.
func (r Reservation) ReportRemaining(ctx context.Context, left Remaining) error {
	bad := func(field string, value any, hint string) error {
		return &RequestError{Policy: r.Policy, Field: field, Value: value, Hint: hint}
	}
	if left.Unit == "" {
		left.Unit = Requests
	}
	switch {
	case r.limiter == nil:
		return ErrDetached
	case !nameShape.MatchString(left.Unit):
		return bad("unit", left.Unit, nameHint)
	case left.Units < 0 || left.Units > MaxLimit:
		return bad("units", left.Units, fmt.Sprintf("must be 0 to %d", int64(MaxLimit)))
	case left.Reset <= 0 || left.Reset > MaxPeriod:
		return bad("reset", left.Reset, fmt.Sprintf("must be above 0 and at most %v", MaxPeriod))
	case r.ID == "":
		return nil
	}
	return r.limiter.hear(ctx, r, script.Remaining, func(places []int) string {
		return script.RemainingWord(places, left.Unit, left.Units, max(1, left.Reset.Microseconds()))
	})
}

// hear passes on what the upstream says, about scopes by their places.
func (l *Limiter) hear(ctx context.Context, r Reservation, op string, word func(places []int) string) error {
	cp, err := l.find(r.Policy, true)
	if err != nil {
		return err
	}
	o, err := l.operation(ctx, cp, r.Request)
	if err != nil {
		return err
	}
	_, err = o.settle(ctx, r, op, word(o.upstream))
	return err
}
