package inspect

import (
	"container/heap"
	"context"
	"math"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// These are those of internal/script/lua/line_order.lua and line_fair.lua.
const (
	pacedPeriod = time.Minute
	paceBurst   = int64(100 * time.Millisecond / time.Microsecond)
	lapse       = int64(20 * time.Millisecond / time.Microsecond)
	whole       = 100_000_000 // what a tag moves by for all that a window holds
	slot        = 100_000     // and for a slot
)

const (
	maxSteps     = 200_000 // tickets that are simulated at most, if limits let several of more go as one
	stepsUnasked = 1000    // after so many, some milliseconds, the context is looked at
	never        = algorithm.Never
)

// run simulates until all demands have started, or the context ends. Then it returns its error.
func (s *simulation) run(ctx context.Context) error {
	lump := int64(s.rank+maxSteps-1) / maxSteps
	for _, l := range s.lines {
		for _, f := range l.flows {
			for i := range f.works {
				f.lump(&f.works[i], lump)
			}
			if len(f.works) > 0 {
				f.wait(s.now)
			}
		}
	}
	steps := 0
	for t := s.now; s.left > 0 && t < s.end; {
		next := int64(never)
		for again := true; again; {
			again, next = false, never
			for _, l := range s.lines {
				if steps++; steps%stepsUnasked == 0 && ctx.Err() != nil {
					return ctx.Err()
				}
				at := l.startOne(t)
				again, next = again || at <= t, min(next, at)
			}
		}
		for _, l := range s.lines {
			if l.binds != "" {
				l.waited[l.binds] += next - t
			}
		}
		t = next
	}
	return nil
}

// startOne starts the ticket that goes first, and returns t; or the next moment at which something may change.
func (l *simLine) startOne(t int64) int64 {
	for len(l.waiting) > 0 && l.waiting[0].key <= t {
		f := heap.Pop(&l.waiting).(*simFlow)
		if f.window != nil {
			f.waited[f.window.name] += t - f.since
		}
		f.wait(t)
	}
	first, next := l.first(t)
	if len(l.waiting) > 0 {
		next = min(next, l.waiting[0].key)
	}
	if first == nil {
		return next
	}
	f := first.flows[0]
	// Others may have taken room of a scope that they share, or moved the tenant's tag.
	if at, _ := f.opens(t); at > t || *f.tag > f.key {
		f.leave()
		f.wait(t)
		return t
	}
	if at, window := f.fits(t, &l.root); at > t {
		l.binds = window.name
		return min(next, at)
	}
	f.start(t)
	return t
}

// first returns the side whose turn it is, of those with a free slot. If there is none, it returns when a
// slot is free.
func (l *simLine) first(t int64) (first *side, at int64) {
	at, l.binds = never, ""
	for _, s := range l.sides {
		if len(s.flows) == 0 {
			continue
		}
		switch free, _ := s.flows[0].fits(t, &s.slots); {
		case free > t:
			at, l.binds = min(at, free), throttle.BySlots
		case first == nil || s.tag < first.tag:
			first = s
		}
	}
	if first != nil {
		l.binds = ""
	}
	return first, at
}

// wait has a flow wait for room for its next ticket in its own scopes, or for a time; or else on its side.
func (f *simFlow) wait(t int64) {
	if f.key, f.window = f.opens(t); f.key > t {
		f.since = t
		heap.Push(&f.line.waiting, f)
		return
	}
	l, s := f.line, f.side
	f.key = max(*f.tag, s.last)
	for by, us := range l.waited {
		f.waited[by] -= us
	}
	for _, scope := range f.scopes {
		if f.batch {
			scope.batch = t
		}
	}
	heap.Push(&s.flows, f)
	if s.tag < l.last { // it has not waited
		s.tag = l.last + f.step()
	}
}

// leave takes a flow from its side, where it is the first.
func (f *simFlow) leave() {
	heap.Pop(&f.side.flows)
	for by, us := range f.line.waited {
		f.waited[by] += us
	}
}

// opens returns from when on the next ticket of a flow may start, by its time and its own scopes, and the
// window that it waits for: nil if for a time only.
func (f *simFlow) opens(t int64) (at int64, by *window) {
	s := f.line.sim
	at = max(t, f.opensAt)
	if f.works[0].finish != nil && s.Open != nil && t < s.end {
		at = max(at, s.Open(time.UnixMicro(at)).UnixMicro())
	}
	if at > t {
		return at, nil
	}
	return f.fits(t, f.scopes...)
}

// fits returns when the next tickets of a flow have room in scopes, and the window that they wait for: with time
// each has more room.
func (f *simFlow) fits(t int64, scopes ...*scope) (at int64, by *window) {
	at = t
	for _, s := range scopes {
		for _, w := range s.windows {
			cost := min(w.cost(&f.works[0]), int64(w.limit)) // what costs more delays others no longer than that
			fits := w.Fits(t, cost)
			switch {
			case f.batch:
				fits = max(fits, w.paced-paceBurst)
			case s.batch == t && s.owed >= 1: // it leaves room for a while
				fits = min(w.Fits(t, 2*cost), max(fits, t+lapse))
			}
			if cost > 0 && fits > at {
				at, by = fits, w
			}
		}
	}
	return at, by
}

// lump has so many tickets of a work go as one, if all of them fit.
func (f *simFlow) lump(w *tickets, most int64) {
	w.lump = 1
	for _, s := range f.all {
		for _, window := range s.windows {
			if cost := window.cost(w); cost > 0 {
				most = min(most, int64(window.limit)/cost)
			}
		}
	}
	w.lump = max(1, most)
}

// next is how many tickets go next, as one.
func (w *tickets) next() int64 { return min(w.lump, w.left) }

// cost is what the next tickets take of the window. What is held for an unknown time is left out.
func (w *window) cost(t *tickets) int64 {
	switch {
	case w.held && t.hold == 0:
		return 0
	case w.place < 0:
		return t.next()
	}
	return t.costs[w.place] * t.next()
}

// start starts tickets of the flow, which is the first of its side.
func (f *simFlow) start(t int64) {
	s, w := f.line.sim, &f.works[0]
	f.leave()
	for _, scope := range f.all {
		for _, window := range scope.windows {
			if cost := window.cost(w); cost > 0 {
				window.Take(t, cost, w.hold)
				if f.batch && window.period <= pacedPeriod {
					evenly := float64(cost) * float64(window.period.Microseconds()) / window.limit
					window.paced = max(window.paced, t) + int64(math.Ceil(evenly))
				}
			}
		}
	}
	f.charge(t)
	started, ends := w.next(), t+w.hold
	if d := w.finish; d != nil {
		s.left -= started
		d.last = max(d.last, ends)
		if d.left -= started; d.left == 0 {
			d.Binds = f.longest()
		}
		if ends <= s.by {
			d.inTime += int(started)
		}
	}
	w.rank += int(started)
	if w.left -= started; w.left == 0 {
		f.works = f.works[1:]
	}
	if len(f.works) > 0 {
		f.wait(t)
	}
}

// longest is what the flow has waited for, for longest.
func (f *simFlow) longest() (by string) {
	for name, us := range f.waited {
		if us > 0 && (us > f.waited[by] || us == f.waited[by] && name < by) {
			by = name
		}
	}
	return by
}

// step is by what tickets of a flow move the tag of its side. Batches get the line's share of batches, and live
// tickets the rest. Queues share that evenly.
func (f *simFlow) step() int64 {
	l, weight, alike := f.line, f.line.share, 1.0
	if !f.batch {
		weight = 1 - weight
	}
	for _, s := range l.sides {
		if s != f.side && s.batch == f.batch && len(s.flows) > 0 {
			alike++
		}
	}
	return int64(math.Ceil(l.part(f) * alike / weight))
}

// part is what tickets take of the tightest window that all share, or of slots.
func (l *simLine) part(f *simFlow) float64 {
	part := 0.0
	for _, w := range l.root.windows {
		part = max(part, whole*float64(w.cost(&f.works[0]))/w.limit)
	}
	if part == 0 {
		part = float64(slot * f.works[0].next())
	}
	return part
}

// charge counts a start of tickets for the flow's side and tenant, and for what its scopes owe to batches.
func (f *simFlow) charge(t int64) {
	l, s := f.line, f.side
	l.last = max(l.last, s.tag)
	s.tag += f.step()
	s.last = max(s.last, *f.tag)
	*f.tag = s.last + int64(math.Ceil(l.part(f)/f.weight))
	for _, s := range f.scopes {
		switch {
		case f.batch:
			s.owed = max(0, s.owed-1)
		case s.batch == t:
			s.owed += l.share / (1 - l.share)
		}
	}
}
