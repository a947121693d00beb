package plan

import (
	"maps"
	"slices"
	"sort"
)

// doublings is how often limits are doubled at most.
const doublings = 20

// Fit returns the least limits by which nothing is late, of those that must rise. It is empty if none
// helps. The function returns how many are late by some limits, in place of those in force.
func Fit(limits map[string]int64, late func(map[string]int64) (int, error)) (map[string]int64, error) {
	tried := map[string]int64{}
	for name, limit := range limits {
		tried[name] = limit << doublings
	}
	if n, err := late(tried); n > 0 || err != nil {
		return nil, err
	}
	// All are lifted now. Each in turn is lowered to what it takes.
	changed := map[string]int64{}
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		var failed error
		enough := func(limit int64) bool {
			if failed == nil {
				var n int
				tried[name] = limit
				n, failed = late(tried)
				return n == 0
			}
			return true
		}
		least := limits[name]
		if double := sort.Search(doublings, func(i int) bool { return enough(least << i) }); double > 0 {
			from := least<<(double-1) + 1
			least = from + int64(sort.Search(int(from-1), func(i int) bool { return enough(from + int64(i)) }))
			changed[name] = least
		}
		if tried[name] = least; failed != nil {
			return nil, failed
		}
	}
	return changed, nil
}
