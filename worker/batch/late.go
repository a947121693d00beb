package batch

import (
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// Late says what becomes of a firing whose tasks are not all expected to start by Batch.FinishBy.
type Late string

const (
	LateWarn   Late = "warn"   // it begins, and a warning is logged
	LateRefuse Late = "refuse" // nothing is enqueued: its state is StateRefused
	LateTrim   Late = "trim"   // the last tasks of each tenant are left out, as many as would be late
)

// parseFinishBy reads a time of day, or a time after the tick.
func parseFinishBy(s string) (by func(b *compiled, tick time.Time) time.Time, ok bool) {
	if c, err := parseClock(s); err == nil {
		return func(b *compiled, tick time.Time) time.Time { return c.after(tick, b.zone) }, true
	}
	after, err := time.ParseDuration(s)
	return func(_ *compiled, tick time.Time) time.Time { return tick.Add(after) },
		err == nil && after >= time.Second && after <= throttle.MaxPlan
}

// deadline is until when a firing is to be done, zero for no such time.
func (b *compiled) deadline(tick time.Time) time.Time {
	if b.finishBy == nil {
		return time.Time{}
	}
	return b.finishBy(b, tick)
}

// planOptions are those of a plan of a firing whose tasks start from a time on.
func (b *compiled) planOptions(tick, from time.Time) throttle.PlanOptions {
	o := throttle.PlanOptions{By: b.deadline(tick), From: from}
	if b.hours == nil {
		return o
	}
	o.Open = b.opening()
	if b.Hours.Stop {
		stops, open := b.stops(from), o.Open
		if o.By.IsZero() || o.By.After(stops) {
			o.By = stops
		}
		o.Open = func(t time.Time) time.Time {
			if at := open(t); at.Before(stops) {
				return at
			}
			return stops.Add(2 * throttle.MaxPlan)
		}
	}
	return o
}

// opening returns a function that says from when on tasks may start. It keeps what it found out: a
// plan asks it for each task.
func (b *compiled) opening() func(from time.Time) time.Time {
	var since, opens, closes time.Time // the hours end before since, or are on
	return func(t time.Time) time.Time {
		if t.Before(since) || !t.Before(closes) {
			since, opens = t, t
			if !b.open(t) {
				opens = b.hours[0].after(t, b.zone)
			}
			closes = b.hours[1].after(opens, b.zone)
		}
		if t.Before(opens) {
			return opens
		}
		return t
	}
}

// stops is when the hours end that are on at a time, or that come next.
func (b *compiled) stops(from time.Time) time.Time {
	return b.hours[1].after(b.opening()(from), b.zone)
}
