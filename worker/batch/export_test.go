package batch

import "time"

// SetLease has the scheduler's leases last that long.
func (s *Scheduler) SetLease(d time.Duration) { s.lease = d }

// Due returns the ticks that fire now.
func Due(b Batch, last, now time.Time) (fire []time.Time, upTo time.Time, err error) {
	c, err := b.compile()
	if err != nil {
		return nil, time.Time{}, err
	}
	fire, upTo = c.due(last, now)
	return fire, upTo, nil
}

// Open reports whether the batch's hours are now.
func Open(b Batch, now time.Time) bool {
	c, err := b.compile()
	return err == nil && c.open(now)
}
