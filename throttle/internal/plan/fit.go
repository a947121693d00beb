package plan

import (
	"maps"
	"slices"
)

// largest is how much larger limits are tried.
const largest = 1 << 20

// Fit returns the least limits by which nothing is late, of those that must rise. It is empty if none
// helps. The function returns how many are late by some limits, in place of those in force.
func Fit(limits map[string]int64, late func(map[string]int64) (int, error)) (map[string]int64, error) {
	tried := map[string]int64{}
	for name, limit := range limits {
		tried[name] = limit * largest
	}
	if n, err := late(tried); n > 0 || err != nil {
		return nil, err
	}
	// All are lifted now. Each in turn is lowered to what it takes.
	changed := map[string]int64{}
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		tooLow, enough := limits[name]-1, int64(0) // the largest and the least number known to be so
		for try := limits[name]; enough == 0 || tooLow+1 < enough; {
			tried[name] = try
			switch n, err := late(tried); {
			case err != nil:
				return nil, err
			case n == 0:
				enough = try
			default:
				tooLow = try
			}
			if try *= 2; enough > 0 {
				try = (tooLow + enough) / 2
			}
		}
		if tried[name] = enough; enough > limits[name] {
			changed[name] = enough
		}
	}
	return changed, nil
}
