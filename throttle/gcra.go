package throttle

import (
	"fmt"
	"math/big"
	"time"
)

// The generic cell rate algorithm; see internal/script/lua/gcra.lua.
var gcra = algorithm{
	kind:     "g",
	file:     "gcra",
	capacity: func(w Window) int64 { return w.Burst },
	defaults: func(w *Window) {
		if w.Burst == 0 {
			w.Burst = w.Limit
		}
	},
	options: []option{optionBurst, optionMargin, optionPeriod},
	params: func(w Window) [4]int64 {
		scale, drain := gcraRate(w)
		return [4]int64{w.Burst * scale, scale, drain}
	},
	unitsIn: func(w Window, span time.Duration) int64 {
		scale, drain := gcraRate(w)
		drained := new(big.Int).Mul(big.NewInt(span.Microseconds()), big.NewInt(drain))
		drained.Quo(drained, big.NewInt(scale))
		if !drained.IsInt64() {
			return -1
		}
		return w.Burst + drained.Int64()
	},
	validate: func(w Window) (string, any, string) {
		if w.Burst < 1 || w.Burst > MaxLimit {
			return "burst", w.Burst, fmt.Sprintf("must be 1 to %d", int64(MaxLimit))
		}
		scale, drain := gcraRate(w)
		asked := float64(w.Limit) / float64((w.Period + w.Margin).Microseconds())
		if got := float64(drain) / float64(scale); got < 0.999*asked {
			return "burst", w.Burst, "is too large for so slow a rate: keep burst x period / limit below a year or so"
		}
		return "", nil, ""
	},
}

// gcraRate expresses the rate limit / (period + margin) as drain/scale units a microsecond, in
// integers so small that a full bucket, scale x burst, stays far below 2^53. Where the exact
// fraction is larger than that, the drain is rounded down: stricter, by less than 0.1 %.
func gcraRate(w Window) (scale, drain int64) {
	const full = 1 << 50
	limit, period := w.Limit, (w.Period + w.Margin).Microseconds()
	if g := new(big.Int).GCD(nil, nil, big.NewInt(limit), big.NewInt(period)).Int64(); g > 1 {
		limit, period = limit/g, period/g
	}
	if period <= full/w.Burst {
		return period, limit
	}
	scale = full / w.Burst
	d := new(big.Int).Mul(big.NewInt(limit), big.NewInt(scale))
	return scale, d.Quo(d, big.NewInt(period)).Int64()
}
