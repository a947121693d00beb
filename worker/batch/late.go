package batch

import (
	"time"

	"github.com/sluice-go/sluice/throttle/inspect"
)

// Late decides about a firing whose tasks are not all expected to end by Batch.FinishBy.
type Late string

const (
	LateWarn   Late = "warn"   // it begins, and a warning is logged
	LateRefuse Late = "refuse" // nothing is enqueued: its state is StateRefused
)

// parseFinishBy reads a time of day, or a duration after the tick.
func parseFinishBy(s string) (finishBy func(b *compiled, tick time.Time) time.Time, ok bool) {
	if c, err := parseClock(s); err == nil {
		return func(b *compiled, tick time.Time) time.Time { return b.day(tick).after(c, tick) }, true
	}
	after, err := time.ParseDuration(s)
	return func(_ *compiled, tick time.Time) time.Time { return tick.Add(after) },
		err == nil && after >= time.Second && after <= 9600*time.Hour // 400 days: as far as plans look
}

// deadline returns the time by which a firing is to be done, zero for no such time.
func (b *compiled) deadline(tick time.Time) time.Time {
	if b.finishBy == nil {
		return time.Time{}
	}
	return b.finishBy(b, tick)
}

// planOptions returns the options that plan a firing whose tasks start at `from` or later, with other limits.
func (b *compiled) planOptions(tick, from time.Time, limits map[string]int64) inspect.PlanOptions {
	open := func(t time.Time) time.Time { return t }
	if b.hours != nil {
		open = b.opening(tick)
	}
	return inspect.PlanOptions{Deadline: b.deadline(tick), Limits: limits, Open: func(t time.Time) time.Time {
		if t.Before(from) {
			t = from
		}
		return open(t)
	}}
}
