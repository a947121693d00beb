package dispatch

import "time"

// driftMost is by how much two clocks drift apart, at most, a part of the time.
const driftMost = 20e-6

// A clock says when it is a time of Redis by the clock of this machine.
type clock struct {
	ahead time.Duration // this machine's clock is ahead of that of Redis by this, or by less
	at    time.Time     // when that was known; zero: never
}

// learn notes that it was `at` in Redis between two times of this machine.
func (c *clock) learn(at, sent, received time.Time) {
	atLeast, atMost := sent.Sub(at), received.Sub(at)
	known := c.ahead + time.Duration(driftMost*float64(received.Sub(c.at)))
	if c.at.IsZero() || known < atLeast || atMost < known { // below: one of the clocks was set
		known = atMost
	}
	c.ahead, c.at = known, received
}

// here returns a time of Redis by this machine's clock, or a later one.
func (c *clock) here(at time.Time) time.Time { return at.Add(c.ahead) }
