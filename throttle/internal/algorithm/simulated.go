package algorithm

import (
	"cmp"
	"math"
	"slices"
)

// A Simulated window counts for a forecast. It never goes back in time. Times are microseconds.
type Simulated interface {
	Fits(t, cost int64) int64 // the earliest time, from t on, at which the cost fits
	Take(t, cost, hold int64) // counts the cost, which must fit; hold is how long a lease is held
}

// Counted is the state of a window in Redis. Times are microseconds.
type Counted struct {
	Payload string // in the format of the algorithm's file in throttle/internal/script/lua; empty if it counts nothing
	Now     int64
	Hold    int64 // how long units are held from Now on, at most; 0 if unknown
}

// number returns the number in 7 bytes of the payload, or 0 if the payload ends before it does.
func (c Counted) number(from int) (n int64) {
	for i := from; i < from+7 && from+7 <= len(c.Payload); i++ {
		n = n<<8 | int64(c.Payload[i])
	}
	return n
}

// log reads entries of `width` bytes from an offset on. Each begins with a time and units, of 7 bytes each.
func (c Counted) log(limit, period int64, from, width int) *simulatedLog {
	s := &simulatedLog{limit: limit, period: period}
	for ; from+width <= len(c.Payload); from += width {
		e := entry{c.number(from) + period, c.number(from + 7)}
		s.used, s.log = s.used+e.n, append(s.log, e)
	}
	return s
}

// buckets returns a counter that begins each bucket with what was counted within two margins before its reset.
// `reset` returns the first reset after a time.
func (c Counted) buckets(w Window, reset func(t int64) int64) *simulatedBuckets {
	return &simulatedBuckets{limit: w.Limit, margin: w.Margin.Microseconds(), used: c.number(7), ends: reset(c.number(0)),
		late: c.number(14), reset: reset}
}

// Never is later than all other times: what happens then never happens.
const Never = math.MaxInt64 / 4

// simulatedLog counts units for a period, or while they are held.
type simulatedLog struct {
	limit, period, used int64
	log                 []entry
}

// An entry is n units that count until a time.
type entry struct{ until, n int64 }

// These are EXACT and TICKS of sliding.lua: windows with a higher limit merge grants of a tick above EXACT/2 entries.
const mergedAbove, mergeTicks = 192, 96

func (s *simulatedLog) Fits(t, cost int64) int64 {
	over := s.used + cost - s.limit
	for _, e := range s.log {
		if over <= 0 {
			return t
		}
		over -= e.n
		t = max(t, e.until)
	}
	if over > 0 {
		return Never
	}
	return t
}

// Take also drops entries that have ended. Fits may not: it looks at times that may come after the next take.
func (s *simulatedLog) Take(t, cost, hold int64) {
	for len(s.log) > 0 && s.log[0].until <= t {
		s.used -= s.log[0].n
		s.log = s.log[1:]
	}
	s.used += cost
	until, i := t+cmp.Or(s.period, hold), len(s.log)
	for i > 0 && s.log[i-1].until > until {
		i--
	}
	joinsLast := i > 0 && s.log[i-1].until == until
	if isLong := s.period > 0 && s.limit > mergedAbove && i > mergedAbove/2; isLong {
		joinsLast = joinsLast || s.log[i-1].until-s.period >= t-t%(s.period/mergeTicks) // in one tick, as in sliding.lua
	}
	if joinsLast {
		s.log[i-1].until = until
		s.log[i-1].n += cost
		return
	}
	s.log = slices.Insert(s.log, i, entry{until, cost})
}

// simulatedBuckets counts the grants between two resets.
type simulatedBuckets struct {
	limit, margin, used, ends int64
	late                      int64               // units that count after the next reset, too
	reset                     func(t int64) int64 // the first reset after a time
}

func (b *simulatedBuckets) Fits(t, cost int64) int64 {
	switch {
	case cost > b.limit:
		return Never
	case t < b.ends && b.used+cost > b.limit:
		return b.Fits(b.ends, cost)
	case t >= b.ends && b.late+cost > b.limit:
		return max(t, b.reset(b.ends))
	}
	return t
}

func (b *simulatedBuckets) Take(t, cost, _ int64) {
	if t >= b.ends {
		if b.used = b.late; t >= b.reset(b.ends) {
			b.used = 0
		}
		b.late, b.ends = 0, b.reset(t)
	}
	if b.used += cost; t >= b.ends-2*b.margin {
		b.late += cost
	}
}

type simulatedGCRA struct {
	burst, each float64 // units, and microseconds a unit
	empty       float64 // when no unit counts any longer
}

func (g *simulatedGCRA) Fits(t, cost int64) int64 {
	if float64(cost) > g.burst {
		return Never
	}
	return max(t, int64(math.Ceil(g.empty+(float64(cost)-g.burst)*g.each-0.5))) // of floats: half a us is no delay
}

func (g *simulatedGCRA) Take(t, cost, _ int64) {
	g.empty = max(g.empty, float64(t)) + float64(cost)*g.each
}
