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

	// maxFired is how many ticks fire at once, at most: the newest of those that were missed.
	maxFired = 1000
)

// due returns the ticks that fire now, and up to which tick all are decided by that. It returns the
// zero time if there is nothing to decide.
func (b *compiled) due(last, now time.Time) (fire []time.Time, upTo time.Time) {
	if b.schedule == nil {
		return nil, time.Time{}
	}
	if last.IsZero() { // the first scheduler that knows the batch: it begins now
		return nil, now.Truncate(time.Second)
	}
	onTime := now.Add(-grace)
	from := onTime
	if missed := now.Add(-b.MissedWithin); b.Missed != MissedSkip && missed.Before(from) {
		from = missed
	}
	var missed []time.Time
	for tick := b.next(b.start(last, from)); !tick.IsZero() && !tick.After(now); tick = b.next(tick) {
		upTo = tick
		switch {
		case tick.After(onTime):
			fire = append(fire, tick)
		case b.Missed != MissedSkip:
			missed = append(missed, tick)
			if b.Missed == MissedOnce {
				missed = missed[len(missed)-1:]
			} else if len(missed) > maxFired {
				missed = missed[1:]
			}
		}
	}
	return append(missed, fire...), upTo
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

// next returns the next tick. That of a zone whose clock is set forward over it does not come, and
// one that the clock passes twice comes as robfig/cron has it.
func (b *compiled) next(t time.Time) time.Time { return b.schedule.Next(t.In(b.zone)) }

// A clock is a time of day.
type clock struct{ hour, minute int }

func parseClock(s string) (clock, error) {
	t, err := time.Parse("15:04", s)
	return clock{t.Hour(), t.Minute()}, err
}

// after returns the first time after t at which the clock shows this.
func (c clock) after(t time.Time, zone *time.Location) time.Time {
	t = t.In(zone)
	for day := 0; ; day++ {
		at := time.Date(t.Year(), t.Month(), t.Day()+day, c.hour, c.minute, 0, 0, zone)
		if at.After(t) {
			return at
		}
	}
}

// open reports whether the batch's hours are now.
func (b *compiled) open(now time.Time) bool {
	if b.hours == nil {
		return true
	}
	return b.hours[1].after(now, b.zone).Before(b.hours[0].after(now, b.zone))
}
