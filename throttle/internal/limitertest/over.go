package limitertest

import (
	"math/big"
	"slices"

	"github.com/sluice-go/sluice/throttle"
)

// A LoggedGrant is what the called side notes: when, by the clock of Redis, and how much.
type LoggedGrant struct{ At, Units int64 }

// MostOver counts by brute force how many units were granted above what a window of algorithm sliding, gcra or fixed
// promises, in the worst place of the log; 0 or less is good. It knows nothing of how the scripts count.
func MostOver(w throttle.Window, log []LoggedGrant) int64 {
	w = Policy(w).WithDefaults().Windows[0]
	slices.SortStableFunc(log, func(a, b LoggedGrant) int { return int(a.At - b.At) })
	period, worst := (w.Period + w.Margin).Microseconds(), -w.Limit
	bucket, inBucket := int64(-1), int64(0)
	for i := range log {
		switch {
		case w.Algorithm == throttle.AlgorithmSliding: // every span (t - period, t] that ends with a grant
			units := int64(0)
			for j := i; j >= 0 && log[j].At > log[i].At-period; j-- {
				units += log[j].Units
			}
			worst = max(worst, units-w.Limit)
		case w.Algorithm == throttle.AlgorithmGCRA: // every span from a grant to a grant
			units := int64(0)
			for j := i; j >= 0; j-- {
				units += log[j].Units
				span := big.NewInt(log[i].At - log[j].At)
				drained := span.Quo(span.Mul(span, big.NewInt(w.Limit)), big.NewInt(period)).Int64()
				worst = max(worst, units-w.Burst-drained)
			}
		default:
			if b := log[i].At / w.Period.Microseconds(); b != bucket {
				bucket, inBucket = b, 0
			}
			inBucket += log[i].Units
			worst = max(worst, inBucket-w.Limit)
		}
	}
	return worst
}
