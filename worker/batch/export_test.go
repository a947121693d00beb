package batch

import "time"

// SetLease has the scheduler's leases last that long.
func (s *Scheduler) SetLease(d time.Duration) { s.lease = d }

// Due returns the ticks that fire now.
func Due(b Batch, last, now time.Time) (fire, upTo time.Time, err error) {
	c, err := b.compile()
	if err != nil {
		return fire, upTo, err
	}
	fire, upTo = c.due(last, now)
	return fire, upTo, nil
}

// Deadline returns until when the firing of a tick is to be done.
func Deadline(b Batch, tick time.Time) time.Time {
	c, err := b.compile()
	if err != nil {
		return time.Time{}
	}
	return c.deadline(tick)
}

// Open reports whether the hours of the firing of a tick are now.
func Open(b Batch, tick, now time.Time) bool {
	c, err := b.compile()
	return err == nil && c.open(tick, now)
}
