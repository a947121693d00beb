package inspect

import (
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A simulation is a run of a snapshot, which knows nothing of Redis. Times are microseconds since 1970.
type simulation struct {
	*Snapshot
	PlanOptions
	finishes []Finish // as those of the Snapshot
	lines    []*simLine
	slots    map[string][]*window // by queue
	unknown  map[string]bool      // Plan.Unknown
}

// simulation returns one that begins.
func (s *Snapshot) simulation(o PlanOptions) *simulation {
	sim := &simulation{
		Snapshot: s, PlanOptions: o, finishes: slices.Clone(s.finishes), slots: map[string][]*window{}, unknown: map[string]bool{},
	}
	sim.finishes[0].Expected = time.UnixMicro(s.now)
	for _, o := range s.slots {
		n := sim.limit(throttle.BySlots, int64(o.Count))
		counter := algorithm.Concurrency.Simulate(algorithm.Window{Limit: n}, algorithm.Counted{Now: s.now})
		w := &window{Simulated: counter, limit: n, name: throttle.BySlots, held: true}
		for _, queue := range o.Queues {
			sim.slots[queue] = append(sim.slots[queue], w)
		}
	}
	for _, b := range s.backlogs {
		l := &simLine{backlog: b, sim: sim, flows: map[string]*simFlow{}, waited: map[string]int64{}}
		l.scopes = map[string]*scope{script.ScopeKey(nil, nil): &l.root}
		sim.lines = append(sim.lines, l)
		for _, t := range b.tickets {
			l.flow(t.Standing).add(t)
		}
	}
	return sim
}

// limit returns a limit to plan by. With another for the least of that name, all change by as much.
func (s *simulation) limit(window string, inForce int64) int64 {
	if n := s.PlanOptions.Limits[window]; n > 0 {
		return max(1, inForce+n-s.Snapshot.Limits[window])
	}
	return inForce
}

// A window is one window of one scope, or the handler slots of a queue.
type window struct {
	algorithm.Simulated
	limit int64   // units
	name  string  // or throttle.BySlots
	place int     // of its cost in tickets.costs: slots come first
	held  bool    // what it grants is held
	each  float64 // us for which a unit of a batch keeps the next one back
	paced int64   // when the next of a batch goes
}

// A scope is the windows that count one value of some attributes, or the slots of a queue.
type scope struct {
	windows []*window
	batch   int64   // when one of a batch had room here last
	owed    float64 // tickets of batches that are their share
}

// A simLine is what waits for one policy.
type simLine struct {
	*backlog
	sim    *simulation
	root   scope             // that all tenants share
	scopes map[string]*scope // by key, with the root
	flows  map[string]*simFlow

	waiting flowHeap // flows without room in their own scopes, or before their time
	sides   []*side  // of the others
	last    int64    // the tag of the last start

	now    int64
	binds  string           // what all wait for at the root from then on
	waited map[string]int64 // us, by what they waited for there until then
}

// A side is the flows of one class in one queue that have room in their own scopes. Sides share the root by
// tags, as in internal/script/lua/line_order.lua, and tenants share a side, as in line_fair.lua.
type side struct {
	flows flowHeap
	batch bool
	queue string
	share float64 // of its class
	slots scope

	tag  int64             // by when its next ticket has had its turn
	tags map[string]*int64 // of tenants
	last int64             // of these: the tag of the last start
}

// A simFlow is tickets that go one after the other.
type simFlow struct {
	line   *simLine
	side   *side
	tag    *int64   // of its tenant
	scopes []*scope // that its tickets count in: its side's slots, the root, and its own
	weight float64  // of its tenant

	opensAt int64 // the end of a pause
	tickets []tickets
	key     int64            // until when it waits; on its side the tag by which it stands there
	waited  map[string]int64 // us, by what it waited for; on its side less what its line had waited then
}

// flow returns the flow of a standing.
func (l *simLine) flow(s *throttle.Standing) *simFlow {
	f := l.flows[s.Flow]
	if f == nil {
		f = &simFlow{line: l, side: l.side(s.Request), weight: s.Weight, waited: map[string]int64{}}
		f.scopes = []*scope{&f.side.slots, &l.root}
		l.flows[s.Flow] = f
		if f.tag = f.side.tags[s.Request.Tenant]; f.tag == nil {
			f.tag = new(int64)
			f.side.tags[s.Request.Tenant] = f.tag
		}
		for i, w := range s.Decision.Windows {
			key := script.ScopeKey(w.Scope.Attributes, w.Scope.Values)
			if l.scopes[key] == nil {
				l.scopes[key] = &scope{}
			}
			own := l.scopes[key]
			if !slices.ContainsFunc(own.windows, func(made *window) bool { return made.place == i+1 }) {
				own.windows = append(own.windows, l.window(s, i, l.values[key]))
			}
			if !slices.Contains(f.scopes, own) {
				f.scopes = append(f.scopes, own)
			}
		}
	}
	for _, p := range []*throttle.Pause{l.shared.Decision.Pause, s.Decision.Pause} {
		if p != nil {
			f.opensAt = max(f.opensAt, p.Until.UnixMicro())
		}
	}
	return f
}

// own returns the scopes of a flow that not all tenants share.
func (f *simFlow) own() []*scope { return f.scopes[2:] }

// window returns a window of a standing, with what it has counted in the value of its scope.
func (l *simLine) window(s *throttle.Standing, i int, value string) *window {
	state, counted := s.Decision.Windows[i], algorithm.Counted{Now: l.shared.Decision.At.UnixMicro(), Hold: l.sim.hold}
	w := &window{name: state.Name, place: i + 1, held: state.Algorithm.Leases()}
	var period time.Duration
	w.Simulated, w.limit, period = s.Simulated(i, l.sim.limit(w.name, state.Limit), sections(value), counted)
	if period <= pacedPeriod {
		w.each = float64(period.Microseconds()) / float64(w.limit)
	}
	return w
}

// side returns the side of a request.
func (l *simLine) side(r throttle.Request) *side {
	queue, batch := r.Ticket.Queue, r.Class == throttle.ClassBatch
	i := slices.IndexFunc(l.sides, func(s *side) bool { return s.queue == queue && s.batch == batch })
	if i < 0 {
		s := &side{batch: batch, queue: queue, share: l.shared.Policy.BatchShare, tag: -1, tags: map[string]*int64{}}
		if s.slots.windows = l.sim.slots[queue]; !batch {
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
		if l := &f.tickets[last]; l.Standing == t.Standing && l.tenant == t.tenant && l.hold == t.hold {
			l.left += t.left
			return
		}
	}
	if t.tenant > 0 && len(f.side.slots.windows) == 0 {
		s.unknown[throttle.BySlots] = true
	}
	t.costs = []int64{1}
	for _, w := range t.Decision.Windows {
		cost := t.Request.CostOf(w.Unit)
		if t.Decision.Granted { // it is exempt
			cost = 0
		}
		t.costs = append(t.costs, cost)
	}
	t.lump = (s.total + maxSteps - 1) / maxSteps
	for _, scope := range f.scopes {
		for _, w := range scope.windows {
			switch cost := t.costs[w.place]; {
			case cost == 0:
			case w.held && t.hold == 0:
				t.costs[w.place], s.unknown[w.name] = 0, true
			default: // several go as one only if all of them fit
				t.lump = max(1, min(t.lump, w.limit/cost))
			}
		}
	}
	if f.tickets = append(f.tickets, t); last < 0 {
		f.wait(s.now)
	}
}

// next is how many go next, as one.
func (t *tickets) next() int64 { return min(t.lump, t.left) }

// cost is what the next tickets take of a window.
func (t *tickets) cost(w *window) int64 { return t.costs[w.place] * t.next() }

// A flowHeap is flows: first the one of the least key, and of these the one that came first.
type flowHeap []*simFlow

func (h flowHeap) Less(i, j int) bool {
	if h[i].key != h[j].key {
		return h[i].key < h[j].key
	}
	return h[i].tickets[0].rank < h[j].tickets[0].rank
}

func (h flowHeap) Len() int      { return len(h) }
func (h flowHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *flowHeap) Push(x any)   { *h = append(*h, x.(*simFlow)) }
func (h *flowHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
