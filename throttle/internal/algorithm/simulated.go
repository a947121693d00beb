package algorithm

import "math"

// A Simulated window is what a plan counts by. It never goes back in time. Times are microseconds.
type Simulated interface {
	Fits(t, cost int64) int64 // the earliest time, from t on, at which the cost fits
	Take(t, cost int64)       // counts the cost, which fits
}

// Never is a time at which nothing fits any more.
const Never = math.MaxInt64 / 4

// leaving is n units that count until a time.
type leaving struct{ at, n int64 }

type simulatedSliding struct {
	limit, period, used int64
	log                 []leaving
}

func (s *simulatedSliding) Fits(t, cost int64) int64 {
	over := s.used + cost - s.limit
	for _, units := range s.log {
		if over <= 0 {
			return t
		}
		over -= units.n
		t = max(t, units.at)
	}
	if over > 0 {
		return Never
	}
	return t
}

// What has left is dropped here: time goes on by takes, and Fits also looks at later times.
func (s *simulatedSliding) Take(t, cost int64) {
	for len(s.log) > 0 && s.log[0].at <= t {
		s.used -= s.log[0].n
		s.log = s.log[1:]
	}
	s.used += cost
	if last := len(s.log) - 1; last >= 0 && s.log[last].at == t+s.period {
		s.log[last].n += cost
		return
	}
	s.log = append(s.log, leaving{t + s.period, cost})
}

// simulatedBuckets counts what is granted between two resets.
type simulatedBuckets struct {
	limit, used, ends int64
	closed            int64               // before a reset, for so long, nothing is granted
	reset             func(t int64) int64 // the first one after a time
}

func (b *simulatedBuckets) Fits(t, cost int64) int64 {
	if cost > b.limit {
		return Never
	}
	if t < b.ends && b.used+cost > b.limit {
		t = b.ends
	}
	if b.closed == 0 || t < b.reset(t)-b.closed {
		return t
	}
	return b.reset(t)
}

func (b *simulatedBuckets) Take(t, cost int64) {
	if t >= b.ends {
		b.used, b.ends = 0, b.reset(t)
	}
	b.used += cost
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
