package batch

import (
	"time"

	"github.com/robfig/cron/v3"
)

const (
	// grace is how late a tick may be decided that still counts as on time.
	grace = time.Minute

	// maxMissedWithin bounds how far back ticks are looked for.
	maxMissedWithin = 720 * time.Hour
)

// due returns the tick that fires now, and up to which tick all are decided by that. Of several that are
// due the last one fires. Each is zero if there is none.
func (b *compiled) due(last, now time.Time) (fire, upTo time.Time) {
	if b.schedule == nil {
		return fire, upTo
	}
	if last.IsZero() || last.After(now.Add(grace)) { // nobody knew the batch, or the clock was set back: it begins now
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

// start returns from when on ticks are looked for: the last one, or some later time that is in step
// with it.
func (b *compiled) start(last, from time.Time) time.Time {
	if !last.Before(from) {
		return last
	}
	if every, ok := b.schedule.(cron.ConstantDelaySchedule); ok {
		return last.Add(from.Sub(last).Truncate(every.Delay))
	}
	return from
}

// next returns the next tick: see package ticks for clocks that are set.
func (b *compiled) next(t time.Time) time.Time { return b.schedule.Next(t.In(b.zone)) }

// A clock is a time of day.
type clock struct{ hour, minute int }

func parseClock(s string) (clock, error) {
	t, err := time.Parse("15:04", s)
	return clock{t.Hour(), t.Minute()}, err
}

// A day finds times of day for one firing.
type day struct {
	offset time.Duration // of the zone at the firing's tick: of a time that the clock shows twice, it chooses one
	zone   *time.Location
}

func (b *compiled) day(tick time.Time) day {
	_, seconds := tick.In(b.zone).Zone()
	return day{time.Duration(seconds) * time.Second, b.zone}
}

// after returns the first time after t at which the clock shows this.
func (d day) after(c clock, t time.Time) time.Time {
	t = t.In(d.zone)
	for days := 0; ; days++ {
		if at := d.at(t.Year(), t.Month(), t.Day()+days, c); at.After(t) {
			return at
		}
	}
}

// at returns when the clock shows this on a day. If it skips that, it is when the clock is set.
func (d day) at(year int, month time.Month, date int, c clock) time.Time {
	wanted := time.Date(year, month, date, c.hour, c.minute, 0, 0, time.UTC)
	shown := func(t time.Time) time.Time {
		_, offset := t.Zone()
		return t.UTC().Add(time.Duration(offset) * time.Second)
	}
	if standard := wanted.Add(-d.offset).In(d.zone); shown(standard).Equal(wanted) {
		return standard
	}
	at := time.Date(year, month, date, c.hour, c.minute, 0, 0, d.zone)
	begins, ends := at.ZoneBounds()
	switch {
	case shown(at).After(wanted):
		return begins
	case shown(at).Before(wanted):
		return ends
	}
	return at
}

// open reports whether the firing's hours are now.
func (b *compiled) open(tick, now time.Time) bool {
	if b.hours == nil {
		return true
	}
	d := b.day(tick)
	return d.after(b.hours[1], now).Before(d.after(b.hours[0], now))
}

// opening returns a function that says from when on tasks of a firing may start. It keeps what it found
// out: a plan asks it for each task.
func (b *compiled) opening(tick time.Time) func(from time.Time) time.Time {
	d := b.day(tick)
	var since, opens, closes time.Time // the hours end before since, or are on
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

// startsWithin is how long a server keeps a task that it has picked up before it starts, at most.
const startsWithin = time.Second

// closes is when servers pick up tasks for the last time in the hours that are on (s): those that they
// have picked up start before the hours end. It is 0 if there are no hours.
func (b *compiled) closes(tick, now time.Time) int64 {
	if b.hours == nil {
		return 0
	}
	return b.day(tick).after(b.hours[1], now).Add(-startsWithin).Unix()
}
