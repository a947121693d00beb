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
	_, offset := t.Zone()
	shown := d.SpecSchedule.Next(t.UTC().Add(time.Duration(offset) * time.Second)) // if no clock were set
	midnight := time.Date(shown.Year(), shown.Month(), shown.Day(), 0, 0, 0, 0, t.Location())
	if shown.IsZero() || shown.Hour()+shown.Minute() > 0 || midnight.Hour()+midnight.Minute() == 0 {
		return next
	}
	first, set := midnight.ZoneBounds()
	if midnight.Day() != shown.Day() { // before the clock is set
		first = set
	}
	if first.After(t) && first.Before(next) {
		return first
	}
	return next
}
