package plan

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// These are those of internal/script/lua/line_order.lua and line_fair.lua.
const (
	pacedPeriod = time.Minute
	paceBurst   = int64(100 * time.Millisecond / time.Microsecond)
	lapse       = int64(20 * time.Millisecond / time.Microsecond)
	whole       = 100_000_000 // what a tag moves by for all that a window holds
	slot        = 100_000     // and for a slot
)

// An entry is a side at a scope.
type entry struct {
	*side
	scope  *Scope
	tag    int64
	here   []*Flow // that wait here; those at the root are in the heap of the side
	opened int64   // when the last one went on from here
	last   *Flow   // that one
}

func (s *Scope) entry(side *side) *entry {
	for _, e := range s.entries {
		if e.side == side {
			return e
		}
	}
	e := &entry{side: side, scope: s, tag: -1}
	s.entries = append(s.entries, e)
	return e
}

// waits reports whether the side waits here. A flow that went on from here just now still wants room.
func (e *entry) waits(t int64) bool {
	if e.scope.root() {
		return e.Len() > 0
	}
	return len(e.here) > 0 || e.opened == t && e.last != nil && e.last.scope != nil && e.last.scope.root()
}

// next returns the flow of a side that waits here and goes on first.
func (e *entry) next() *Flow {
	switch {
	case e.scope.root():
		return e.flows[0]
	case len(e.here) > 0:
		return slices.MinFunc(e.here, func(a, b *Flow) int { return cmp.Compare(a.ready, b.ready) })
	}
	return e.last
}

// step is by what tickets of a side move the side's tag.
func (e *entry) step(f *Flow, lump, t int64) int64 {
	alike, others := 1.0, false
	for _, other := range e.scope.entries {
		switch {
		case other == e || !other.waits(t):
		case other.batch == e.batch:
			alike++
		default:
			others = true
		}
	}
	weight := 1 / alike
	switch {
	case others && e.batch:
		weight *= e.scope.line.share
	case others:
		weight *= 1 - e.scope.line.share
	}
	return int64(math.Ceil(e.scope.part(f, lump) / weight))
}

// part is what tickets take of the tightest window, or of slots.
func (s *Scope) part(f *Flow, lump int64) float64 {
	part := 0.0
	for _, w := range s.Windows {
		part = max(part, whole*float64(w.cost(&f.works[0]))/w.Limit)
	}
	if part == 0 {
		part = slot
	}
	return part * float64(lump)
}

// begins gives a side its tag that begins to wait. Where live tickets begin, batches go one ticket later.
func (e *entry) begins(t int64) {
	s, fresh := e.scope, e.tag < e.scope.v
	e.tag = max(e.tag, s.v)
	live := slices.ContainsFunc(s.entries, func(o *entry) bool { return o != e && !o.batch && o.waits(t) })
	for _, o := range s.entries {
		if fresh && o.batch && o.waits(t) && (!e.batch && !live || o == e && live) {
			o.tag = max(o.tag, s.v+o.step(o.next(), 1, t))
		}
	}
}

// before reports whether a side goes before another.
func (e *entry) before(other *entry) bool {
	if e.tag != other.tag {
		return e.tag < other.tag
	}
	return !e.batch && other.batch
}

// charge counts a start. late is for how long live tickets at broader scopes may have delayed a batch. It
// returns that for narrower ones.
func (e *entry) charge(f *Flow, t, lump int64, late float64) float64 {
	s, v, alone, live := e.scope, e.tag, true, false
	for _, o := range s.entries {
		if o != e && o.waits(t) {
			v, alone, live = min(v, o.tag), false, live || !o.batch
		}
	}
	if alone && !e.batch {
		return 0
	}
	s.v = max(s.v, v)
	e.tag += e.step(f, lump, t)
	if !e.batch {
		return 0
	}
	longest, next, by := late, 0.0, (*Window)(nil)
	for _, w := range s.Windows {
		if w.Period > 0 && w.Period <= pacedPeriod {
			period := float64(w.Period.Microseconds())
			longest = max(longest, period)
			if us := float64(w.cost(&f.works[0])*lump) * period / w.Limit; us > next {
				next, by = us, w
			}
		}
	}
	if next > 0 {
		s.paced, s.pacedBy = math.Ceil(max(s.paced, float64(t)-late)+next), by
	}
	if live {
		return longest
	}
	return late
}

// fits returns when tickets of a flow have room in a scope, beside the sides that go first there, and
// what the last reason is to wait.
func (s *Scope) fits(f *Flow, t, lump int64) (int64, *Window) {
	here, live := s.entry(f.side), false
	var first []*entry // that leave less room
	for _, e := range s.entries {
		before := e != here && e.before(here)
		if e == here || !before && !f.Batch || !e.waits(t) {
			continue
		}
		live = live || !e.batch
		switch next := e.next(); {
		case !before || s.root():
		case next.scope == s && next.ready > t:
			return next.ready, next.window
		default:
			first = append(first, e)
		}
	}
	at, by := t, (*Window)(nil)
	if paced := int64(s.paced) - paceBurst; f.Batch && !live && paced > t {
		at, by = paced, s.pacedBy
	}
	for again := true; again; {
		again = false
		for _, w := range s.Windows {
			cost := w.cost(&f.works[0]) * lump
			if cost == 0 {
				continue
			}
			alone := w.Fits(at, min(cost, int64(w.Limit)))
			for _, e := range first {
				cost += w.cost(&e.next().works[0])
			}
			// The room that is left to them lapses, if they have not taken it by then.
			if fits := min(w.Fits(at, min(cost, int64(w.Limit))), max(alone, t+lapse)); fits > at {
				at, by, again = fits, w, fits < never
			}
		}
	}
	return at, by
}
