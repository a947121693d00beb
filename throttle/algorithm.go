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
	// Sliding counts the last period exactly: no span of that length ever holds more than the
	// limit.
	Sliding Algorithm = "sliding"

	// Fixed counts buckets of one period each.
	Fixed Algorithm = "fixed"

	// GCRA grants Burst units at once and then one each Period/Limit, evenly spaced.
	GCRA Algorithm = "gcra"

	// Calendar counts between two ticks of a calendar, such as the midnights of a time zone.
	Calendar Algorithm = "calendar"

	// Concurrency counts what runs at once: units are held until they are given back by Release, or
	// for Lease after the last Renew.
	Concurrency Algorithm = "concurrency"
)

// algorithms is the registry: one Go file and one Lua file an algorithm, and one line here.
var algorithms = map[Algorithm]algorithm{
	Sliding:     sliding,
	Fixed:       fixed,
	GCRA:        gcra,
	Calendar:    calendarCounter,
	Concurrency: concurrency,
}

// An algorithm is the Go side of one way to count. The Lua side decides; it sees the numbers of
// params as p1 to p4.
type algorithm struct {
	// capacity is the largest cost that can ever fit.
	capacity func(Window) int64

	// kind names the algorithm in Lua and in stored state.
	kind string

	lua string

	// params turns a valid window into the numbers of the Lua side. A calendar's ticks go in place
	// of the last.
	params func(Window) [4]int64

	// unitsIn is the most units that the window can let through in any span of the given
	// length, or -1 if that is not known.
	unitsIn func(w Window, span time.Duration) int64

	// validate checks what the fields mean together; mend is empty if all is well.
	validate func(Window) (field string, value any, mend string)
}

func algorithmNames() string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(algorithms)) {
		names = append(names, `"`+string(name)+`"`)
	}
	return strings.Join(names, ", ")
}

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }
