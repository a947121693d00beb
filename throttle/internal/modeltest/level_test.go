package modeltest

import (
	"fmt"
	"math/big"
	"slices"

	"github.com/sluice-go/sluice/throttle"
)

// level is how many units count at t, which is not before the last event.
func level(w throttle.Window, log []*grantEvent, t int64) *big.Rat {
	if w.Algorithm == throttle.AlgorithmGCRA {
		return bucketLevel(w, log, t)
	}
	period, margin, units := w.Period.Microseconds(), w.Margin.Microseconds(), int64(0)
	for _, e := range log {
		if e.grant != nil || e.cancelled {
			continue // a cancelled grant never was
		}
		// A fixed window counts the margins around its resets on both sides.
		if w.Algorithm == throttle.AlgorithmFixed && (e.at+margin)/period >= (t-margin)/period ||
			w.Algorithm == throttle.AlgorithmSliding && e.at > t-period-margin {
			units += e.units
		}
	}
	return big.NewRat(units, 1)
}

// bucketLevel pours and drains from the first event on, in exact fractions.
func bucketLevel(w throttle.Window, log []*grantEvent, t int64) *big.Rat {
	level, at, scale, empty := new(big.Rat), int64(0), int64(0), int64(0)
	drainTo := func(t int64, w throttle.Window) {
		if t >= empty {
			level.SetInt64(0) // forgotten, whatever the rate is now
		}
		if s := rateOf(w).Denom().Int64(); s != scale { // a changed rate rounds the level up
			level.SetInt64(ceil(level))
			scale = s
		}
		level.Sub(level, new(big.Rat).Mul(big.NewRat(t-at, 1), rateOf(w)))
		at = t
		if level.Sign() < 0 {
			level.SetInt64(0)
		}
	}
	for _, e := range log {
		drainTo(e.at, e.window)
		units := big.NewRat(e.units, 1)
		if e.grant != nil {
			units.Sub(units, new(big.Rat).Mul(big.NewRat(e.at-e.grant.at, 1), rateOf(e.window))) // the rest has drained
			if units.Sign() < 0 || e.units == 0 {
				units.SetInt64(0)
			}
			if units.Cmp(level) > 0 {
				units.Set(level)
			}
			units.Neg(units)
		}
		level.Add(level, units)
		empty = at + ceil(new(big.Rat).Quo(level, rateOf(e.window)))
	}
	drainTo(t, w)
	return level
}

// rateOf is in units a microsecond.
func rateOf(w throttle.Window) *big.Rat {
	return big.NewRat(w.Limit, (w.Period + w.Margin).Microseconds())
}

func ceil(r *big.Rat) int64 {
	q, rest := new(big.Int).QuoRem(r.Num(), r.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		q.Add(q, big.NewInt(1))
	}
	return q.Int64()
}

// fitsFrom is the first time from t on at which the cost fits the window.
func fitsFrom(w throttle.Window, log []*grantEvent, t, cost int64) int64 {
	if w.Algorithm == throttle.AlgorithmGCRA && cost > 0 {
		return drainsTo(w, log, t, capacity(w)-cost)
	}
	return first(w, log, t, func(level *big.Rat) bool { return fits(w, cost, level) })
}

func fits(w throttle.Window, cost int64, level *big.Rat) bool {
	room := new(big.Rat).Sub(big.NewRat(capacity(w), 1), level)
	return cost == 0 || room.Cmp(big.NewRat(cost, 1)) >= 0
}

// resets is the first time from t on at which nothing counts.
func resets(w throttle.Window, log []*grantEvent, t int64) int64 {
	if w.Algorithm == throttle.AlgorithmGCRA {
		return drainsTo(w, log, t, 0)
	}
	return first(w, log, t, func(level *big.Rat) bool { return level.Sign() == 0 })
}

// drainsTo is the first time from t on at which a bucket holds no more than units, by the rate that holds now.
func drainsTo(w throttle.Window, log []*grantEvent, t, units int64) int64 {
	over := new(big.Rat).Sub(level(w, log, t), big.NewRat(units, 1))
	return t + max(0, ceil(over.Quo(over, rateOf(w))))
}

// first tries every time from t on at which anything can change.
func first(w throttle.Window, log []*grantEvent, t int64, holds func(level *big.Rat) bool) int64 {
	period, margin := w.Period.Microseconds(), w.Margin.Microseconds()
	reset := ((t-margin)/period+1)*period + margin
	times := []int64{t, reset, reset + period}
	for _, e := range log {
		times = append(times, e.at+period+margin)
	}
	slices.Sort(times)
	for _, at := range times {
		if at >= t && holds(level(w, log, at)) {
			return at
		}
	}
	panic(fmt.Sprintf("the model finds no time for %+v", w))
}
