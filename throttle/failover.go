package throttle

import (
	"math"
	"time"
)

// countsFor returns the longest time for which a window counts a grant, for any tenant of the
// policy, up to MaxPeriod.
func (p Policy) countsFor() time.Duration {
	longest := time.Duration(0)
	for _, w := range p.Windows {
		longest = max(longest, w.countsFor())
		for _, t := range p.Tenants {
			longest = max(longest, t.apply(w).countsFor())
		}
	}
	return min(longest, MaxPeriod)
}

func (w Window) countsFor() time.Duration {
	switch w.Algorithm {
	case GCRA: // until what was granted at once has drained
		us := math.Ceil(float64(w.Burst) / float64(w.Limit) * float64((w.Period + w.Margin).Microseconds()))
		return time.Duration(min(us, float64(MaxPeriod.Microseconds()))) * time.Microsecond
	case Concurrency:
		return w.Lease
	}
	return w.Period + w.Margin
}
