package inspect

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// These must be as in internal/script/lua/line_order.lua and line_fair.lua.
const (
	pacedPeriod = time.Minute
	paceBurst   = int64(100 * time.Millisecond / time.Microsecond)
	lapse       = int64(20 * time.Millisecond / time.Microsecond)
	whole       = 1e8 // how far a tag moves for all units of a window
	slot        = 1e5 // and for a slot
)

// A simulation runs a snapshot, without calls to Redis. Times are microseconds since 1970.
type simulation struct {
	*Snapshot
	PlanOptions
	lines   []*simLine
	slots   map[string][]*window // by queue
	demands []*tickets
	left    int64           // tickets of demands that have not started, but fit
	unknown map[string]bool // Plan.Unknown
}

// simulation returns a new simulation, at its start.
func (s *Snapshot) simulation(o PlanOptions) *simulation {
	sim := &simulation{Snapshot: s, PlanOptions: o, slots: map[string][]*window{}, unknown: map[string]bool{}}
	for _, o := range s.slots {
		n := sim.limit(throttle.BySlots, int64(o.Count))
		counter := algorithm.Concurrency.Simulate(algorithm.Window{Limit: n}, algorithm.Counted{Now: s.now})
		w := &window{Simulated: counter, limit: n, level: slotLevel, name: throttle.BySlots, held: true}
		for _, queue := range o.Queues {
			sim.slots[queue] = append(sim.slots[queue], w)
		}
	}
	for _, b := range s.backlogs {
		l := &simLine{backlog: b, sim: sim, flows: map[string]*simFlow{}, windows: map[[2]string]*window{}, waited: map[string]int64{}}
		sim.lines = append(sim.lines, l)
		for _, t := range b.tickets {
			t := *t
			if t.demand {
				sim.demands = append(sim.demands, &t)
			}
			if t.Err == nil {
				l.flow(t.Expectation).add(&t)
			}
		}
	}
	return sim
}

// limit returns a window's limit, at least 1. PlanOptions.Limits changes all windows of a name by the same amount.
func (s *simulation) limit(window string, inForce int64) int64 {
	return max(1, inForce+cmp.Or(s.PlanOptions.Limits[window], s.Snapshot.Limits[window])-s.Snapshot.Limits[window])
}

// Levels of windows. A ticket needs room at all of them.
const (
	slotLevel   = iota // the handler slots of its queue
	sharedLevel        // windows that all tenants share
	ownLevel           // the others
)

// A window is one window of one scope, the handler slots of a queue, or a pause by operators.
type window struct {
	algorithm.Simulated
	limit  int64 // units
	level  int
	name   string  // or throttle.BySlots; empty for a pause
	unit   string  // empty for slots, and for a pause
	held   bool    // what it grants is held
	each   float64 // us between two units of batches (pacing)
	paced  int64   // when the next ticket of a batch may start
	roomAt int64   // when a flow of a batch had room here last
	owed   float64 // tickets that batches may start first, for their share

	Ends         int64 // of a pause, also by the upstream: JSON fills it and the next two, as in upstream.lua
	Left, Resets int64 // units that the upstream has left, until they reset; 0 and 0 if it has not said so
}

// Fits heeds the upstream's pause and remaining units as fits_at in internal/script/lua/upstream.lua does.
func (w *window) Fits(t, cost int64) int64 {
	if t = max(t, w.Ends); cost == 0 {
		return t
	}
	if t = w.Simulated.Fits(t, cost); t < w.Resets && cost > w.Left {
		t = w.Simulated.Fits(w.Resets, cost)
	}
	return t
}

// A simLine simulates one line of a policy.
type simLine struct {
	*backlog
	sim     *simulation
	windows map[[2]string]*window // by scope and name
	flows   map[string]*simFlow

	waiting []*simFlow // flows without room in their own windows, or before their time
	sides   []*side    // of the flows that have room in their own windows, and whose time has come
	last    float64    // the tag of the last start

	now    int64
	binds  string           // what all wait for at the root since `now`
	waited map[string]int64 // us that all waited there until `now`, by what they waited for
}

