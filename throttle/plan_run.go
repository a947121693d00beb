package throttle

import (
	"container/heap"
	"math"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

const (
	// planSteps is the most tickets that a plan simulates. Of more, several go as one.
	planSteps = 200_000

	// pacedPeriod and paceBurst are those of internal/script/lua/line_classes.lua.
	pacedPeriod = int64(time.Minute / time.Microsecond)
	paceBurst   = int64(100 * time.Millisecond / time.Microsecond)
)

// A simulation is a line and its windows, from a moment on. Times are microseconds.
type simulation struct {
	policy        *compiledPolicy
	now, from, by int64 // of the snapshot; when demands begin; until when starts are counted
	opens         int64 // the end of a pause
	open          func(from time.Time) time.Time
	flows         map[string]*planFlow
	windows       map[string]*planWindow // by scope and window
	slots         map[string]*planWindow // by queue
	works         []*work                // of the demands
	unfinished    int
	live, batch   readyFlows
	waiting       waitingFlows
	owed, share   float64 // what is owed to batches, in parts of a shared window; BatchShare
	liveV, batchV float64 // tags of the last starts
	lump, end     int64   // tickets that go as one; MaxPlan from now
}

// A planWindow is one window of one scope.
type planWindow struct {
	algorithm.Simulated
	name   string
	place  int     // in the policy; -1 for slots
	shared bool    // all tenants count together
	limit  float64 // units
	spread float64 // us a unit by which batches are paced; 0 if they are not
	next   float64 // when the next one of a batch goes at its pace
	slots  bool
}

// A planFlow is tickets that go one after the other.
type planFlow struct {
	batch, waits bool // waits: some stand in line
	weight, tag  float64
	works        []*work
	joined       int64 // of the demands
	own, shared  []*planWindow
	ready        int64
	order        int
	heldBy       *planWindow // that it waited for last
}

// A work is equal tickets of one flow.
type work struct {
	demand   int // -1 if it is no demand's
	left, by int64
	costs    []int64 // by window of the policy
	last     int64   // start
	heldBy   *planWindow
}

func newSimulation(cp *compiledPolicy) *simulation {
	return &simulation{
		policy: cp, share: cp.BatchShare, flows: map[string]*planFlow{},
		windows: map[string]*planWindow{}, slots: map[string]*planWindow{},
	}
}

// know makes the windows of a request as an answer says.
func (s *simulation) know(o *operation, a script.Answer) {
	for i, w := range o.windows {
		s.window(o, i, w, a.Windows[i].Used, a.At, a.Windows[i].Resets)
	}
}

func (s *simulation) window(o *operation, i int, w Window, used, now, resets int64) *planWindow {
	key := o.keys[o.scopeOf[i]] + " " + w.Name
	pw := s.windows[key]
	if pw == nil && o.algorithms[i].Simulate != nil {
		pw = &planWindow{
			Simulated: o.algorithms[i].Simulate(w.numbers(), used, now, resets),
			name:      w.Name, place: i, shared: w.Scope == Shared, limit: float64(o.algorithms[i].Capacity(w.numbers())),
		}
		if period := w.Period.Microseconds(); w.Algorithm != GCRA && period > 0 && period <= pacedPeriod {
			pw.spread = float64(period) / float64(w.Limit)
		}
		s.windows[key] = pw
	}
	return pw
}

func (s *simulation) setSlots(queue string, rate float64) {
	s.slots[queue] = nil
	if rate > 0 {
		s.slots[queue] = &planWindow{Simulated: &algorithm.Slots{Each: 1e6 / rate}, place: -1, slots: true}
	}
}

// flow returns the flow of that name, made for the operation if there is none.
func (s *simulation) flow(o *operation, name, queue string) *planFlow {
	f := s.flows[name]
	if f != nil {
		return f
	}
	f = &planFlow{batch: o.request.Class == Batch, weight: float64(o.weight()) / 1000, order: len(s.flows), ready: s.now}
	for i, w := range o.windows {
		pw := s.window(o, i, w, 0, s.now, s.now)
		switch {
		case pw == nil || o.tenant.Exempt:
		case pw.shared:
			f.shared = append(f.shared, pw)
		default:
			f.own = append(f.own, pw)
		}
	}
	if slots := s.slots[queue]; slots != nil {
		f.shared = append(f.shared, slots)
	}
	s.flows[name] = f
	return f
}

func (w *planWindow) cost(of *work, lump int64) int64 {
	if w.slots {
		return lump
	}
	return of.costs[w.place] * lump
}

// fitsAll returns when the first tickets of a flow fit windows, and which window is the last.
func (f *planFlow) fitsAll(windows []*planWindow, t, lump int64) (int64, *planWindow) {
	var last *planWindow
	for again := true; again; {
		again = false
		for _, w := range windows {
			cost := w.cost(f.works[0], lump)
			if cost == 0 {
				continue
			}
			at := w.Fits(t, cost)
			if f.batch && w.spread > 0 {
				at = max(at, int64(w.next)-paceBurst)
			}
			if at > t {
				t, last, again = at, w, at < algorithm.Never
			}
		}
	}
	return t, last
}

func (f *planFlow) take(windows []*planWindow, t, lump int64) {
	for _, w := range windows {
		cost := w.cost(f.works[0], lump)
		if cost == 0 {
			continue
		}
		w.Take(t, cost)
		if f.batch && w.spread > 0 {
			w.next = max(w.next, float64(t)) + w.spread*float64(cost)
		}
	}
}

// part is what a ticket moves a tag by: of the tightest shared window, or a slot.
func (f *planFlow) part(lump int64) float64 {
	part := 0.0
	for _, w := range f.shared {
		if !w.slots {
			part = max(part, float64(w.cost(f.works[0], lump))/w.limit)
		}
	}
	if part == 0 {
		part = float64(lump) / 1000
	}
	return part
}

// run simulates until all demands have started.
func (s *simulation) run() {
	total := int64(0)
	for _, f := range s.flows {
		for _, w := range f.works {
			total += w.left
			if w.demand >= 0 {
				s.unfinished++
			}
		}
	}
	s.lump = algorithm.CeilDiv(total, planSteps)
	s.end = s.now + MaxPlan.Microseconds()
	t := max(s.now, s.opens)
	for _, f := range s.flows {
		if len(f.works) > 0 {
			s.wait(f, t)
		}
	}
	for s.unfinished > 0 && t < s.end {
		t = s.step(t)
	}
}

// wait has a flow wait until its next ticket fits its own windows.
func (s *simulation) wait(f *planFlow, t int64) {
	if f.works[0].demand >= 0 && !f.waits {
		t = max(t, s.from)
	}
	t = s.opensFor(f, t)
	var by *planWindow
	if f.ready, by = f.fitsAll(f.own, t, s.lumpOf(f)); by != nil {
		f.heldBy = by
	}
	heap.Push(&s.waiting, f)
}

// opensFor returns from when on the next ticket of a flow may start.
func (s *simulation) opensFor(f *planFlow, t int64) int64 {
	if s.open == nil || f.works[0].demand < 0 || t >= s.end {
		return t
	}
	return max(t, s.open(time.UnixMicro(t)).UnixMicro())
}

// lumpOf is how many tickets of a flow go as one.
func (s *simulation) lumpOf(f *planFlow) int64 {
	lump := min(s.lump, f.works[0].left)
	for _, windows := range [][]*planWindow{f.own, f.shared} {
		for _, w := range windows {
			if cost := w.cost(f.works[0], 1); cost > 0 && !w.slots {
				lump = min(lump, int64(w.limit)/cost)
			}
		}
	}
	return max(1, lump)
}

// step starts one ticket, or goes on to the next moment at which something may change.
func (s *simulation) step(t int64) int64 {
	for len(s.waiting) > 0 && s.waiting[0].ready <= t {
		f := heap.Pop(&s.waiting).(*planFlow)
		if f.batch {
			f.tag = max(f.tag, s.batchV)
			heap.Push(&s.batch, f)
		} else {
			f.tag = max(f.tag, s.liveV)
			heap.Push(&s.live, f)
		}
	}
	from := &s.live
	if len(s.live) == 0 || len(s.batch) > 0 && s.owed >= (1-s.share)*s.batch[0].part(1) {
		from = &s.batch
	}
	if len(*from) == 0 {
		if len(s.waiting) == 0 {
			return algorithm.Never
		}
		return s.waiting[0].ready
	}
	f := (*from)[0]
	if at := s.opensFor(f, t); at > t {
		heap.Pop(from)
		f.ready = at
		heap.Push(&s.waiting, f)
		return t
	}
	lump := s.lumpOf(f)
	// Others may have taken room of a scope that they share since it was looked at.
	if at, by := f.fitsAll(f.own, t, lump); at > t {
		heap.Pop(from)
		f.ready, f.heldBy = at, by
		heap.Push(&s.waiting, f)
		return t
	}
	if at, by := f.fitsAll(f.shared, t, lump); at > t {
		f.heldBy = by
		if len(s.waiting) > 0 && s.waiting[0].ready < at {
			return s.waiting[0].ready
		}
		return at
	}
	heap.Pop(from)
	s.start(f, t, lump)
	return t
}

// start starts tickets of a flow.
func (s *simulation) start(f *planFlow, t, lump int64) {
	f.take(f.own, t, lump)
	f.take(f.shared, t, lump)
	part := f.part(lump)
	switch {
	case !f.batch && len(s.batch) > 0:
		s.owed += s.share * part
	case f.batch && len(s.live) > 0:
		s.owed = max(0, s.owed-(1-s.share)*part)
	case f.batch:
		s.owed = 0
	}
	if f.batch {
		s.batchV = max(s.batchV, f.tag)
	} else {
		s.liveV = max(s.liveV, f.tag)
	}
	f.tag += part / f.weight
	w := f.works[0]
	if w.left -= lump; t <= s.by {
		w.by += lump
	}
	w.last, w.heldBy = t, f.heldBy
	if w.left <= 0 {
		if w.demand >= 0 {
			s.unfinished--
		}
		f.works = f.works[1:]
	}
	if len(f.works) > 0 {
		s.wait(f, t)
	}
}

// finish returns what became of a demand.
func (s *simulation) finish(demand int) Finish {
	w := s.works[demand]
	f := Finish{By: int(w.by), Known: w.left <= 0 && w.last <= s.end}
	if f.Known {
		f.Last = time.UnixMicro(w.last)
		if w.heldBy != nil {
			f.SlotsBind, f.Window = w.heldBy.slots, w.heldBy.name
		}
	}
	return f
}

// readyFlows are those with room in their own windows, by tag.
type readyFlows []*planFlow

func (r readyFlows) Len() int { return len(r) }
func (r readyFlows) Less(i, j int) bool {
	if math.Abs(r[i].tag-r[j].tag) > 1e-12 {
		return r[i].tag < r[j].tag
	}
	return r[i].order < r[j].order
}
func (r readyFlows) Swap(i, j int) { r[i], r[j] = r[j], r[i] }
func (r *readyFlows) Push(x any)   { *r = append(*r, x.(*planFlow)) }
func (r *readyFlows) Pop() any     { return pop((*[]*planFlow)(r)) }

// waitingFlows are those without, by when they have.
type waitingFlows []*planFlow

func (w waitingFlows) Len() int           { return len(w) }
func (w waitingFlows) Less(i, j int) bool { return w[i].ready < w[j].ready }
func (w waitingFlows) Swap(i, j int)      { w[i], w[j] = w[j], w[i] }
func (w *waitingFlows) Push(x any)        { *w = append(*w, x.(*planFlow)) }
func (w *waitingFlows) Pop() any          { return pop((*[]*planFlow)(w)) }

func pop(list *[]*planFlow) *planFlow {
	last := (*list)[len(*list)-1]
	*list = (*list)[:len(*list)-1]
	return last
}
