// Package algorithm has the Go side of the ways in which windows count, one file for each. It knows
// numbers, but no policies, tenants or Redis. Start with sliding.go, the shortest.
package algorithm

import (
	"slices"
	"time"
)

// A Window has the numbers of a window. throttle.Window explains its fields, under the same names.
type Window struct {
	Burst, Limit     int64
	Lease            time.Duration
	Margin, Period   time.Duration
	Resets, Timezone string
}

// Bounds of all windows.
const (
	MaxLimit  = 1_000_000_000_000
	MaxPeriod = 366 * 24 * time.Hour
)

// An Algorithm is the Go side of one way to count; the Lua side decides. File, Kind, Params and Simulate are required.
type Algorithm struct {
	// Defaults fills in the defaults of the fields that only this algorithm has.
	Defaults func(*Window)

	// File is the Lua side, in throttle/internal/script/lua, without ".lua".
	File string

	// ForgetsExcess is whether units above the limit, as a policy that observes grants them, delay nothing once they
	// expire. Such a policy counts by GCRA instead, which shows for how long the limit would have delayed them.
	ForgetsExcess bool

	// Kind is the letter of File in Lua and in stored state. Algorithms with one File have one Kind.
	Kind string

	// Lately returns the time, up to now, in which a window granted the units that it counts, such as since its last
	// reset: WindowState.PerSecond divides by it. Left is the time until the window counts nothing.
	Lately func(period, left time.Duration) time.Duration

	// Leases is whether units are held until they are given back or their lease runs out.
	Leases bool

	// Options are the optional fields that this algorithm has.
	Options []Option

	// Paced returns, for forecasts, the time over which batches use the window evenly; nil if batches do not.
	Paced func(Window) time.Duration

	// Params turns a valid window into the numbers of the Lua side, p1 to p4.
	Params func(Window) [4]int64

	// Simulate returns a window that starts from what Redis has counted.
	Simulate func(Window, Counted) Simulated

	// Ticks, if not nil, makes the list that replaces the last parameter.
	Ticks func(Window) *Ticks

	// Rule returns a field that breaks a rule of this algorithm, its value, and a hint: what it must be.
	// The hint is empty if no rule is broken. The rules that all algorithms share are checked first.
	Rule func(Window) (field string, value any, hint string)
}

// ByName is the registry. Each algorithm has a Go file of its own, and a Lua file, which several may share.
var ByName = map[string]*Algorithm{
	"calendar": &Calendar, "concurrency": &Concurrency, "fixed": &Fixed, "gcra": &GCRA, "sliding": &Sliding,
}

// An Option is a field of a Window that only some algorithms have.
type Option string

const (
	OptionBurst    Option = "burst"
	OptionLease    Option = "lease"
	OptionMargin   Option = "margin"
	OptionPeriod   Option = "period"
	OptionResets   Option = "resets"
	OptionTimezone Option = "timezone"
)

// Has reports whether windows that count by the algorithm have the option.
func (a *Algorithm) Has(o Option) bool { return slices.Contains(a.Options, o) }

// Capacity returns the largest cost that can ever fit a window that counts by the algorithm.
func (a *Algorithm) Capacity(w Window) int64 {
	if a.Has(OptionBurst) {
		return w.Burst
	}
	return w.Limit
}
