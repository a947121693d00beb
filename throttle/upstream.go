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

// DefaultMaxPause bounds pauses unless a policy's MaxPause says otherwise.
const DefaultMaxPause = time.Hour

// A Pause is what a refusal by the upstream left behind.
type Pause struct {
	OpensAt time.Time // until then the windows let out little, beginning at Until
	Tenant  string    // who was refused; empty if that is nobody
	Until   time.Time // nothing is granted before
}

// describe tells what the pause means to who is denied at a time.
func (p *Pause) describe(at time.Time) string {
	text, until := "paused", p.Until
	if !p.Until.After(at) {
		text, until = "opening", p.OpensAt
	}
	until = until.Add(time.Second - 1).UTC()
	layout := "15:04:05"
	if until.Sub(at) > 12*time.Hour {
		layout = time.DateTime
	}
	text += " until " + until.Format(layout) + " UTC"
	if p.Tenant == "" {
		return text
	}
	return text + " by the upstream's refusal to " + printable(p.Tenant)
}

// Pause grants nothing for a while to those to whom the upstream refused a call: the scopes that
// the policy's Remote names, with the values that the reservation was granted by. It holds on every
// worker; tickets that wait keep their places. What is refused later extends the pause; afterwards
// the windows open gradually. A reservation that was never granted, with its Request alone, pauses
// from now on: for instance by hand. Decision.Pause tells the denied of it.
//
// The pause is above 0; one longer than the policy's MaxPause lasts for MaxPause. It returns
// for how long a pause began by this call; 0 if it extended one. Errors are Reserve's.
func (l *Limiter) Pause(ctx context.Context, r Reservation, pause time.Duration) (begun time.Duration, err error) {
	if pause <= 0 {
		return 0, &RequestError{Policy: r.Policy, Field: "pause", Value: pause, Mend: "must be above 0"}
	}
	o, err := l.reserved(ctx, r)
	if err != nil {
		return 0, err
	}
	pause = min(pause, o.MaxPause)
	ramp := min(max(pause, minRamp), maxRamp)
	a, err := o.settle(ctx, r, script.Pause, script.PauseWord(
		o.upstream, max(1, pause.Microseconds()), ramp.Microseconds(), maxRamp.Microseconds(), r.Tenant))
	if err != nil || a.Status != script.Granted {
		return 0, err
	}
	return pause, nil
}

// Resume ends a pause at once, and the gradual opening after one. It is Pause's opposite, by hand.
// Errors are Reserve's.
func (l *Limiter) Resume(ctx context.Context, r Reservation) error {
	return l.tell(ctx, r, script.Resume, script.ResumeWord)
}

// Left says how many units the upstream has left, until it resets, by its answer to the
// reservation's call. What was granted since is taken off; if the windows would let out more, they
// do not: others use the same key. The scopes are those of Pause. Units are 0 to MaxLimit, reset is
// above 0 and at most MaxPeriod. Errors are Reserve's.
func (l *Limiter) Left(ctx context.Context, r Reservation, unit string, units int64, reset time.Duration) error {
	bad := func(field string, value any, mend string) error {
		return &RequestError{Policy: r.Policy, Field: field, Value: value, Mend: mend}
	}
	switch {
	case !nameShape.MatchString(unit):
		return bad("unit", unit, nameMend)
	case units < 0 || units > MaxLimit:
		return bad("left", units, fmt.Sprintf("must be 0 to %d", int64(MaxLimit)))
	case reset <= 0 || reset > MaxPeriod:
		return bad("reset", reset, fmt.Sprintf("must be above 0 and at most %v", MaxPeriod))
	}
	return l.tell(ctx, r, script.Left, func(places []int) string {
		return script.LeftWord(places, unit, units, max(1, reset.Microseconds()))
	})
}

// tell hands on the upstream's word.
func (l *Limiter) tell(ctx context.Context, r Reservation, op string, word func(places []int) string) error {
	o, err := l.reserved(ctx, r)
	if err != nil {
		return err
	}
	_, err = o.settle(ctx, r, op, word(o.upstream))
	return err
}