// A side is the flows of one class in one queue that have room in their own windows. Sides share the root as in
// internal/script/lua/line_order.lua, but by ends of turns, not starts; tenants share a side as in line_fair.lua.
type side struct {
	flows []*simFlow
	batch bool
	queue string
	share float64 // of its class

	tag  float64             // where the turn of its next ticket ends
	tags map[string]*float64 // of tenants
	last float64             // the tenant's tag at the last start
}

// A simFlow is tickets that go one after the other.
type simFlow struct {
	line    *simLine
	side    *side
	tag     *float64  // of its tenant
	windows []*window // that its tickets count in, with the slots of its side

	tickets []*tickets
	key     float64          // by which its list is sorted: in simLine.waiting until when it waits, on its side its tag
	waited  map[string]int64 // us, by cause; while on its side, less simLine.waited as it joined: leaving adds that of then
}

// flow returns the flow of an expectation.
func (l *simLine) flow(e *throttle.Expectation) *simFlow {
	if f := l.flows[e.Flow]; f != nil {
		return f
	}
	queue, batch := e.Request.Ticket.Queue, e.Request.Class == throttle.ClassBatch
	same := func(s *side) bool { return s.queue == queue && s.batch == batch }
	if !slices.ContainsFunc(l.sides, same) {
		share := map[bool]float64{true: e.Policy.BatchShare, false: 1 - e.Policy.BatchShare}[batch]
		l.sides = append(l.sides, &side{batch: batch, queue: queue, share: share, tag: -1, tags: map[string]*float64{}})
	}
	f := &simFlow{line: l, side: l.sides[slices.IndexFunc(l.sides, same)], waited: map[string]int64{}}
	l.flows[e.Flow], f.windows = f, slices.Clone(l.sim.slots[queue])
	f.tag = cmp.Or(f.side.tags[e.Request.Tenant], new(float64))
	f.side.tags[e.Request.Tenant] = f.tag
	for _, p := range e.Pauses {
		f.windows = append(f.windows, &window{level: ownLevel, Ends: p.Until.UnixMicro()})
	}
	for i := range e.Decision.Windows {
		if !e.Settings.Exempt && !e.Policy.Observe {
			f.windows = append(f.windows, l.window(e, i))
		}
	}
	return f
}

// window returns a window of an expectation, with what it has counted.
func (l *simLine) window(e *throttle.Expectation, i int) *window {
	state := e.Decision.Windows[i]
	key := [2]string{script.ScopeKey(state.Scope.Attributes, state.Scope.Values), state.Name}
	if w := l.windows[key]; w != nil {
		return w
	}
	set, counter := e.Windows[i], algorithm.ByName[string(state.Algorithm)]
	if e.Settings.Windows[set.Name].Limit == 0 {
		set = set.With(throttle.Override{Limit: l.sim.limit(set.Name, set.Limit)})
	}
	numbers := algorithm.Window{
		Burst: set.Burst, Limit: set.Limit, Margin: set.Margin, Period: set.Period, Resets: set.Resets, Timezone: set.Timezone,
	}
	found := script.Sections(l.values[key[0]])
	counted := algorithm.Counted{Now: l.sim.now, Hold: l.sim.hold, Payload: found[set.Name+counter.Kind]}
	w := &window{Simulated: counter.Simulate(numbers, counted), name: set.Name, unit: set.Unit, held: counter.Leases}
	w.limit, w.level = counter.Capacity(numbers), map[bool]int{true: sharedLevel, false: ownLevel}[set.Shared]
	if counter.Paced != nil && counter.Paced(numbers) <= pacedPeriod {
		w.each = float64(counter.Paced(numbers).Microseconds()) / float64(w.limit)
	}
	json.Unmarshal([]byte(found["!p"]), w)
	json.Unmarshal([]byte(found["!r"+state.Unit]), w)
	l.windows[key] = w
	return w
}

