package inspect

import (
	"cmp"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A simulation is a run of a prepared plan, which knows nothing of Redis. Times are microseconds since 1970.
type simulation struct {
	*prepared
	by     int64            // PlanOptions.By
	end    int64            // of the simulation
	raised map[string]int64 // limits, by window, unless those to plan by are higher
	lines  []*simLine
	slots  map[string][]*window // by queue
	left   int64                // tickets of demands that have not started
	rank   int                  // of the next ticket
}

// newSimulation returns a simulation in which nothing waits.
func (p *prepared) newSimulation(raised map[string]int64) *simulation {
	s := &simulation{
		prepared: p, by: p.By.UnixMicro(), end: p.now + MaxPlan.Microseconds(), raised: raised,
		slots: map[string][]*window{},
	}
	for _, o := range p.Slots {
		first := int64(p.Slots[0].Count)
		n := max(1, int64(o.Count)+s.limit(throttle.BySlots, first)-first)
		counter := algorithm.Concurrency.Simulate(algorithm.Window{Limit: n}, algorithm.Counted{Now: p.now})
		w := &window{Simulated: counter, limit: float64(n), name: throttle.BySlots, held: true, place: -1}
		for _, queue := range o.Queues {
			s.slots[queue] = append(s.slots[queue], w)
		}
	}
	for _, read := range p.snapshots {
		s.line(read, read.shared.Policy.BatchShare)
	}
	return s
}

func (s *simulation) limit(window string, inForce int64) int64 {
	return max(s.raised[window], cmp.Or(s.Limits[window], inForce))
}

// A window is one window of one scope, or the handler slots of a queue.
type window struct {
	algorithm.Simulated
	limit  float64       // units
	name   string        // or throttle.BySlots
	period time.Duration // over which batches use the limit evenly; 0 if they do not
	place  int           // of its cost in a ticket's costs; below 0: each costs 1
	held   bool          // what it grants is held
	paced  int64         // when the next of a batch goes
}

// A scope is the windows that count one value of some attributes.
type scope struct {
	windows []*window
	batch   int64   // when one of a batch had room here last
	owed    float64 // tickets of batches that are their share
}

// A simLine is what waits for one policy.
type simLine struct {
	read   *snapshot
	sim    *simulation
	root   scope             // that all tenants share
	scopes map[string]*scope // by key, with the root
	byName map[string]*simFlow

	flows   []*simFlow
	waiting flowHeap // flows without room in their own scopes, or before their time
	sides   []*side  // of the others
	last    int64    // the tag of the last start

	share  float64          // of batches
	binds  string           // what all wait for at the root now
	waited map[string]int64 // us, by what they waited for there
}

// A side is the flows of one class in one queue that have room in their own scopes. Sides share the root by
// tags, as in internal/script/lua/line_order.lua, and tenants share a side, as in line_fair.lua.
type side struct {
	flows flowHeap
	batch bool
	queue string
	slots scope

	tag  int64             // by when its next ticket has had its turn
	tags map[string]*int64 // of tenants
	last int64             // of these: the tag of the last start
}

// line adds a line with that share of batches.
func (s *simulation) line(read *snapshot, share float64) *simLine {
	l := &simLine{read: read, sim: s, share: share, waited: map[string]int64{}, byName: map[string]*simFlow{}}
	l.scopes = map[string]*scope{script.ScopeKey(nil, nil): &l.root}
	s.lines = append(s.lines, l)
	return l
}

// A simFlow is tickets that go one after the other.
type simFlow struct {
	line   *simLine
	side   *side
	tag    *int64   // of its tenant
	batch  bool     // as its side
	scopes []*scope // that its tickets count in, without the root
	all    []*scope
	weight float64 // of its tenant

	opensAt int64 // the end of a pause
	works   []tickets
	key     int64            // until when it waits; on its side the tag by which it stands there
	window  *window          // what it waits for, nil if for a time only
	since   int64            // when it began to
	waited  map[string]int64 // us, by what it waited for; on its side less what its line had waited then
}

// tickets are equal ones of one flow.
type tickets struct {
	finish     *finish // nil for none
	costs      []int64 // by window.place
	left, hold int64   // hold: how long each holds what it takes; 0 if unknown, then it ends when it starts
	lump       int64   // so many go as one
	rank       int     // of the first one
}

// flow adds a flow without tickets, of a side that it may begin.
func (l *simLine) flow(r throttle.Request, weight float64, scopes ...*scope) *simFlow {
	f := &simFlow{line: l, batch: r.Class == throttle.ClassBatch, scopes: scopes, weight: weight, waited: map[string]int64{}}
	queue := r.Ticket.Queue
	i := slices.IndexFunc(l.sides, func(s *side) bool { return s.queue == queue && s.batch == f.batch })
	if i < 0 {
		i = len(l.sides)
		s := &side{batch: f.batch, queue: queue, tag: -1, tags: map[string]*int64{}, slots: scope{windows: l.sim.slots[queue]}}
		l.sides = append(l.sides, s)
	}
	f.side = l.sides[i]
	if f.tag = f.side.tags[r.Tenant]; f.tag == nil {
		f.tag = new(int64)
		f.side.tags[r.Tenant] = f.tag
	}
	f.all = append(slices.Clone(scopes), &l.root, &f.side.slots)
	l.flows = append(l.flows, f)
	return f
}

// flowOf returns the flow of a standing.
func (l *simLine) flowOf(standing *throttle.Standing) *simFlow {
	d, f := standing.Decision, l.byName[standing.Flow]
	if f == nil {
		var own []*scope
		for i := range d.Windows {
			if scope := l.scope(standing, i); scope != &l.root && !slices.Contains(own, scope) {
				own = append(own, scope)
			}
		}
		f = l.flow(standing.Request, standing.Weight, own...)
		l.byName[standing.Flow] = f
	}
	for _, p := range []*throttle.Pause{l.read.shared.Decision.Pause, d.Pause} {
		if p != nil {
			f.opensAt = max(f.opensAt, p.Until.UnixMicro())
		}
	}
	return f
}

// scope returns the scope of a window of a standing, with the window.
func (l *simLine) scope(standing *throttle.Standing, i int) *scope {
	w := standing.Decision.Windows[i]
	key := script.ScopeKey(w.Scope.Attributes, w.Scope.Values)
	if l.scopes[key] == nil {
		l.scopes[key] = &scope{}
	}
	s := l.scopes[key]
	if slices.ContainsFunc(s.windows, func(made *window) bool { return made.place == i }) {
		return s
	}
	counted := algorithm.Counted{Now: l.read.shared.Decision.At.UnixMicro(), Hold: l.sim.hold}
	counts, capacity, paced := standing.Simulated(i, l.sim.limit(w.Name, w.Limit), sections(l.read.values[key]), counted)
	s.windows = append(s.windows, &window{
		Simulated: counts, limit: float64(capacity), name: w.Name, period: paced, place: i, held: w.Algorithm.Leases(),
	})
	return s
}

// add adds tickets to the end of a flow. They wait after all that were added before, to any flow.
func (f *simFlow) add(demand *finish, n int64, costs []int64, hold int64) {
	s := f.line.sim
	if demand != nil {
		demand.left += n
		s.left += n
	}
	s.rank += int(n)
	last := len(f.works) - 1
	if last >= 0 && f.works[last].finish == demand && f.works[last].hold == hold && slices.Equal(f.works[last].costs, costs) {
		f.works[last].left += n
		return
	}
	f.works = append(f.works, tickets{finish: demand, costs: costs, left: n, hold: hold, rank: s.rank - int(n)})
}

// A flowHeap is flows: first the one of the least key, and of these the one that came first.
type flowHeap []*simFlow

func (h flowHeap) Less(i, j int) bool {
	if h[i].key != h[j].key {
		return h[i].key < h[j].key
	}
	return h[i].works[0].rank < h[j].works[0].rank
}

func (h flowHeap) Len() int      { return len(h) }
func (h flowHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *flowHeap) Push(x any)   { *h = append(*h, x.(*simFlow)) }
func (h *flowHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
