package modeltest

import "math"

// An adaptModel is the controller of upstream.lua in Go. Its times are microseconds, its rates
// parts of the published one. Both are rounded as they are stored.
type adaptModel struct {
	cycle    float64 // how long the window takes for all that it holds
	capacity float64
	full     bool // the rate changes too; else grants are only spread

	on         bool
	rate, peak float64 // after the last cut, and around which it grows slowly
	cut        float64 // when the rate was cut last
	from       float64 // since when it grows
	next       float64 // when the next unit may go
	free, hold float64 // until when grants are spread, and for how long after a refusal
	last, wait float64 // the last refusal, and the pause after it
	since      float64
	refusals   int
}

const (
	adaptKeep    = 0.875   // of the rate, at a cut
	adaptGrowth  = 1e-4    // of the rate, in the third power of a unit of time
	adaptFloor   = 1. / 64 // of the published rate
	adaptHold    = 60.     // units of time
	adaptHolds   = 64.     // the longest, in parts of the shortest
	adaptLongest = 60e6    // of all that goes by the cycle
	adaptFirst   = 1e6     // the longest first pause
	adaptLate    = 20e3    // with which a late request catches up
	adaptParts   = 1e12    // of the published rate, in which rates are stored
)

func (m *adaptModel) span() float64 { return math.Min(m.cycle, adaptLongest) }

// unit is the time of ten calls.
func (m *adaptModel) unit() float64 {
	return math.Min(math.Max(10*m.cycle/m.capacity, 1e6), adaptLongest)
}

func (m *adaptModel) rateAt(now float64) float64 {
	k := math.Pow((m.peak-m.rate)/adaptGrowth, 1./3)
	t := math.Max(0, now-m.from) / m.unit()
	return math.Max(adaptFloor, math.Min(1, m.peak+adaptGrowth*math.Pow(t-k, 3)))
}

func (m *adaptModel) fitsAt(now float64) float64 {
	if !m.on || now >= m.free {
		return now
	}
	return math.Max(now, math.Min(m.next, m.free))
}

// take spreads grants. A server that asks late may catch up with a few of them.
func (m *adaptModel) take(now float64) {
	if !m.on || now >= m.free {
		return
	}
	rate := m.rateAt(now)
	spacing, late := m.cycle/m.capacity/rate, adaptLate
	if rate < 1 {
		late = math.Min(late, 1e8/spacing)
	}
	m.next = math.Ceil(math.Max(m.next, now-late) + spacing)
}

// refused notes that what was granted at `at` was refused, for `said` or, if that is 0, for an
// unknown time. It returns for how long to pause.
func (m *adaptModel) refused(now, at, said float64) float64 {
	known := m.on && now < m.free+m.hold
	if known && at <= m.last {
		return said // of one moment with the last
	}
	wait := said
	switch {
	case said > 0:
	case known && now < m.last+m.wait+m.span()/2:
		wait = math.Min(2*m.wait, m.span())
	default:
		wait = math.Min(m.span()/8, adaptFirst)
	}
	wait = math.Ceil(wait)
	switch shortest := adaptHold * m.unit(); {
	case !known:
		*m = adaptModel{cycle: m.cycle, capacity: m.capacity, full: m.full, on: true, hold: shortest, since: now}
		m.rate, m.peak, m.cut = 1, 1, now
	case now >= m.free: // the window was open again
		m.hold = math.Min(2*m.hold, adaptHolds*shortest)
		m.rate, m.peak, m.cut = 1, 1, now
	case m.full && at > m.cut+m.span()/2:
		r := m.rateAt(now)
		m.rate = math.Max(adaptFloor, r*adaptKeep)
		m.peak = math.Floor(math.Max(m.rate, r*(1+adaptKeep)/2)*adaptParts) / adaptParts
		m.rate = math.Floor(m.rate*adaptParts) / adaptParts
		m.from, m.cut = now+wait, now
	}
	m.hold = math.Ceil(m.hold)
	m.last, m.wait = now, wait
	m.refusals++
	m.next = math.Max(m.next, now+wait)
	m.free = now + wait + m.hold
	return wait
}
