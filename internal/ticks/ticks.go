// Package ticks computes the times of cron expressions.
package ticks

import (
	"time"

	"github.com/robfig/cron/v3"
)

// Parse is cron.ParseStandard, except where the clock changes in the zone of Next's argument. A time that is skipped
// comes at the change, unless every hour has one. A repeated time comes twice, except where midnight is the only time.
func Parse(expression string) (cron.Schedule, error) {
	schedule, err := cron.ParseStandard(expression)
	if spec, ok := schedule.(*cron.SpecSchedule); ok {
		return wallClock{spec}, err
	}
	return schedule, err
}

// A wallClock is a schedule of the times that a clock in a zone shows.
type wallClock struct{ *cron.SpecSchedule }

func (s wallClock) Next(t time.Time) time.Time {
	next := s.SpecSchedule.Next(shown(t))
	for !next.IsZero() {
		_, set := t.ZoneBounds() // when the clock is set next
		if !set.After(t) {       // never; or Go 1.26, on the last day of a leap year, returns the begin of that day
			set = t.AddDate(0, 1, 0)
		}
		if at := t.Add(next.Sub(shown(t))); at.Before(set) {
			return at
		}
		t = set
		if everyHour := s.Hour&0xffffff == 0xffffff; next.Before(shown(t)) && !everyHour { // the clock skips the time
			return t
		} else if s.Hour != 1 || s.Minute != 1 { // not only midnights: times that the clock shows again come again
			next = s.SpecSchedule.Next(shown(t).Add(-1))
		}
	}
	return next
}

// shown returns what the clock shows at t, as a time in UTC, where no time is skipped.
func shown(t time.Time) time.Time {
	_, offset := t.Zone()
	return t.UTC().Add(time.Duration(offset) * time.Second)
}
