package throttle

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// An Algorithm says how a window counts units.
type Algorithm string

const (
	// Sliding counts the last period: no span of that length ever holds more than Limit. It is the
	// default.
	Sliding Algorithm = "sliding"

	// Fixed counts buckets of one period each.
	Fixed Algorithm = "fixed"

	// GCRA grants Burst units at once, and then one each Period/Limit: the generic cell rate algorithm
	// (ITU-T I.371).
	GCRA Algorithm = "gcra"

	// Calendar counts between two ticks of a cron expression, such as the midnights of a time zone:
	// see Window.Resets.
	Calendar Algorithm = "calendar"

	// Concurrency counts what runs at once. Units are held until Reservation.Release, or for Lease
	// after the last renewal: see Reservation.Hold.
	Concurrency Algorithm = "concurrency"
)

// algorithms is the registry: one Go file and one Lua file an algorithm, and one line here.
var algorithms = map[Algorithm]*algorithm{
	Sliding:     &sliding,
	Fixed:       &fixed,
	GCRA:        &gcra,
	Calendar:    &calendarCounter,
	Concurrency: &concurrency,
}

// An algorithm is the Go side of one way to count. The Lua side decides; it sees the numbers of
// params as p1 to p4.
type algorithm struct {
	// capacity is the largest cost that can ever fit.
	capacity func(Window) int64

	// defaults, if not nil, writes out the fields that only this algorithm has.
	defaults func(*Window)

	// file is the Lua side, in internal/script/lua, without ".lua".
	file string

	// grantsWithin, if not nil, returns how many units the window always grants in any span of the
	// length that it returns; ok is false if there is no such number.
	grantsWithin func(Window) (units int64, span time.Duration, ok bool)

	// kind names the algorithm in Lua and in stored state.
	kind string

	// leases says that units are held until they are given back, or their lease runs out: a denial
	// may end at any time, and what was taken cannot be corrected.
	leases bool

	// options are the fields of a Window that are for some algorithms only, and for this one.
	options []option

	// params turns a valid window into the numbers of the Lua side.
	params func(Window) [4]int64

	// simulate returns a window that has counted so many units at a time, and counts none of them any
	// more at `resets`; times are microseconds. If it is nil, plans leave the window out.
	simulate func(w Window, used, now, resets int64) simulated

	// ticks, if not nil, makes the list that goes in place of the last parameter.
	ticks func(Window) *calendar

	// unitsIn is the most units that the window can let through in any span of the given
	// length, or -1 if that is not known.
	unitsIn func(w Window, span time.Duration) int64

	// validate, if not nil, checks what the fields mean together; hint is empty if all is well.
	validate func(Window) (field string, value any, hint string)
}

// An option is a field of a Window that only some algorithms have.
type option string

const (
	optionAnchor   option = "anchor"
	optionBurst    option = "burst"
	optionLease    option = "lease"
	optionMargin   option = "margin"
	optionPeriod   option = "period"
	optionResets   option = "resets"
	optionTimezone option = "timezone"
)

func (a *algorithm) has(o option) bool { return slices.Contains(a.options, o) }

// algorithmNames lists those that have the options, quoted, in order.
func algorithmNames(options ...option) string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(algorithms)) {
		if !slices.ContainsFunc(options, func(o option) bool { return !algorithms[name].has(o) }) {
			names = append(names, `"`+string(name)+`"`)
		}
	}
	return strings.Join(names, ", ")
}

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }
