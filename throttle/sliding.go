package throttle

import (
	"time"
)

// The sliding window log, packed; see internal/script/lua/sliding.lua.
var sliding = algorithm{
	kind:         "s",
	file:         "sliding",
	capacity:     func(w Window) int64 { return w.Limit },
	grantsWithin: func(w Window) (int64, time.Duration, bool) { return w.Limit, w.Period + w.Margin, true },
	options:      []option{optionMargin, optionPeriod},
	simulate: func(w Window, used, now, resets int64) simulated {
		s := &simulatedSliding{limit: w.Limit, period: (w.Period + w.Margin).Microseconds()}
		s.before(used, now, resets)
		return s
	},
	params: func(w Window) [4]int64 {
		return [4]int64{w.Limit, (w.Period + w.Margin).Microseconds()}
	},
	unitsIn: func(w Window, span time.Duration) int64 {
		return w.Limit * ceilDiv(int64(span), int64(w.Period+w.Margin))
	},
}
