package algorithm

import (
	"math"
	"slices"
)

// A Simulated window counts for a forecast. It never goes back in time. Times are microseconds.
type Simulated interface {
	Fits(t, cost int64) int64 // the earliest time, from t on, at which the cost fits
	Take(t, cost, hold int64) // counts the cost, which fits; hold: how long it is held, if it is
}

// Counted is the state of a window. Times are microseconds.
type Counted struct {
	Used   int64 // units
	Now    int64
	Resets int64   // when none of them counts any more, from Now on
	Grants []Grant // of a sliding window, the oldest first; nil if they are not known
}

// A Grant is units that were granted at a time.
type Grant struct{ At, Units int64 }

// Never is a time at which nothing fits any more.
const Never = math.MaxInt64 / 4

// simulatedLog counts units until they leave: after a period, or after they were held.
type simulatedLog struct {
	limit, period, used int64
	began               int64 // the last entry; later ones join it, as in sliding.lua
	log                 []leaving
}

// leaving is n units that count until a time.
type leaving struct{ at, n int64 }

// mergedAbove is the number of entries above which sliding.lua joins them.
const mergedAbove = 192

// newLog returns one whose units leave as they were granted, or else evenly until none counts.
func newLog(limit, period int64, c Counted) *simulatedLog {
	s := &simulatedLog{limit: limit, period: period}
	add := func(at, units int64) {
		if at > c.Now {
			s.used += units
			s.log = append(s.log, leaving{at, units})
		}
	}
	for _, g := range c.Grants {
		add(g.At+period, g.Units)
	}
	parts := min(c.Used, 64)
	for i := range parts {
		if c.Grants == nil {
			add(c.Now+max(1, (c.Resets-c.Now)*(i+1)/parts), c.Used*(i+1)/parts-c.Used*i/parts)
		}
	}
	return s
}

func (s *simulatedLog) Fits(t, cost int64) int64 {
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

// Take drops units that have left. Time goes on by takes, and Fits also looks at later times.
func (s *simulatedLog) Take(t, cost, hold int64) {
	for len(s.log) > 0 && s.log[0].at <= t {
		s.used -= s.log[0].n
		s.log = s.log[1:]
	}
	s.used += cost
	until, i := t+s.period, len(s.log)
	if s.period == 0 {
		until = t + hold
	}
	for i > 0 && s.log[i-1].at > until {
		i--
	}
	merges := s.period > 0 && s.limit > mergedAbove && i > mergedAbove/2 && t-s.began < 2*s.period/mergedAbove
	if i > 0 && (merges || s.log[i-1].at == until) {
		s.log[i-1].at = until
		s.log[i-1].n += cost
		return
	}
	s.began = t
	s.log = slices.Insert(s.log, i, leaving{until, cost})
}

// simulatedBuckets counts the grants between two resets.
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

func (b *simulatedBuckets) Take(t, cost, _ int64) {
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

func (g *simulatedGCRA) Take(t, cost, _ int64) {
	g.level, g.at = max(0, g.level-float64(t-g.at)*g.rate)+float64(cost), t
}