// add adds tickets to the end of a flow.
func (f *simFlow) add(t *tickets) {
	s := f.line.sim
	if t.demand {
		s.left += t.left
		if len(s.slots[f.side.queue]) == 0 {
			s.unknown[throttle.BySlots] = true
		}
	}
	for _, w := range f.windows {
		cost := t.Request.CostOf(w.unit)
		if w.level == slotLevel {
			cost = 1
		}
		if cost > 0 && w.held && t.hold == 0 {
			cost, s.unknown[w.name] = 0, true
		}
		t.costs = append(t.costs, cost)
	}
	if f.tickets = append(f.tickets, t); len(f.tickets) == 1 {
		f.wait(s.now)
	}
}

// insert puts a flow in a list, which is sorted by keys, and where they are equal by ranks.
func insert(list *[]*simFlow, f *simFlow) {
	i, _ := slices.BinarySearchFunc(*list, f, func(a, b *simFlow) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.tickets[0].rank, b.tickets[0].rank))
	})
	*list = slices.Insert(*list, i, f)
}

// startOne starts the ticket that goes first, and returns t; or the next moment at which something may change.
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
	ownFits, _ := f.fits(t, ownLevel)
	staysFirst := ownFits <= t && *f.tag <= f.key // else others took room of its windows, or moved the tag of its tenant
	if sharedFits, name := f.fits(t, sharedLevel); staysFirst && sharedFits > t {
		l.binds = name
		return min(next, sharedFits)
	}
	first.flows = first.flows[1:]
	for name, us := range l.waited {
		f.waited[name] += us
	}
	if staysFirst {
		f.start(t)
	}
	if len(f.tickets) > 0 {
		f.wait(t)
	}
	return t
}

// wait lets a flow wait until its own windows have room for its next ticket and its time has come; then on its side.
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

// fits returns when the next ticket of a flow has room at a level, and the name of the window that gets room last: the
// others keep their room until then. Pauses, and the time from which on demands may start, have no name.
func (f *simFlow) fits(t int64, level int) (at int64, name string) {
	at = t
	if open := f.line.sim.Open; level == ownLevel && open != nil && f.tickets[0].demand {
		at = max(t, open(time.UnixMicro(t)).UnixMicro())
	}
	for i, w := range f.windows {
		if w.level != level {
			continue
		}
		cost := min(f.tickets[0].costs[i], w.limit) // more than the limit never fits: it delays others as the limit does
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

// start starts a ticket of the flow, which was the first of its side.
func (f *simFlow) start(t int64) {
	first, l, side := f.tickets[0], f.line, f.side
	for i, w := range f.windows {
		cost := first.costs[i]
		if cost > 0 {
			w.Take(t, cost, first.hold)
			w.Left -= cost
		}
		switch {
		case side.batch:
			w.paced = max(w.paced, t) + int64(math.Ceil(float64(cost)*w.each))
			w.owed = max(0, w.owed-1)
		case w.roomAt == t:
			w.owed += 1/side.share - 1 // a live ticket starts, where a batch competes: side.share is that of live tickets
		}
	}
	l.last = max(l.last, side.tag)
	side.tag += f.step()
	side.last, *f.tag = f.key, f.key+f.part()/first.Settings.Weight
	ends := time.UnixMicro(t + first.hold)
	if deadline := l.sim.Deadline; !deadline.IsZero() && ends.After(deadline) {
		first.Late++
	}
	if first.demand {
		l.sim.left--
	}
	first.rank++
	if first.left--; first.left > 0 {
		return
	}
	first.Expected, f.tickets = ends, f.tickets[1:]
	delete(f.waited, "") // neither windows nor slots
	for name, us := range f.waited {
		if longest := f.waited[first.Binds]; us > 0 && (us > longest || us == longest && name < first.Binds) {
			first.Binds = name
		}
	}
}

// step returns by how much the next ticket of a flow moves the tag of its side. Batches get the line's
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

// part returns how much the next ticket takes of the tightest window that all share, or of slots.
func (f *simFlow) part() float64 {
	part := 0.0
	for i, w := range f.windows {
		if w.level == sharedLevel {
			part = max(part, whole*float64(f.tickets[0].costs[i])/float64(w.limit))
		}
	}
	return cmp.Or(part, slot)
}
