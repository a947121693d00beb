package throttle

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// After a pause, the units of one window are granted evenly over a ramp. It is as long as the
// pause, within minRamp and maxRamp. A refusal on the ramp, or shortly after it, doubles the next
// ramp.
const (
	minRamp = time.Second
	maxRamp = time.Minute
)

// DefaultMaxPause is the default of Policy.MaxPause.
const DefaultMaxPause = time.Hour

// A Pause is the effect of a refusal by the upstream: nothing is granted until Until, and then
// gradually more until OpensAt. Times are by the clock of Redis.
type Pause struct {
	OpensAt time.Time // from which the windows grant up to their limits again
	Tenant  string    // whose call was refused; empty if it had no tenant
	Until   time.Time // before which nothing is granted
}

// describe says what the pause means to a request that was denied at a time.
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

// Pause stops grants from now on, in the counts that Policy.Upstream names. It is Reservation.Pause
// by hand: the request needs a policy, and the values that its scopes count by. Resume ends it.
//
// The pause must be above 0, and is cut to Policy.MaxPause. Pause returns the length of a pause
// that begins by this call, or 0 if it extends one. Errors are Reserve's.
func (l *Limiter) Pause(ctx context.Context, r Request, pause time.Duration) (begun time.Duration, err error) {
	return l.pause(ctx, Reservation{Request: r}, pause)
}

// Resume ends a pause at once, or the gradual opening after it, in the counts of Pause. Without a
// pause it does nothing. Errors are Reserve's.
func (l *Limiter) Resume(ctx context.Context, r Request) error {
	return l.report(ctx, Reservation{Request: r}, script.Resume, script.ResumeWord)
}

// Pause reports that the upstream refused the reservation's call, and for how long. It stops grants
// on all workers, in the counts of the reservation that Policy.Upstream names. Tickets in line keep
// their places. A later refusal extends the pause. After it, the windows open gradually. Denied
// requests find it in Decision.Pause.
//
// The pause must be above 0, and is cut to Policy.MaxPause. Pause returns the length of a pause
// that begins by this call, or 0 if it extends one. Errors are Limiter.Reserve's and ErrDetached.
func (r Reservation) Pause(ctx context.Context, pause time.Duration) (begun time.Duration, err error) {
	if r.limiter == nil {
		return 0, ErrDetached
	}
	if r.ID == "" {
		r.At = time.Time{} // by this machine's clock
	}
	return r.limiter.pause(ctx, r, pause)
}

func (l *Limiter) pause(ctx context.Context, r Reservation, pause time.Duration) (begun time.Duration, err error) {
	if pause <= 0 {
		return 0, &RequestError{Policy: r.Policy, Field: "pause", Value: pause, Hint: "must be above 0"}
	}
	o, err := l.upstreamOperation(ctx, r)
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

// Remaining is the state of a limit that an upstream reports.
type Remaining struct {
	Unit  string        // what it counts; the default is Requests
	Units int64         // how many are left: 0 to MaxLimit
	Reset time.Duration // until it starts again from 0: above 0 and at most MaxPeriod
}

// ReportRemaining reports how many units the upstream has left, by its answer to the reservation's
// call. Until the reset, windows of the unit grant no more than that, less what they granted since
// the reservation: others may use the same key. It applies to the counts of Pause. Errors are
// Limiter.Reserve's and ErrDetached.
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
	return r.limiter.report(ctx, r, script.Remaining, func(places []int) string {
		return script.RemainingWord(places, left.Unit, left.Units, max(1, left.Reset.Microseconds()))
	})
}

// report sends what the upstream says of the scopes at some places.
func (l *Limiter) report(ctx context.Context, r Reservation, op string, word func(places []int) string) error {
	o, err := l.upstreamOperation(ctx, r)
	if err != nil {
		return err
	}
	_, err = o.settle(ctx, r, op, word(o.upstream))
	return err
}

// upstreamOperation prepares the request of a reservation, even if its policy was removed.
func (l *Limiter) upstreamOperation(ctx context.Context, r Reservation) (*operation, error) {
	cp, err := l.find(r.Policy, true)
	if err != nil {
		return nil, err
	}
	return l.operation(ctx, cp, r.Request)
}
