package algorithm

import (
	"cmp"
	"time"
)

// Where the buckets of a fixed window begin: see the constants of these names in package throttle.
const (
	AnchorClock    = "clock"
	AnchorFirstUse = "first-use"
)

// Fixed is the fixed window counter: see throttle/internal/script/lua/fixed.lua.
var Fixed = Algorithm{
	Kind:          "f",
	File:          "fixed",
	Defaults:      func(w *Window) { w.Anchor = cmp.Or(w.Anchor, AnchorClock) },
	ForgetsExcess: true,
	Lately: func(period, left time.Duration) time.Duration {
		return max(period-max(0, left), period/10) // a bucket that has just begun says little
	},
	Options: []Option{OptionAnchor, OptionMargin, OptionPeriod},
	Paced:   func(w Window) time.Duration { return w.Period },
	Params: func(w Window) [4]int64 {
		firstUse := int64(0)
		if w.Anchor == AnchorFirstUse {
			firstUse = 1
		}
		return [4]int64{w.Limit, w.Period.Microseconds(), w.Margin.Microseconds(), firstUse}
	},
	Simulate: func(w Window, c Counted) Simulated {
		period, margin := w.Period.Microseconds(), w.Margin.Microseconds()
		s, began := &simulatedBuckets{limit: w.Limit}, c.number(0, 7)
		if s.reset = func(t int64) int64 { return t + period + margin }; w.Anchor == AnchorClock {
			s.closed, s.reset, began = margin, func(t int64) int64 { return t - t%period + period }, c.number(7, 7)
		}
		s.ends, s.used = s.reset(began), c.number(14, 7)
		return s
	},
	Rule: func(w Window) (string, any, string) {
		switch {
		case w.Anchor != AnchorClock && w.Anchor != AnchorFirstUse:
			return "anchor", w.Anchor, `must be "clock" or "first-use"`
		case w.Anchor == AnchorClock && w.Margin*2 >= w.Period:
			return "margin", w.Margin, "must be less than half the period of a fixed window"
		}
		return "", nil, ""
	},
}
