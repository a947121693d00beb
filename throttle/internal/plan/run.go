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

// A Flow is tickets that go one after the other.
type Flow struct {
	Batch       bool
	InLine      bool      // some of them stand in line
	Own, Shared []*Window // that its tickets count in: those of its tenant; those of all, without slots
	Weight      float64

	heldBy *Window // that it waited for last
	order  int
	ready  int64
	tag    float64
	works  []*work

	yielded bool // it has just waited for its tenant's other class
}

// A work is equal tickets of one flow.
type work struct {
	counted  bool    // it is a demand
	costs    []int64 // by Window.Place
	left, by int64
	last     int64 // start
	heldBy   *Window
}

// Flow returns the flow of that name, made by `build` if there is none. Its tickets start at the rate
// of the queue's slots.
func (l *Line) Flow(name, queue string, build func() *Flow) *Flow {
	f := l.flows[name]
	if f == nil {
		f = build()
		f.order, f.ready = len(l.flows), l.Now
		if slots := l.slots[queue]; slots != nil {
			f.Shared = append(f.Shared, slots)
		}
		l.flows[name] = f
	}
	return f
}

// Demand adds equal tickets to the end of a flow. Start returns when they start, by their number:
// demands are numbered from 0.
func (l *Line) Demand(f *Flow, tickets int64, costs []int64) (demand int) {
	w := &work{counted: true, costs: costs, left: tickets}
	f.works, l.demands = append(f.works, w), append(l.demands, w)
	return len(l.demands) - 1
}

// Before adds tickets to the front of a flow.
func (f *Flow) Before(tickets int64, costs []int64) {
	f.works = slices.Insert(f.works, 0, &work{costs: costs, left: tickets})
}

// A Start is when the last ticket of a demand starts.
type Start struct {
	By     int64   // how many start until Line.By
	Known  bool    // false if the last one does not start until Line.End
	Last   int64   // 0 unless Known
	HeldBy *Window // that the last one waited for; nil if it waited for none
}

// Start returns when the last ticket of a demand starts, after Run.
func (l *Line) Start(demand int) Start {
	w := l.demands[demand]
	s := Start{By: w.by, Known: w.left <= 0 && w.last <= l.End}
	if s.Known {
		s.Last, s.HeldBy = w.last, w.heldBy
	}
	return s
}

func (w *Window) cost(of *work, lump int64) int64 {
	if w.Slots {
		return lump
	}
	return of.costs[w.Place] * lump
}

// fitsAll returns when the first tickets of a flow fit windows, and which window is the last. Where
// live ones wait, no batch is paced.
func (f *Flow) fitsAll(windows []*Window, t, lump int64, live bool) (int64, *Window) {
	var last *Window
	for again := true; again; {
		again = false
		for _, w := range windows {
			cost := w.cost(f.works[0], lump)
			if cost == 0 {
				continue
			}
			at := w.Fits(t, cost)
			if f.Batch && w.spread > 0 && w.live == 0 && !live {
				at = max(at, int64(w.next)-paceBurst)
			}
			if at > t {
				t, last, again = at, w, at < algorithm.Never
			}
		}
	}
	return t, last
}

func (f *Flow) take(windows []*Window, t, lump int64) {
	for _, w := range windows {
		cost := w.cost(f.works[0], lump)
		if cost == 0 {
			continue
		}
		w.Take(t, cost)
		if f.Batch && w.spread > 0 {
			w.next = max(w.next, float64(t)) + w.spread*float64(cost)
		}
	}
}

// part is what a ticket moves a tag by: of the tightest shared window, or a slot.
func (f *Flow) part(lump int64) float64 {
	part := 0.0
	for _, w := range f.Shared {
		if !w.Slots {
			part = max(part, float64(w.cost(f.works[0], lump))/w.Limit)
		}
	}
	if part == 0 {
		part = float64(lump) / 1000
	}
	return part
}

// Run simulates until all demands have started, or the context ends. Then it returns its error.
func (l *Line) Run(ctx context.Context) error {
	total := int64(0)
	for _, f := range l.flows {
		for _, w := range f.works {
			total += w.left
			if w.counted {
				l.unfinished++
			}
		}
	}
	l.lump = algorithm.CeilDiv(total, maxSteps)
	t := max(l.Now, l.Opens)
	for _, f := range l.flows {
		if len(f.works) > 0 {
			f.count(1)
			l.wait(f, t)
		}
	}
	for steps := 1; l.unfinished > 0 && t < l.End; steps++ {
		if steps%stepsUnasked == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		t = l.step(t)
	}
	return nil
}

// wait has a flow wait until its next ticket fits its own windows.
func (l *Line) wait(f *Flow, t int64) {
	if f.works[0].counted && !f.InLine {
		t = max(t, l.From)
	}
	t = l.yields(f, l.opensFor(f, t))
	var by *Window
	if f.ready, by = f.fitsAll(f.Own, t, l.lumpOf(f), false); by != nil {
		f.heldBy = by
	}
	heap.Push(&l.waiting, f)
}

// opensFor returns from when on the next ticket of a flow may start.
func (l *Line) opensFor(f *Flow, t int64) int64 {
	if l.Open == nil || !f.works[0].counted || t >= l.End {
		return t
	}
	return max(t, l.Open(time.UnixMicro(t)).UnixMicro())
}

