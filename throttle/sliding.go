package throttle

import (
	_ "embed"
	"time"
)

//go:embed lua/sliding.lua
var slidingLua string

// The sliding window log, packed; see lua/sliding.lua.
var sliding = algorithm{
	kind:     "s",
	lua:      slidingLua,
	capacity: func(w Window) int64 { return w.Limit },
	params: func(w Window) [4]int64 {
		return [4]int64{w.Limit, (w.Period + w.Margin).Microseconds()}
	},
	unitsIn: func(w Window, span time.Duration) int64 {
		return w.Limit * ceilDiv(int64(span), int64(w.Period+w.Margin))
	},
	validate: func(Window) (string, any, string) { return "", nil, "" },
}
