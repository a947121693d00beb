package plan

import (
	"maps"
	"slices"
	"strings"
)

// A Change is another limit.
type Change struct {
	Window string `json:"window"` // or BySlots
	Limit  int64  `json:"limit"`  // by which it is late
	Fits   int64  `json:"fits"`   // by which it is not
}

// largest is how much larger limits are tried.
const largest = 1 << 20

// Fit returns the smallest change of the limits by which nothing is late: of one of them, or of as few as
// it takes. It is empty if none helps. The function returns how many are late by some limits, in place of
// those in force.
func Fit(limits map[string]int64, late func(map[string]int64) (int, error)) ([]Change, error) {
	names := slices.Sorted(maps.Keys(limits))
	var best []Change
	for _, name := range names {
		to, err := least(limits[name], func(n int64) (int, error) { return late(map[string]int64{name: n}) })
		if err != nil {
			return best, err
		}
		c := Change{name, limits[name], to}
		if to > 0 && (best == nil || c.by() < best[0].by()) {
			best = []Change{c}
		}
	}
	if best != nil {
		return best, nil
	}
	// All are lifted, and each in turn is lowered to what it takes.
	tried := map[string]int64{}
	for _, name := range names {
		tried[name] = limits[name] * largest
	}
	for _, name := range names {
		to, err := least(limits[name]-1, func(n int64) (int, error) {
			tried[name] = max(n, limits[name])
			return late(tried)
		})
		if err != nil || to == 0 {
			return nil, err
		}
		if tried[name] = to; to > limits[name] {
			best = append(best, Change{name, limits[name], to})
		}
	}
	slices.SortFunc(best, func(a, b Change) int { return strings.Compare(a.Window, b.Window) })
	return best, nil
}

// by is how many times larger the limit is.
func (c Change) by() float64 { return float64(c.Fits) / float64(c.Limit) }

// least returns the least number above one that leaves none late, 0 if none does.
func least(above int64, late func(n int64) (int, error)) (int64, error) {
	from, to, try := above, int64(0), max(1, above*2) // to: the least one known to leave none late
	for to == 0 || from+1 < to {
		n, err := late(try)
		switch {
		case err != nil, n > 0 && try/max(1, above) >= largest:
			return 0, err
		case n == 0:
			to = try
		default:
			from = try
		}
		if try *= 2; to > 0 {
			try = (from + to) / 2
		}
	}
	return to, nil
}
