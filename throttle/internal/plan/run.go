package plan

import (
	"container/heap"
	"context"
	"math"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// maxSteps is the most tickets that are simulated, if limits let several of more go as one.
const maxSteps = 200_000

// stepsUnasked is after how many steps, some milliseconds, the context is looked at.
const stepsUnasked = 1000

const never = algorithm.Never

// Run simulates until all demands have started, or the context ends. Then it returns its error.
func (s *Simulation) Run(ctx context.Context) error {
	total, steps := int64(0), 0
	for _, l := range s.lines {
		for _, f := range l.flows {
			for _, w := range f.works {
				total += w.left
			}
			if f.ready = max(s.Now, l.Opens); len(f.works) > 0 {
				heap.Push(&l.waiting, f)
			}
		}
	}
	s.lump = algorithm.CeilDiv(total, maxSteps)
	for t := s.Now; s.unfinished > 0 && t < s.End; {
		next := int64(never)
		for again := true; again; {
			again, next = false, never
			for _, l := range s.lines {
				if steps++; steps%stepsUnasked == 0 && ctx.Err() != nil {
					return ctx.Err()
				}
				at := l.step(t)
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

// step starts one ticket, and returns t; or the next moment at which something may change.
func (l *Line) step(t int64) int64 {
	for l.waiting.Len() > 0 && l.waiting.flows[0].ready <= t {
		f := heap.Pop(&l.waiting).(*Flow)
		f.leave(t)
		f.wait(t)
	}
	first, next := l.first(t)
	if l.waiting.Len() > 0 {
		next = min(next, l.waiting.flows[0].ready)
	}
	if first == nil {
		return next
	}
	f := first.flows[0]
	lump := f.lump()
	if *f.tag > f.score { // another flow of the tenant has moved it
		f.score = *f.tag
		heap.Fix(first.side, 0)
		return t
	}
	// Others may have taken room of a scope that they share since it was looked at.
	if at, _, _ := f.narrow(t, lump); at > t {
		f.leave(t)
		f.wait(t)
		return t
	}
	if at, window := l.root.fits(f, t, lump); at > t {
		l.binds = window.Name
		return min(next, at)
	}
	f.start(t, lump)
	return t
}

// first returns the side that goes first at the root, of those with a free slot. If there is none, it
// returns when a slot is free.
func (l *Line) first(t int64) (first *entry, at int64) {
	at, l.binds = never, ""
	for _, s := range l.sides {
		if s.Len() == 0 {
			continue
		}
		free := t
		for _, w := range s.slots {
			if cost := w.cost(&s.flows[0].works[0]); cost > 0 {
				free = max(free, w.Fits(t, cost))
			}
		}
		if e := l.root.entry(s); free > t {
			at, l.binds = min(at, free), BySlots
		} else if first == nil || e.before(first) {
			first = e
		}
	}
	if first != nil {
		l.binds = ""
	}
	return first, at
}

// wait has a flow wait at a scope without room for its next ticket, or at the root, or for a time.
func (f *Flow) wait(t int64) {
	l := f.line
	at, scope, window := f.narrow(t, f.lump())
	if f.scope = scope; at <= t {
		f.scope = l.root
	}
	switch {
	case f.scope == l.root:
		f.score = max(*f.tag, f.side.v)
		for by, us := range l.waited {
			f.waited[by] -= us
		}
		if heap.Push(f.side, f); f.side.Len() == 1 {
			l.root.entry(f.side).begins(t)
		}
		return
	case f.scope != nil:
		e := f.scope.entry(f.side)
		if e.here = append(e.here, f); len(e.here) == 1 {
			e.begins(t)
		}
	}
	f.ready, f.window, f.since = at, window, t
	heap.Push(&l.waiting, f)
}

// leave takes a flow from where it waits: at the root it is the first.
func (f *Flow) leave(t int64) {
	switch {
	case f.scope == nil:
	case f.scope.root():
		heap.Pop(f.side)
		for by, us := range f.line.waited {
			f.waited[by] += us
		}
	default:
		e := f.scope.entry(f.side)
		i := slices.Index(e.here, f)
		e.here[i] = e.here[len(e.here)-1]
		e.here = e.here[:len(e.here)-1]
		e.opened, e.last = t, f
		f.waited[f.window.Name] += t - f.since
	}
	f.scope = nil
}

// narrow returns when the next ticket of a flow has room in its narrow scopes, and what it waits for
// and where: nil if for a time only.
func (f *Flow) narrow(t, lump int64) (at int64, scope *Scope, window *Window) {
	if at = f.opens(t); at > t {
		return at, nil, nil
	}
	for _, s := range f.Scopes {
		if at, window := s.fits(f, t, lump); at > t {
			return at, s, window
		}
	}
	return t, nil, nil
}

// opens returns from when on the next ticket of a flow may start.
func (f *Flow) opens(t int64) int64 {
	s := f.line.sim
	if f.works[0].demand == nil || t >= s.End {
		return t
	}
	if t = max(t, s.From); s.Open != nil {
		t = max(t, s.Open(time.UnixMicro(t)).UnixMicro())
	}
	return t
}

// lump is how many tickets of a flow go as one.
func (f *Flow) lump() int64 {
	lump := min(f.line.sim.lump, f.works[0].left)
	if lump <= 1 {
		return 1
	}
	f.eachWindow(func(w *Window) {
		if cost := w.cost(&f.works[0]); cost > 0 {
			lump = min(lump, int64(w.Limit)/cost)
		}
	})
	return max(1, lump)
}

// eachWindow calls do for all windows of a flow, and the slots.
func (f *Flow) eachWindow(do func(*Window)) {
	for _, s := range f.Scopes {
		for _, w := range s.Windows {
			do(w)
		}
	}
	for _, w := range f.line.root.Windows {
		do(w)
	}
	for _, w := range f.side.slots {
		do(w)
	}
}

// cost is what a ticket takes of the window. What is held for an unknown time is left out.
func (w *Window) cost(tickets *work) int64 {
	switch {
	case w.Held && tickets.hold == 0:
		return 0
	case w.Place < 0:
		return 1
	}
	return tickets.costs[w.Place]
}

// start starts tickets of the flow, which is the first of its side at the root.
func (f *Flow) start(t, lump int64) {
	f.leave(t)
	w, side, root := &f.works[0], f.side, f.line.root
	f.eachWindow(func(window *Window) {
		if cost := window.cost(w) * lump; cost > 0 {
			window.Take(t, cost, w.hold)
		}
	})
	late := root.entry(side).charge(f, t, lump, 0)
	for _, s := range slices.Backward(f.Scopes) {
		late = s.entry(side).charge(f, t, lump, late)
	}
	if *f.tag < side.v {
		*f.tag = side.v
	}
	side.v = *f.tag
	*f.tag += int64(math.Ceil(root.part(f, lump) / f.Weight))
	w.left -= lump
	w.rank += int(lump)
	if w.demand != nil {
		f.line.sim.count(f, t+w.hold, lump)
	}
	if w.left <= 0 {
		f.works = f.works[1:]
	}
	if len(f.works) > 0 {
		f.wait(t)
	}
}

// count counts tickets of a demand, by when they end.
func (s *Simulation) count(f *Flow, end, lump int64) {
	d := f.works[0].demand
	d.Last = max(d.Last, end)
	if d.left -= lump; d.left <= 0 {
		s.unfinished--
		d.Binds = f.longest()
	}
	switch {
	case end <= s.By:
		d.By += int(lump)
	case s.By > 0:
		s.Late[f.longest()] += int(lump)
	}
}

// longest is what the flow has waited for, for longest.
func (f *Flow) longest() (by string) {
	for name, us := range f.waited {
		if us > 0 && (us > f.waited[by] || us == f.waited[by] && name < by) {
			by = name
		}
	}
	return by
}
