package algorithm

import "time"

// Fixed is the fixed window counter: see throttle/internal/script/lua/fixed.lua.
var Fixed = Algorithm{
	Kind:          "f",
	File:          "fixed",
	ForgetsExcess: true,
	Lately: func(period, left time.Duration) time.Duration {
		return max(period-max(0, left)%period, period/10) // a bucket that has just begun says little
	},
	Options: []Option{OptionMargin, OptionPeriod},
	Paced:   func(w Window) time.Duration { return w.Period },
	Params:  func(w Window) [4]int64 { return [4]int64{w.Limit, w.Margin.Microseconds(), w.Period.Microseconds()} },
	Simulate: func(w Window, c Counted) Simulated {
		period, margin := w.Period.Microseconds(), w.Margin.Microseconds()
		return c.buckets(w, func(t int64) int64 { return t - (t-margin)%period + period })
	},
	Rule: func(w Window) (string, any, string) {
		if w.Margin*2 >= w.Period {
			return "margin", w.Margin, "must be less than half the period of a fixed window"
		}
		return "", nil, ""
	},
}
