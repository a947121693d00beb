package dispatch

import "time"

// paceOf is how many tasks the pace is measured by, about: older ones count less and less.
const paceOf = 4

// A pace is how fast slots become free: how long they were taken, and how many tasks ended.
type pace struct {
	at    time.Time // of the last change
	taken float64   // seconds, of all slots together
	ended float64
}

// note counts the time since the last change, in which so many slots were taken.
func (p *pace) note(now time.Time, running int) {
	if running > 0 {
		p.taken += float64(running) * now.Sub(p.at).Seconds()
	}
	p.at = now
}

// end counts a task that ended.
func (p *pace) end() {
	if p.ended++; p.ended >= 2*paceOf {
		p.taken, p.ended = p.taken/2, p.ended/2
	}
}

// within returns how many tasks end in a while, up to most, if all slots are taken.
func (p *pace) within(d time.Duration, slots, most int) int {
	if n := float64(slots) * d.Seconds() * p.ended; n < float64(most)*p.taken {
		return int(n / p.taken)
	} else if p.ended > 0 {
		return most
	}
	return 0
}
