package inspect

import (
	"cmp"
	"math"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// These must be as in internal/script/lua/line_order.lua and line_fair.lua.
const (
	pacedPeriod = time.Minute
	paceBurst   = int64(100 * time.Millisecond / time.Microsecond)
	lapse       = int64(20 * time.Millisecond / time.Microsecond)
	whole       = 1e8 // what a tag moves by for all that a window holds
	slot        = 1e5 // and for a slot
)

// maxSteps is about the most starts: if more tickets wait, several go as one, where limits let them.
const maxSteps = 200_000

// startOne starts the tickets that go first, and returns t; or the next moment at which something may change.
func (l *simLine) startOne(t int64) int64 {
	l.waited[l.binds] += t - l.now
	l.now, l.binds = t, ""
	for len(l.waiting) > 0 && l.waiting[0].key <= float64(t) {
		f := l.waiting[0]
		l.waiting = l.waiting[1:]
		f.wait(t)
	}
	next := int64(algorithm.Never)
	if len(l.waiting) > 0 {
		next = int64(l.waiting[0].key)
	}
	var first *side // whose turn it is, of the sides with a free slot
	for _, s := range l.sides {
		if len(s.flows) == 0 {
			continue
		}
		switch free, name := s.flows[0].fits(t, slotLevel); {
		case free > t:
			next, l.binds = min(next, free), name
		case first == nil || s.tag < first.tag:
			first = s
		}
	}
	if first == nil {
		return next
	}
	l.binds = ""
	f := first.flows[0]
	own, _ := f.fits(t, ownLevel) // others may have taken room of a window that they share, or moved the tenant's tag
	ready := own <= t && *f.tag <= f.key
	if at, name := f.fits(t, sharedLevel); ready && at > t {
		l.binds = name
		return min(next, at)
	}
	first.flows = first.flows[1:]
	for name, us := range l.waited {
		f.waited[name] += us
	}
	if ready {
		f.start(t)
	}
	if len(f.tickets) > 0 {
		f.wait(t)
	}
	return t
}

// wait lets a flow wait until its own windows have room for its next tickets and its time has come; then on its side.
func (f *simFlow) wait(t int64) {
	l, s := f.line, f.side
	at, name := f.fits(t, ownLevel)
	if f.key = float64(at); at > t {
		f.waited[name] += at - t
		insert(&l.waiting, f)
		return
	}
	f.key = max(*f.tag, s.last)
	for name, us := range l.waited {
		f.waited[name] -= us
	}
	for _, w := range f.windows {
		if s.batch && w.level == ownLevel {
			w.roomAt = t
		}
	}
	insert(&s.flows, f)
	if s.tag < l.last { // the side waits anew, or had no slot: it saves up no turns
		s.tag = l.last + f.step()
	}
}

// fits returns when the next tickets of a flow have room at a level, and the window that has room last: the others
// have room by then, and keep it. Pauses, and the time from which on demands may start, have no name.
func (f *simFlow) fits(t int64, level int) (at int64, name string) {
	at = t
	if open := f.line.sim.Open; level == ownLevel && open != nil && f.tickets[0].finish > 0 {
		at = max(t, open(time.UnixMicro(t)).UnixMicro())
	}
	for i, w := range f.windows {
		if w.level != level {
			continue
		}
		cost := min(f.tickets[0].cost(i), w.limit) // more than the limit never fits: it delays others as the limit does
		fits := w.Fits(t, cost)
		switch {
		case f.side.batch && cost > 0:
			fits = max(fits, w.paced-paceBurst)
		case w.roomAt == t && w.owed >= 1: // a live ticket leaves room for one of a batch for a while, of the same cost
			fits = min(w.Fits(t, 2*cost), max(fits, t+lapse))
		}
		if fits > at {
			if at, name = fits, w.name; at == w.Ends {
				name = ""
			}
		}
	}
	return at, name
}

// start starts tickets of the flow, which was the first of its side.
func (f *simFlow) start(t int64) {
	first, l, side := &f.tickets[0], f.line, f.side
	for i, w := range f.windows {
		cost := first.cost(i)
		if cost > 0 {
			w.Take(t, cost, first.hold)
			w.Left -= cost
		}
		switch {
		case side.batch:
			w.paced = max(w.paced, t) + int64(math.Ceil(float64(cost)*w.each))
			w.owed = max(0, w.owed-1)
		case w.roomAt == t:
			w.owed += 1/side.share - 1
		}
	}
	l.last = max(l.last, side.tag)
	side.tag += f.step()
	side.last, *f.tag = f.key, f.key+f.part()/first.Weight
	n, ends := first.next(), time.UnixMicro(t+first.hold)
	if first.finish > 0 {
		f.end(&l.sim.finishes[first.finish], n, ends)
		f.end(&l.sim.finishes[0], n, ends)
	}
	first.rank += n
	if first.left -= n; first.left == 0 {
		f.tickets = f.tickets[1:]
	}
}

// end counts tickets of the flow that end at a time.
func (f *simFlow) end(d *Finish, n int64, at time.Time) {
	if at.After(d.Expected) {
		d.Expected = at
	}
	if by := f.line.sim.By; !by.IsZero() && at.After(by) {
		d.Late += int(n)
	}
	if d.left -= n; d.left > 0 {
		return
	}
	delete(f.waited, "") // neither windows nor slots
	for name, us := range f.waited {
		if us > 0 && (us > f.waited[d.Binds] || us == f.waited[d.Binds] && name < d.Binds) {
			d.Binds = name
		}
	}
}

// step returns by how much the next tickets of a flow move the tag of its side. Batches get the line's
// share of batches, and live tickets the rest. Queues share that evenly.
func (f *simFlow) step() float64 {
	alike := 1.0
	for _, s := range f.line.sides {
		if s != f.side && s.batch == f.side.batch && len(s.flows) > 0 {
			alike++
		}
	}
	return f.part() * alike / f.side.share
}

// part returns how much the next tickets take of the tightest window that all share, or of slots.
func (f *simFlow) part() float64 {
	part := 0.0
	for i, w := range f.windows {
		if w.level == sharedLevel {
			part = max(part, whole*float64(f.tickets[0].cost(i))/float64(w.limit))
		}
	}
	return cmp.Or(part, float64(slot*f.tickets[0].next()))
}
