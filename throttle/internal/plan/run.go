package plan

import (
	"container/heap"
	"context"
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
	for _, l := range s.lines {
		for _, f := range l.flows {
			if f.key = max(s.Now, f.Opens); len(f.works) > 0 {
				heap.Push(&l.waiting, f)
			}
		}
	}
	s.lump = int64(s.rank+maxSteps-1) / maxSteps
	steps := 0
	for t := s.Now; s.left > 0 && t < s.End; {
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

// startOne starts one ticket, and returns t; or the next moment at which something may change.
func (l *Line) startOne(t int64) int64 {
	for len(l.waiting) > 0 && l.waiting[0].key <= t {
		f := heap.Pop(&l.waiting).(*Flow)
		f.leave(t)
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
	if *f.tag > f.key { // another flow of the tenant has moved it
		f.key = *f.tag
		heap.Fix(&first.flows, 0)
		return t
	}
	// Others may have taken room of a scope that they share since it was looked at.
	if at, _, _ := f.narrow(t); at > t {
		f.leave(t)
		f.wait(t)
		return t
	}
	if at, window := l.Root.fits(f, t); at > t {
		l.binds = window.Name
		return min(next, at)
	}
	f.start(t)
	return t
}

// wait has a flow wait at a scope without room for its next ticket, or at the root, or for a time.
func (f *Flow) wait(t int64) {
	l := f.line
	at, scope, window := f.narrow(t)
	if f.scope = scope; at <= t {
		f.scope = &l.Root
	}
	switch f.scope {
	case nil:
	case &l.Root:
		f.key = max(*f.tag, f.side.v)
		for by, us := range l.waited {
			f.waited[by] -= us
		}
		if heap.Push(&f.side.flows, f); len(f.side.flows) == 1 {
			f.scope.begins(f.side, t)
		}
		return
	default:
		side := f.scope.side(f)
		if side.flows = append(side.flows, f); len(side.flows) == 1 {
			f.scope.begins(side, t)
		}
	}
	f.key, f.window, f.since = at, window, t
	heap.Push(&l.waiting, f)
}

// leave takes a flow from where it waits: at the root it is the first.
func (f *Flow) leave(t int64) {
	switch f.scope {
	case nil:
	case &f.line.Root:
		heap.Pop(&f.side.flows)
		for by, us := range f.line.waited {
			f.waited[by] += us
		}
	default:
		side := f.scope.side(f)
		i := slices.Index(side.flows, f)
		side.flows = slices.Delete(side.flows, i, i+1)
		side.opened, side.last = t, f
		f.waited[f.window.Name] += t - f.since
	}
	f.scope = nil
}

// narrow returns when the next ticket of a flow has room in its narrow scopes, and what it waits for
// and where: nil if for a time only.
func (f *Flow) narrow(t int64) (at int64, scope *Scope, window *Window) {
	if at = f.opens(t); at > t {
		return at, nil, nil
	}
	for _, s := range f.Scopes {
		if at, window := s.fits(f, t); at > t {
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
	for _, w := range f.line.Root.Windows {
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
func (f *Flow) start(t int64) {
	w, s, lump := &f.works[0], f.line.sim, f.lump()
	f.leave(t)
	f.eachWindow(func(window *Window) {
		if cost := window.cost(w) * lump; cost > 0 {
			window.Take(t, cost, w.hold)
		}
	})
	f.charge(t, lump)
	w.left -= lump
	w.rank += int(lump)
	if w.demand != nil {
		s.count(f, t+w.hold, lump)
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
	s.left -= lump
	if d.left -= lump; d.left <= 0 {
		d.Binds = f.longest()
	}
	if end <= s.By {
		d.Late -= int(lump)
	} else if s.By > 0 {
		s.Delays[f.longest()] += int(lump)
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
