// Package ticks has the times of cron expressions.
package ticks

import (
	"time"

	"github.com/robfig/cron/v3"
)

// Parse is cron.ParseStandard, but for clocks that are set, in the zone of Next's argument: a time that the clock
// skips comes when it is set, unless every hour has one; a midnight that it shows twice comes once.
func Parse(expression string) (cron.Schedule, error) {
	schedule, err := cron.ParseStandard(expression)
	if spec, ok := schedule.(*cron.SpecSchedule); ok {
		return shown{spec}, err
	}
	return schedule, err
}

// A shown schedule has the times that a clock shows.
type shown struct{ *cron.SpecSchedule }

func (s shown) Next(t time.Time) time.Time {
	next := s.SpecSchedule.Next(shows(t))
	for !next.IsZero() {
		_, set := t.ZoneBounds()
		if !set.After(t) { // it is not, or this is the last day of a leap year, for which Go 1.26 says its begin
			set = t.AddDate(0, 1, 0)
		}
		if at := t.Add(next.Sub(shows(t))); at.Before(set) {
			return at
		}
		switch t = set; {
		case next.Before(shows(t)) && s.Hour&0xffffff != 0xffffff: // it is skipped, and is not one of every hour
			return t
		case s.Hour != 1 || s.Minute != 1: // not midnights alone: what is shown again comes again
			next = s.SpecSchedule.Next(shows(t).Add(-1))
		}
	}
	return next
}

// shows returns what the clock shows, as a time of UTC: no clock skips any of these.
func shows(t time.Time) time.Time {
	_, offset := t.Zone()
	return t.UTC().Add(time.Duration(offset) * time.Second)
}
