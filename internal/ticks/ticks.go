// Package ticks has the times of cron expressions.
package ticks

import (
	"time"

	"github.com/robfig/cron/v3"
)

// Parse is cron.ParseStandard, but every day begins once, at its first instant in the zone of Next's argument.
func Parse(expression string) (cron.Schedule, error) {
	schedule, err := cron.ParseStandard(expression)
	if spec, ok := schedule.(*cron.SpecSchedule); ok {
		return days{spec}, err
	}
	return schedule, err
}

type days struct{ *cron.SpecSchedule }

func (d days) Next(t time.Time) time.Time {
	next := d.SpecSchedule.Next(t)
	unset := time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), 0, time.UTC)
	shown := d.SpecSchedule.Next(unset) // if no clock were set
	midnight := time.Date(shown.Year(), shown.Month(), shown.Day(), 0, 0, 0, 0, t.Location())
	skipped := !shown.IsZero() && shown.Hour()+shown.Minute() == 0 && midnight.Hour()+midnight.Minute() > 0
	first, set := midnight.ZoneBounds()
	if midnight.Day() != shown.Day() { // before the clock is set
		first = set
	}
	switch {
	case skipped && first.After(t) && first.Before(next):
		return first
	case d.Hour == 1 && d.Minute == 1 && next.Add(-1).Day() == next.Day(): // the clock shows midnight twice
		return d.Next(next)
	}
	return next
}
