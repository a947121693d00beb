package algorithm

import "time"

// Sliding is the sliding window log, packed: see throttle/internal/script/lua/sliding.lua.
var Sliding = Algorithm{
	Kind:          "s",
	File:          "sliding",
	Capacity:      func(w Window) int64 { return w.Limit },
	ForgetsExcess: true,
	GrantsWithin:  func(w Window) (int64, time.Duration, bool) { return w.Limit, w.Period + w.Margin, true },
	Lately:        func(period, _ time.Duration) time.Duration { return period },
	Options:       []Option{OptionMargin, OptionPeriod},
	Simulate: func(w Window, used, now, resets int64) Simulated {
		s := &simulatedSliding{limit: w.Limit, period: (w.Period + w.Margin).Microseconds(), used: used}
		// Redis says how much counts, and when the last of it leaves: it is taken to leave evenly.
		parts := min(used, 64)
		for i := range parts {
			units := used*(i+1)/parts - used*i/parts
			s.log = append(s.log, leaving{now + (resets-now)*(i+1)/parts, units})
		}
		return s
	},
	Params: func(w Window) [4]int64 { return [4]int64{w.Limit, (w.Period + w.Margin).Microseconds()} },
	UnitsIn: func(w Window, span time.Duration) int64 {
		return w.Limit * CeilDiv(int64(span), int64(w.Period+w.Margin))
	},
}
