package algorithm

import "time"

// Sliding is the sliding window log, packed: see throttle/internal/script/lua/sliding.lua.
var Sliding = Algorithm{
	Kind:          "s",
	File:          "sliding",
	ForgetsExcess: true,
	Lately:        func(period, _ time.Duration) time.Duration { return period },
	Options:       []Option{OptionMargin, OptionPeriod},
	Paced:         func(w Window) time.Duration { return w.Period + w.Margin },
	Simulate: func(w Window, c Counted) Simulated {
		return c.log(w.Limit, (w.Period + w.Margin).Microseconds(), 7, 14)
	},
	Params: func(w Window) [4]int64 { return [4]int64{w.Limit, (w.Period + w.Margin).Microseconds()} },
}
