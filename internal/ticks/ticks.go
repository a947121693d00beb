// Package ticks has the times of cron expressions.
package ticks

import (
	"time"

	"github.com/robfig/cron/v3"
)

// Parse is cron.ParseStandard, but for days whose clock skips midnight: in the time zone of Next's
// argument they begin with their first instant.
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
	for at := t; ; {
		_, at = at.ZoneBounds() // the next time at which the clock is set
		if at.IsZero() || !at.Before(next) {
			return next
		}
		before, midnight := at.Add(-time.Second), time.Date(at.Year(), at.Month(), at.Day(), 0, 0, 0, 0, time.UTC)
		skipped := before.Day() != at.Day() && at.Hour()+at.Minute() > 0
		if skipped && d.SpecSchedule.Next(midnight.Add(-time.Second)).Equal(midnight) {
			return at
		}
	}
}
