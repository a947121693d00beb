package throttle

import (
	"math"
	"time"
)

// A simulated window is what a plan counts by. It never goes back in time. Times are microseconds.
type simulated interface {
	fits(t, cost int64) int64 // the earliest time, from t on, at which the cost fits
	take(t, cost int64)       // counts the cost, which fits
}

// never is a time at which nothing fits any more.
const never = math.MaxInt64 / 4

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

func (s *simulatedSliding) fits(t, cost int64) int64 {
	over := s.used + cost - s.limit
	for i := s.first; over > 0; i++ {
		if i == len(s.log) {
			return never
		}
		over -= s.log[i].units
		t = max(t, s.log[i].leaves)
	}
	return t
}

// What has left is dropped here: time goes on by takes, and fits also looks at later times.
func (s *simulatedSliding) take(t, cost int64) {
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

func (f *simulatedFixed) fits(t, cost int64) int64 {
	if cost > f.limit {
		return never
	}
	if t < f.ends && f.used+cost > f.limit {
		t = f.ends
	}
	if f.clock && f.margin > 0 && t%f.period >= f.period-f.margin {
		t += f.period - t%f.period
	}
	return t
}

func (f *simulatedFixed) take(t, cost int64) {
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

func (g *simulatedGCRA) fits(t, cost int64) int64 {
	over := max(0, g.level-float64(t-g.at)*g.rate) + float64(cost) - g.burst
	switch {
	case float64(cost) > g.burst:
		return never
	case over <= 1e-6:
		return t
	}
	return t + int64(math.Ceil(over/g.rate))
}

func (g *simulatedGCRA) take(t, cost int64) {
	g.level, g.at = max(0, g.level-float64(t-g.at)*g.rate)+float64(cost), t
}

type simulatedCalendar struct {
	calendar          *calendar
	limit, used, ends int64
}

// next returns the first reset after a time.
func (c *simulatedCalendar) next(t int64) int64 {
	tick := c.calendar.schedule.Next(time.UnixMicro(t).Add(-c.calendar.margin).In(c.calendar.zone))
	if tick.IsZero() {
		return never
	}
	return tick.Add(c.calendar.margin).UnixMicro()
}

func (c *simulatedCalendar) fits(t, cost int64) int64 {
	if cost > c.limit {
		return never
	}
	if t < c.ends && c.used+cost > c.limit {
		return c.ends
	}
	return t
}

func (c *simulatedCalendar) take(t, cost int64) {
	if t >= c.ends {
		c.used, c.ends = 0, c.next(t)
	}
	c.used += cost
}

// simulatedSlots are handler slots by the rate at which servers took tickets.
type simulatedSlots struct{ each, next float64 } // us

func (s *simulatedSlots) fits(t, _ int64) int64 { return max(t, int64(s.next)) }

func (s *simulatedSlots) take(t, cost int64) {
	s.next = max(s.next, float64(t)-s.each) + s.each*float64(cost)
}
