package inspect

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A simulation runs a snapshot, without calls to Redis. Times are microseconds since 1970.
type simulation struct {
	*Snapshot
	PlanOptions
	finishes []Finish // as Snapshot.finishes
	lines    []*simLine
	slots    map[string][]*window // by queue
	unknown  map[string]bool      // Plan.Unknown
}

// simulation returns a new simulation, at its start.
func (s *Snapshot) simulation(o PlanOptions) *simulation {
	sim := &simulation{
		Snapshot: s, PlanOptions: o, finishes: slices.Clone(s.finishes), slots: map[string][]*window{}, unknown: map[string]bool{},
	}
	sim.finishes[0].Expected = time.UnixMicro(s.now)
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
			l.flow(t.Standing).add(t)
		}
	}
	return sim
}

// limit returns a window's limit to plan by. The options may set the least limit of a name: all change by as much.
func (s *simulation) limit(window string, inForce int64) int64 {
	if n := s.PlanOptions.Limits[window]; n > 0 {
		return max(1, inForce+n-s.Snapshot.Limits[window])
	}
	return inForce
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
	each   float64 // us for which a unit of a batch keeps the next one back
	paced  int64   // when the next of a batch goes
	roomAt int64   // when one of a batch had room here last
	owed   float64 // tickets that live ones owe to batches, for their share

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
	last float64             // of these: the tag of the last start
}

// A simFlow is tickets that go one after the other.
type simFlow struct {
	line    *simLine
	side    *side
	tag     *float64  // of its tenant
	windows []*window // that its tickets count in, with the slots of its side

	tickets []tickets
	key     float64          // until when it waits; on its side the tag by which it stands there
	waited  map[string]int64 // us, by cause; while on its side, less simLine.waited as of its arrival: see wait, leave
}

// flow returns the flow of a standing.
func (l *simLine) flow(s *throttle.Standing) *simFlow {
	f := l.flows[s.Flow]
	if f == nil {
		f = &simFlow{line: l, side: l.side(s), waited: map[string]int64{}}
		f.windows = slices.Clone(l.sim.slots[f.side.queue])
		l.flows[s.Flow] = f
		f.tag = cmp.Or(f.side.tags[s.Request.Tenant], new(float64))
		f.side.tags[s.Request.Tenant] = f.tag
		if p := s.Decision.Pause; p != nil {
			f.windows = append(f.windows, &window{level: ownLevel, Ends: p.Until.UnixMicro()})
		}
		for i := range s.Decision.Windows {
			if !s.Free {
				f.windows = append(f.windows, l.window(s, i))
			}
		}
	}
	return f
}

// window returns a window of a standing, with what it has counted.
func (l *simLine) window(s *throttle.Standing, i int) *window {
	state := s.Decision.Windows[i]
	key := [2]string{script.ScopeKey(state.Scope.Attributes, state.Scope.Values), state.Name}
	if w := l.windows[key]; w != nil {
		return w
	}
	w := &window{level: sharedLevel, name: state.Name, unit: state.Unit, held: state.Algorithm.Leases()}
	if len(state.Scope.Attributes) > 0 {
		w.level = ownLevel
	}
	var period time.Duration
	counted := algorithm.Counted{Now: l.sim.now, Hold: l.sim.hold}
	found := script.Sections(l.values[key[0]])
	w.Simulated, w.limit, period = s.Simulated(i, l.sim.limit(w.name, state.Limit), found, counted)
	if period <= pacedPeriod {
		w.each = float64(period.Microseconds()) / float64(w.limit)
	}
	// What the upstream has said: see internal/script/lua/upstream.lua.
	json.Unmarshal([]byte(found["!p"]), w)
	json.Unmarshal([]byte(found["!r"+state.Unit]), w)
	l.windows[key] = w
	return w
}

// side returns the side of a standing.
func (l *simLine) side(standing *throttle.Standing) *side {
	queue, batch := standing.Request.Ticket.Queue, standing.Request.Class == throttle.ClassBatch
	i := slices.IndexFunc(l.sides, func(s *side) bool { return s.queue == queue && s.batch == batch })
	if i < 0 {
		s := &side{batch: batch, queue: queue, share: standing.Policy.BatchShare, tag: -1, tags: map[string]*float64{}}
		if !batch {
			s.share = 1 - s.share
		}
		i, l.sides = len(l.sides), append(l.sides, s)
	}
	return l.sides[i]
}

// add adds tickets to the end of a flow.
func (f *simFlow) add(t tickets) {
	s, last := f.line.sim, len(f.tickets)-1
	if last >= 0 {
		if l := &f.tickets[last]; l.Standing == t.Standing && l.finish == t.finish && l.hold == t.hold {
			l.left += t.left
			return
		}
	}
	if t.finish > 0 && len(s.slots[f.side.queue]) == 0 {
		s.unknown[throttle.BySlots] = true
	}
	t.lump = (s.total + maxSteps - 1) / maxSteps
	for _, w := range f.windows {
		cost := t.Request.CostOf(w.unit)
		if w.level == slotLevel {
			cost = 1
		}
		if cost > 0 && w.held && t.hold == 0 {
			cost, s.unknown[w.name] = 0, true
		}
		if cost > 0 { // several go as one only if all of them fit
			t.lump = max(1, min(t.lump, w.limit/cost))
		}
		t.costs = append(t.costs, cost)
	}
	if f.tickets = append(f.tickets, t); last < 0 {
		f.wait(s.now)
	}
}

// next returns how many tickets go next, as one.
func (t *tickets) next() int64 { return min(t.lump, t.left) }

// cost returns how many units the next tickets take of a window of their flow.
func (t *tickets) cost(window int) int64 { return t.costs[window] * t.next() }

// insert puts a flow in a list, which is sorted by keys, and where they are equal by ranks.
func insert(list *[]*simFlow, f *simFlow) {
	i, _ := slices.BinarySearchFunc(*list, f, func(a, b *simFlow) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.tickets[0].rank, b.tickets[0].rank))
	})
	*list = slices.Insert(*list, i, f)
}
