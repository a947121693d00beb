package algorithm

import (
	"math"
	"time"
)

// A Simulated window is what a plan counts by. It Never goes back in time. Times are microseconds.
type Simulated interface {
	Fits(t, cost int64) int64 // the earliest time, from t on, at which the cost fits
	Take(t, cost int64)       // counts the cost, which fits
}

// Never is a time at which nothing fits any more.
const Never = math.MaxInt64 / 4

type simulatedSliding struct {
	limit, period, used int64
	log                 []struct{ leaves, units int64 }
	first               int
}

// before counts what was granted before the plan. Redis says how much, and when the last of it
// leaves: it is taken to leave evenly until then.
func (s *simulatedSliding) before(used, now, resets int64) {
	parts := min(used, 64)
	for i := range parts {
		units := used*(i+1)/parts - used*i/parts
		s.log = append(s.log, struct{ leaves, units int64 }{now + (resets-now)*(i+1)/parts, units})
	}
	s.used = used
}

func (s *simulatedSliding) Fits(t, cost int64) int64 {
	over := s.used + cost - s.limit
	for i := s.first; over > 0; i++ {
		if i == len(s.log) {
			return Never
		}
		over -= s.log[i].units
		t = max(t, s.log[i].leaves)
	}
	return t
}

// What has left is dropped here: time goes on by takes, and fits also looks at later times.
func (s *simulatedSliding) Take(t, cost int64) {
	for s.first < len(s.log) && s.log[s.first].leaves <= t {
		s.used -= s.log[s.first].units
		s.first++
	}
	s.used += cost
	if n := len(s.log); n > s.first && s.log[n-1].leaves == t+s.period {
		s.log[n-1].units += cost
		return
	}
	if s.first > 1024 {
		s.log = append(s.log[:0], s.log[s.first:]...)
		s.first = 0
	}
	s.log = append(s.log, struct{ leaves, units int64 }{t + s.period, cost})
}

type simulatedFixed struct {
	limit, period, margin, used, ends int64
	clock                             bool
}

func (f *simulatedFixed) Fits(t, cost int64) int64 {
	if cost > f.limit {
		return Never
	}
	if t < f.ends && f.used+cost > f.limit {
		t = f.ends
	}
	if f.clock && f.margin > 0 && t%f.period >= f.period-f.margin {
		t += f.period - t%f.period
	}
	return t
}

func (f *simulatedFixed) Take(t, cost int64) {
	if t >= f.ends {
		f.used = 0
		f.ends = t + f.period + f.margin
		if f.clock {
			f.ends = t - t%f.period + f.period
		}
	}
	f.used += cost
}

type simulatedGCRA struct {
	burst, rate, level float64 // units, and units a microsecond
	at                 int64
}

func (g *simulatedGCRA) Fits(t, cost int64) int64 {
	over := max(0, g.level-float64(t-g.at)*g.rate) + float64(cost) - g.burst
	switch {
	case float64(cost) > g.burst:
		return Never
	case over <= 1e-6:
		return t
	}
	return t + int64(math.Ceil(over/g.rate))
}

func (g *simulatedGCRA) Take(t, cost int64) {
	g.level, g.at = max(0, g.level-float64(t-g.at)*g.rate)+float64(cost), t
}

type simulatedCalendar struct {
	ticks             *Ticks
	limit, used, ends int64
}

// next returns the first reset after a time.
func (c *simulatedCalendar) next(t int64) int64 {
	tick := c.ticks.schedule.Next(time.UnixMicro(t).Add(-c.ticks.margin).In(c.ticks.zone))
	if tick.IsZero() {
		return Never
	}
	return tick.Add(c.ticks.margin).UnixMicro()
}

func (c *simulatedCalendar) Fits(t, cost int64) int64 {
	if cost > c.limit {
		return Never
	}
	if t < c.ends && c.used+cost > c.limit {
		return c.ends
	}
	return t
}

func (c *simulatedCalendar) Take(t, cost int64) {
	if t >= c.ends {
		c.used, c.ends = 0, c.next(t)
	}
	c.used += cost
}

// Slots are handler slots by the rate at which servers took tickets.
type Slots struct {
	Each float64 // between two tickets (us)
	next float64
}

// Fits returns when the next slot is free.
func (s *Slots) Fits(t, _ int64) int64 { return max(t, int64(s.next)) }

// Take uses a slot for each unit of the cost.
func (s *Slots) Take(t, cost int64) {
	s.next = max(s.next, float64(t)-s.Each) + s.Each*float64(cost)
}
