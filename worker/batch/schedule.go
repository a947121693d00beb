package batch

import (
	"time"

	"github.com/robfig/cron/v3"
)

const (
	// grace is how late a tick may be decided and still count as on time.
	grace = time.Minute

	// maxMissedWithin bounds how far back due looks for ticks.
	maxMissedWithin = 720 * time.Hour
)

// due returns the tick that fires now, and the time up to which all ticks are decided then. Of several due
// ticks the last one fires. Each result is zero if there is none.
func (b *compiled) due(last, now time.Time) (fire, upTo time.Time) {
	if b.schedule == nil {
		return fire, upTo
	}
	if last.IsZero() || last.After(now.Add(grace)) { // the batch is new, or the clock was set back: its ticks begin now
		return fire, now.Truncate(time.Second)
	}
	from := now.Add(-grace)
	if missed := now.Add(-b.MissedWithin); b.Missed == MissedOnce && missed.Before(from) {
		from = missed
	}
	for tick := b.next(b.start(last, from)); !tick.IsZero() && !tick.After(now); tick = b.next(tick) {
		fire = tick
	}
	return fire, fire
}

// start returns the time after which due looks for ticks: the last tick, or a later time in step with it.
func (b *compiled) start(last, from time.Time) time.Time {
	if !last.Before(from) {
		return last
	}
	if every, ok := b.schedule.(cron.ConstantDelaySchedule); ok {
		return last.Add(from.Sub(last).Truncate(every.Delay))
	}
	return from
}

// next returns the next tick: see package ticks for changes of the clock.
func (b *compiled) next(t time.Time) time.Time { return b.schedule.Next(t.In(b.zone)) }

// A clock is a time of day, in minutes.
type clock int

func parseClock(s string) (clock, error) {
	t, err := time.Parse("15:04", s)
	return clock(60*t.Hour() + t.Minute()), err
}

// A day finds times of day for one firing.
type day struct {
	offset time.Duration // of the zone at the firing's tick: it decides between times that the clock shows twice
	zone   *time.Location
}

func (b *compiled) day(tick time.Time) day {
	_, seconds := tick.In(b.zone).Zone()
	return day{time.Duration(seconds) * time.Second, b.zone}
}

// after returns the first time after t at which the clock shows c.
func (d day) after(c clock, t time.Time) time.Time {
	t = t.In(d.zone)
	for days := 0; ; days++ {
		if at := d.at(t.Year(), t.Month(), t.Day()+days, c); at.After(t) {
			return at
		}
	}
}

// at returns when the clock shows c on a date, or when the clock is set if it skips c.
func (d day) at(year int, month time.Month, date int, c clock) time.Time {
	wanted := time.Date(year, month, date, 0, int(c), 0, 0, time.UTC)
	shown := func(t time.Time) time.Time {
		_, offset := t.Zone()
		return t.UTC().Add(time.Duration(offset) * time.Second)
	}
	if standard := wanted.Add(-d.offset).In(d.zone); shown(standard).Equal(wanted) {
		return standard
	}
	at := time.Date(year, month, date, 0, int(c), 0, 0, d.zone)
	begins, ends := at.ZoneBounds()
	switch {
	case shown(at).After(wanted):
		return begins
	case shown(at).Before(wanted):
		return ends
	}
	return at
}

// open reports whether now is within the firing's hours.
func (b *compiled) open(tick, now time.Time) bool {
	if b.hours == nil {
		return true
	}
	opens, closes := b.day(tick).after(b.hours[0], now), b.day(tick).after(b.hours[1], now)
	return closes.Before(opens) || closes.Equal(opens) && b.hours[1] < b.hours[0] // the clock skips the time between
}

// opening returns a function that returns the first time, from a given time on, at which tasks of a firing may
// start. The function caches the current hours, as a plan calls it for each task.
func (b *compiled) opening(tick time.Time) func(from time.Time) time.Time {
	d := b.day(tick)
	var since, opens, closes time.Time // the cached hours answer for times from since until closes
	return func(t time.Time) time.Time {
		if t.Before(since) || !t.Before(closes) {
			since, opens, closes = t, t, d.after(b.hours[1], t).Add(-startsWithin)
			if !b.open(tick, t) || !t.Before(closes) {
				for opens = d.after(b.hours[0], t); !b.open(tick, opens); { // a clock skips the hours
					opens = d.after(b.hours[0], opens)
				}
				closes = d.after(b.hours[1], opens).Add(-startsWithin)
			}
		}
		if t.Before(opens) {
			return opens
		}
		return t
	}
}

// startsWithin is the longest time from a task's pick-up to its start: it waits for a slot for half a second, and for
// the limiter's answer for two. The rest is for calls on the way.
const startsWithin = 3 * time.Second

// closes returns when servers pick up tasks for the last time in the current hours (s), so that all tasks
// start before the hours end. It returns 0 if there are no hours.
func (b *compiled) closes(tick, now time.Time) int64 {
	if b.hours == nil {
		return 0
	}
	return b.day(tick).after(b.hours[1], now).Add(-startsWithin).Unix()
}
