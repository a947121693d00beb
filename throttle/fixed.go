package throttle

import (
	"time"
)

// The fixed window counter; see internal/script/lua/fixed.lua.
var fixed = algorithm{
	kind:     "f",
	file:     "fixed",
	capacity: func(w Window) int64 { return w.Limit },
	defaults: func(w *Window) {
		if w.Anchor == "" {
			w.Anchor = AnchorClock
		}
	},
	grantsWithin: func(w Window) (int64, time.Duration, bool) {
		return w.Limit, w.Period, w.Margin == 0 // with a margin it closes at times, whatever it has counted
	},
	options: []option{optionAnchor, optionMargin, optionPeriod},
	params: func(w Window) [4]int64 {
		firstUse := int64(0)
		if w.Anchor == AnchorFirstUse {
			firstUse = 1
		}
		return [4]int64{w.Limit, w.Period.Microseconds(), w.Margin.Microseconds(), firstUse}
	},
	simulate: func(w Window, used, now, resets int64) simulated {
		return &simulatedFixed{
			limit: w.Limit, period: w.Period.Microseconds(), margin: w.Margin.Microseconds(),
			clock: w.Anchor == AnchorClock, used: used, ends: max(now, resets),
		}
	},
	unitsIn: func(w Window, span time.Duration) int64 {
		return w.Limit * (ceilDiv(int64(span), int64(w.Period)) + 1)
	},
	validate: func(w Window) (string, any, string) {
		switch {
		case w.Anchor != AnchorClock && w.Anchor != AnchorFirstUse:
			return "anchor", string(w.Anchor), `must be "clock" or "first-use"`
		case w.Anchor == AnchorClock && w.Margin*2 >= w.Period:
			return "margin", w.Margin, "must be less than half the period of a fixed window"
		}
		return "", nil, ""
	},
}
