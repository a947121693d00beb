package throttle

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// After a pause of a policy that does not adapt, or one by hand, one window's worth is let out evenly
// over a ramp: as long as the pause was, within minRamp and maxRamp. Whatever is refused on the ramp or shortly after it doubles the next one.
const (
	minRamp = time.Second
	maxRamp = time.Minute
)

// DefaultMaxPause bounds pauses unless Policy.MaxPause says otherwise.
const DefaultMaxPause = time.Hour

// DefaultPause is how long a refusal pauses a policy that does not adapt, if the upstream does not say.
const DefaultPause = time.Second

// A Pause is what a refusal by the upstream left behind.
type Pause struct {
	OpensAt time.Time // when the windows let out all they may again; they open gradually from Until on
	Tenant  string    // whose call was refused; empty if it was nobody's
	Until   time.Time // nothing is granted before
}

// describe tells a request that was denied at a time what the pause means.
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

// An Adapted is the rate that a policy adapted to, after refusals by the upstream: see Policy.Adapt.
type Adapted struct {
	Published float64   // what the window grants: units per second
	Rate      float64   // what is granted now: units per second
	Refusals  int64     // how often the upstream refused, calls of one moment taken together
	Since     time.Time // the first of them
	Unit      string    // what the window counts
	Window    string    // the window by which grants are spread
}

// String says how often the upstream refused, and what is granted now, such as "refused 3 times since
// 14:02 UTC, now 8.5/s of 10/s".
func (a Adapted) String() string {
	rate, published, per := a.Rate, a.Published, "s"
	if published < 1 {
		rate, published, per = 60*rate, 60*published, "min"
	}
	times := "once"
	if a.Refusals > 1 {
		times = fmt.Sprintf("%d times", a.Refusals)
	}
	return fmt.Sprintf("refused %s since %s UTC, now %.3g/%s of %.3g/%s", times, a.Since.UTC().Format("15:04"), rate, per, published, per)
}

// adapted is what an answer says of the rate; nil if it is of another policy.
func (o *operation) adapted(a script.AdaptedAnswer) *Adapted {
	if a.Window < 1 || a.Window > int64(len(o.windows)) {
		return nil
	}
	w := o.windows[a.Window-1]
	return &Adapted{
		Published: float64(w.Limit) / w.Period.Seconds(),
		Rate:      float64(w.Limit) / (w.Period + w.Margin).Seconds() * float64(a.Rate) / 1e6,
		Refusals:  a.Refusals,
		Since:     time.UnixMicro(a.Since),
		Unit:      w.Unit,
		Window:    w.Name,
	}
}

// Pause grants nothing for a while, from now on, in the scopes that the policy's Upstream names,
// with the values of the request. It is Reservation.Pause by hand: the request needs a policy and
// what its scopes are counted by. Resume ends it.
//
// The pause is above 0. One longer than the policy's MaxPause lasts for MaxPause. Pause returns how
// long a pause lasts that began by this call, or 0 if it extended one. Errors are Reserve's.
func (l *Limiter) Pause(ctx context.Context, r Request, pause time.Duration) (begun time.Duration, err error) {
	if pause <= 0 {
		return 0, &RequestError{Policy: r.Policy, Field: "pause", Value: pause, Hint: "must be above 0"}
	}
	return l.pause(ctx, Reservation{Request: r}, pause, AdaptOff)
}

// Resume ends a pause at once, the gradual opening after one, and adapting (Policy.Adapt). The scopes
// are those of Pause. Errors are Reserve's.
func (l *Limiter) Resume(ctx context.Context, r Request) error {
	return l.hear(ctx, Reservation{Request: r}, script.Resume, script.ResumeWord)
}

// Pause passes on that the upstream refused the reservation's call, and for how long. Until then
// nothing is granted, on any worker, in the scopes that the policy's Upstream names, with the values
// by which the reservation was granted. Tickets that wait keep their places. A later refusal extends
// the pause. Decision.Pause tells denied requests of it. Afterwards the scopes let out what
// Policy.Adapt says.
//
// A pause of 0 means that the upstream did not say how long. A policy that adapts then pauses for an
// eighth of its shortest period, at most 1 second, and doubles that while refusals go on. With
// AdaptOff the pause is DefaultPause. None is longer than the policy's MaxPause.
//
// Pause returns how long a pause lasts that began by this call. It returns 0 if it extended one, and
// if the length is a guess and the policy adapts already. Errors are Limiter.Reserve's and
// ErrDetached.
func (r Reservation) Pause(ctx context.Context, pause time.Duration) (begun time.Duration, err error) {
	if r.limiter == nil {
		return 0, ErrDetached
	}
	if r.ID == "" {
		r.At = time.Time{} // by this machine's clock
	}
	if pause < 0 {
		return 0, &RequestError{Policy: r.Policy, Field: "pause", Value: pause, Hint: "must not be below 0"}
	}
	return r.limiter.pause(ctx, r, pause, "")
}

// pause passes a refusal on. Without adapt, the policy's holds.
func (l *Limiter) pause(ctx context.Context, r Reservation, pause time.Duration, adapt Adapt) (begun time.Duration, err error) {
	o, err := l.corrected(ctx, r)
	if err != nil {
		return 0, err
	}
	if adapt == "" {
		adapt = o.Adapt
	}
	word := script.Refused{Places: o.upstream, RampMax: maxRamp.Microseconds(), Adapt: slices.Index(adapts, adapt), Tenant: r.Tenant}
	if pause == 0 {
		pause, word.Guess = DefaultPause, o.MaxPause.Microseconds()
	}
	pause = min(pause, o.MaxPause)
	word.Wait = max(1, pause.Microseconds())
	word.Ramp = min(max(pause, minRamp), maxRamp).Microseconds()
	a, err := o.settle(ctx, r, script.Pause, script.PauseWord(word))
	if err != nil || a.Status != script.Granted {
		return 0, err
	}
	if a.Pause.Until > a.At {
		return micros(a.Pause.Until - a.At), nil
	}
	return pause, nil // the reply was lost before
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
	o, err := l.corrected(ctx, r)
	if err != nil {
		return err
	}
	_, err = o.settle(ctx, r, op, word(o.upstream))
	return err
}

// corrected makes ready what an upstream says of a reservation, also by a removed policy.
func (l *Limiter) corrected(ctx context.Context, r Reservation) (*operation, error) {
	cp, err := l.find(r.Policy, true)
	if err != nil {
		return nil, err
	}
	return l.operation(ctx, cp, r.Request)
}
