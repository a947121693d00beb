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

// A side is the flows of one class in one queue that wait at a scope.
type side struct {
	flows heapOf // at narrower scopes than the root they are in no order
	batch bool
	queue string
	tag   int64

	opened int64 // at a narrow scope: when the last flow went on from here
	last   *Flow // that one

	slots []*Window         // at the root
	tags  map[string]*int64 // of tenants, at the root
	v     int64             // of these: the tag of the last start
}

// side returns that of a flow. Sides of one tag go by class and queue.
func (s *Scope) side(f *Flow) *side {
	for _, side := range s.sides {
		if side.queue == f.Queue && side.batch == f.Batch {
			return side
		}
	}
	made := &side{batch: f.Batch, queue: f.Queue, tag: -1, tags: map[string]*int64{}}
	s.sides = append(s.sides, made)
	slices.SortFunc(s.sides, func(a, b *side) int {
		if a.batch != b.batch {
			return map[bool]int{false: -1, true: 1}[a.batch]
		}
		return cmp.Compare(a.queue, b.queue)
	})
	return made
}

func (s *side) tagOf(tenant string) *int64 {
	if s.tags[tenant] == nil {
		s.tags[tenant] = new(int64)
	}
	return s.tags[tenant]
}

// first returns the side that goes first at the root, of those with a free slot. If there is none, it
// returns when a slot is free.
func (l *Line) first(t int64) (first *side, at int64) {
	at, l.binds = never, ""
	for _, s := range l.Root.sides {
		if len(s.flows) == 0 {
			continue
		}
		free := t
		for _, w := range s.slots {
			if cost := w.cost(&s.flows[0].works[0]); cost > 0 {
				free = max(free, w.Fits(t, cost))
			}
		}
		switch {
		case free > t:
			at, l.binds = min(at, free), BySlots
		case first == nil || s.tag < first.tag:
			first = s
		}
	}
	if first != nil {
		l.binds = ""
	}
	return first, at
}

// waits reports whether the side has a flow that wants room here. One that went on just now still does.
func (s *side) waits(t int64) bool { return len(s.flows) > 0 || s.goesOn(t) }

func (s *side) goesOn(t int64) bool {
	return s.last != nil && s.opened == t && s.last.scope == &s.last.line.Root
}

// next returns the flow of a side that waits and goes on first.
func (s *side) next() *Flow {
	switch {
	case len(s.flows) == 0:
		return s.last
	case s.flows[0].scope == &s.flows[0].line.Root:
		return s.flows[0]
	}
	return slices.MinFunc(s.flows, func(a, b *Flow) int { return cmp.Compare(a.key, b.key) })
}

// step is by what tickets of a flow move the tag of its side. Batches have the line's share of batches, and
// live tickets the rest. Queues share that evenly.
func (s *Scope) step(f *Flow, t, lump int64) int64 {
	mine, alike, others := s.side(f), 1.0, false
	for _, other := range s.sides {
		switch {
		case other == mine || !other.waits(t):
		case other.batch == f.Batch:
			alike++
		default:
			others = true
		}
	}
	weight := 1 / alike
	switch {
	case others && f.Batch:
		weight *= f.line.share
	case others:
		weight *= 1 - f.line.share
	}
	return int64(math.Ceil(s.part(f, lump) / weight))
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
func (s *Scope) begins(begun *side, t int64) {
	fresh := begun.tag < s.v
	begun.tag = max(begun.tag, s.v)
	live := slices.ContainsFunc(s.sides, func(o *side) bool { return o != begun && !o.batch && o.waits(t) })
	for _, o := range s.sides {
		if fresh && o.batch && o.waits(t) && (!begun.batch && !live || o == begun && live) {
			o.tag = max(o.tag, s.v+s.step(o.next(), t, 1))
		}
	}
}

// charge counts a start of tickets: for the flow's tenant, and for its side at all scopes.
func (f *Flow) charge(t, lump int64) {
	f.side.v = max(f.side.v, *f.tag)
	*f.tag = f.side.v + int64(math.Ceil(f.line.Root.part(f, lump)/f.Weight))
	late := f.line.Root.charge(f, t, lump, 0)
	for _, s := range slices.Backward(f.Scopes) {
		late = s.charge(f, t, lump, late)
	}
}

// charge counts a start at one scope. late is for how long live tickets at broader scopes may have delayed a
// batch: it does not lose its time here. The function returns that for narrower ones.
func (s *Scope) charge(f *Flow, t, lump int64, late float64) float64 {
	mine, alone, live := s.side(f), true, false
	least := mine.tag
	for _, o := range s.sides {
		if o != mine && o.waits(t) {
			least, alone, live = min(least, o.tag), false, live || !o.batch
		}
	}
	if alone && !f.Batch {
		return 0
	}
	s.v = max(s.v, least)
	mine.tag += s.step(f, t, lump)
	if !f.Batch {
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

// fits returns when the next ticket of a flow has room in a scope, beside the sides that go first there, and
// what the last reason is to wait. At the root only the side is asked that goes first.
func (s *Scope) fits(f *Flow, t int64) (at int64, by *Window) {
	mine, live := s.side(f), false
	var first []*Flow // that it leaves room
	for _, o := range s.sides {
		if o == mine || !o.waits(t) {
			continue
		}
		live = live || !o.batch
		before := o.tag < mine.tag || o.tag == mine.tag && !o.batch && f.Batch
		switch next := o.next(); {
		case !before || s == &f.line.Root:
		case next.scope == s && next.key > t:
			return next.key, next.window
		default:
			first = append(first, next)
		}
	}
	at = t
	if paced := int64(s.paced) - paceBurst; f.Batch && !live && paced > t {
		at, by = paced, s.pacedBy
	}
	lump := f.lump()
	for again := true; again; {
		again = false
		for _, w := range s.Windows {
			cost := w.cost(&f.works[0]) * lump
			if cost == 0 {
				continue
			}
			alone := w.Fits(at, min(cost, int64(w.Limit)))
			for _, other := range first {
				cost += w.cost(&other.works[0])
			}
			// The room that is left to them lapses, if they have not taken it by then.
			if fits := min(w.Fits(at, min(cost, int64(w.Limit))), max(alone, t+lapse)); fits > at {
				at, by, again = fits, w, fits < never
			}
		}
	}
	return at, by
}
