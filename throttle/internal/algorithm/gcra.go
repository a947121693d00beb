package algorithm

import (
	"cmp"
	"fmt"
	"time"
)

// GCRA is the generic cell rate algorithm: see throttle/internal/script/lua/gcra.lua.
var GCRA = Algorithm{
	Kind:     "g",
	File:     "gcra",
	Defaults: func(w *Window) { w.Burst = cmp.Or(w.Burst, w.Limit) },
	Options:  []Option{OptionBurst, OptionMargin, OptionPeriod},
	Paced: func(w Window) time.Duration {
		return time.Duration(float64(w.Period+w.Margin) * float64(w.Burst) / float64(w.Limit))
	},
	Params: func(w Window) [4]int64 {
		span, drained := gcraRate(w)
		return [4]int64{w.Burst, span, drained, (w.Period + w.Margin).Microseconds()}
	},
	Simulate: func(w Window, c Counted) Simulated {
		each := float64((w.Period + w.Margin).Microseconds()) / float64(w.Limit)
		level := float64(c.number(7)) + float64(c.number(14))/float64(max(1, c.number(21))) // units, and parts of one
		return &simulatedGCRA{burst: float64(w.Burst), each: each, empty: float64(c.number(0)) + level*each}
	},
	Rule: func(w Window) (string, any, string) {
		if w.Burst < 1 || w.Burst > MaxLimit {
			return "burst", w.Burst, fmt.Sprintf("must be 1 to %d", int64(MaxLimit))
		}
		return "", nil, ""
	},
}

// gcraRate returns the rate limit / (period + margin) as a reduced fraction: units in each span of us, which the
// scripts expect below 2^46.
func gcraRate(w Window) (span, units int64) {
	units, span = w.Limit, (w.Period + w.Margin).Microseconds()
	divisor, rest := units, span
	for rest != 0 {
		divisor, rest = rest, divisor%rest
	}
	return span / divisor, units / divisor
}
