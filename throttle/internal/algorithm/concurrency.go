package algorithm

import (
	"cmp"
	"fmt"
	"time"
)

// Bounds of a Concurrency window.
const (
	DefaultLease   = 30 * time.Second
	MinLease       = time.Second
	MaxLease       = 24 * time.Hour
	MaxConcurrency = 10_000
)

// Concurrency is the counting semaphore with leases: see throttle/internal/script/lua/concurrency.lua.
var Concurrency = Algorithm{
	Kind:     "c",
	File:     "concurrency",
	Defaults: func(w *Window) { w.Lease = cmp.Or(w.Lease, DefaultLease) },
	Leases:   true,
	Options:  []Option{OptionLease},
	Params:   func(w Window) [4]int64 { return [4]int64{w.Limit, w.Lease.Microseconds()} },
	Simulate: func(w Window, c Counted) Simulated {
		s := c.log(w.Limit, 0, 14, 22)
		for i := range s.log { // as if the holds, whose leases are renewed, ended evenly
			if c.Hold > 0 && s.log[i].until > c.Now {
				s.log[i].until = c.Now + c.Hold*int64(i+1)/int64(len(s.log))
			}
		}
		return s
	},
	Rule: func(w Window) (string, any, string) {
		switch {
		case w.Limit > MaxConcurrency:
			return "limit", w.Limit, fmt.Sprintf("must be 1 to %d with algorithm: concurrency", MaxConcurrency)
		case w.Lease < MinLease || w.Lease > MaxLease:
			return "lease", w.Lease, fmt.Sprintf("must be %v to %v", MinLease, MaxLease)
		case w.Lease%time.Microsecond != 0:
			return "lease", w.Lease, "must be whole microseconds"
		}
		return "", nil, ""
	},
}