// lumpOf is how many tickets of a flow go as one.
func (l *Line) lumpOf(f *Flow) int64 {
	lump := min(l.lump, f.works[0].left)
	for _, windows := range [][]*Window{f.Own, f.Shared} {
		for _, w := range windows {
			if cost := w.cost(f.works[0], 1); cost > 0 && !w.Slots {
				lump = min(lump, int64(w.Limit)/cost)
			}
		}
	}
	return max(1, lump)
}

// step starts one ticket, or goes on to the next moment at which something may change.
func (l *Line) step(t int64) int64 {
	for l.waiting.Len() > 0 && l.waiting.flows[0].ready <= t {
		f := heap.Pop(&l.waiting).(*Flow)
		c := l.class(f)
		f.tag = max(f.tag, c.tag)
		heap.Push(c, f)
	}
	from := &l.live
	if l.live.Len() == 0 || l.batch.Len() > 0 && l.owed >= (1-l.share)*l.batch.flows[0].part(1) {
		from = &l.batch
	}
	if from.Len() == 0 {
		if l.waiting.Len() == 0 {
			return algorithm.Never
		}
		return l.waiting.flows[0].ready
	}
	f := from.flows[0]
	if at := l.opensFor(f, t); at > t {
		heap.Pop(from)
		f.ready = at
		heap.Push(&l.waiting, f)
		return t
	}
	lump := l.lumpOf(f)
	// Others may have taken room of a scope that they share since it was looked at.
	if at, by := f.fitsAll(f.Own, t, lump, false); at > t {
		heap.Pop(from)
		f.ready, f.heldBy = at, by
		heap.Push(&l.waiting, f)
		return t
	}
	if at, by := f.fitsAll(f.Shared, t, lump, l.live.Len() > 0); at > t {
		l.heldBy = by
		if l.waiting.Len() > 0 && l.waiting.flows[0].ready < at {
			return l.waiting.flows[0].ready
		}
		return at
	}
	heap.Pop(from)
	l.start(f, t, lump)
	return t
}

func (l *Line) start(f *Flow, t, lump int64) {
	f.take(f.Own, t, lump)
	f.take(f.Shared, t, lump)
	l.owe(f, lump)
	part := f.part(lump)
	switch {
	case !f.Batch && l.batch.Len() > 0:
		l.owed += l.share * part
	case f.Batch && l.live.Len() > 0:
		l.owed = max(0, l.owed-(1-l.share)*part)
	case f.Batch:
		l.owed = 0
	}
	c := l.class(f)
	c.tag = max(c.tag, f.tag)
	f.tag += part / f.Weight
	w := f.works[0]
	if w.left -= lump; t <= l.By {
		w.by += lump
	}
	if f.ready < t { // it had room in its own windows, and waited for its turn
		f.heldBy = l.heldBy
	}
	w.last, w.heldBy = t, f.heldBy
	if w.left <= 0 {
		if w.counted {
			l.unfinished--
		}
		f.works = f.works[1:]
	}
	if len(f.works) > 0 {
		l.wait(f, t)
	} else {
		f.count(-1)
	}
}

// count counts a flow where it waits for windows of its own.
func (f *Flow) count(n int) {
	for _, w := range f.Own {
		if f.Batch {
			w.batches += n
		} else {
			w.live += n
		}
	}
}

// yields returns when to look again at a flow whose tenant's tickets of the other class go first. Live
// ones wait once for a batch that they owe a ticket: that may have no turn among all tenants.
func (l *Line) yields(f *Flow, t int64) int64 {
	at := t
	for _, w := range f.Own {
		cost := float64(w.cost(f.works[0], 1))
		owes := w.live > 0 && w.batches > 0 && w.owed >= (1-l.share)*cost/w.Limit
		if f.Batch && w.live > 0 && !owes || !f.Batch && owes && !f.yielded {
			at = max(at, t+int64(max(1, w.spread*cost)))
		}
	}
	f.yielded = at > t
	return at
}

// owe counts a start in what a tenant's live tickets owe to its batches.
func (l *Line) owe(f *Flow, lump int64) {
	for _, w := range f.Own {
		part := float64(w.cost(f.works[0], lump)) / w.Limit
		switch {
		case w.live == 0 || w.batches == 0:
			w.owed = 0
		case f.Batch:
			w.owed = max(0, w.owed-(1-l.share)*part)
		default:
			w.owed += l.share * part
		}
	}
}

// A class is the flows of one class that have room in their own windows.
type class struct {
	flowHeap
	tag float64 // of the last start
}

func (l *Line) class(f *Flow) *class {
	if f.Batch {
		return &l.batch
	}
	return &l.live
}

// A flowHeap is flows, the least one first.
type flowHeap struct {
	flows []*Flow
	less  func(a, b *Flow) bool
}

func byTag(a, b *Flow) bool {
	if math.Abs(a.tag-b.tag) > 1e-12 {
		return a.tag < b.tag
	}
	return a.order < b.order
}

func byReady(a, b *Flow) bool { return a.ready < b.ready }

func (h *flowHeap) Len() int           { return len(h.flows) }
func (h *flowHeap) Less(i, j int) bool { return h.less(h.flows[i], h.flows[j]) }
func (h *flowHeap) Swap(i, j int)      { h.flows[i], h.flows[j] = h.flows[j], h.flows[i] }
func (h *flowHeap) Push(x any)         { h.flows = append(h.flows, x.(*Flow)) }
func (h *flowHeap) Pop() any {
	last := h.flows[len(h.flows)-1]
	h.flows = h.flows[:len(h.flows)-1]
	return last
}
