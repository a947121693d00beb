// Package plan simulates lines and their windows: when would requests start and end, if nothing else
// comes and servers ask in time? It has classes, weights, windows and handler slots, and knows nothing
// of policies or Redis. Times are microseconds since 1970.
package plan

import (
	"cmp"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// A Simulation is what waits in lines, and what their windows have counted. Fill it, and Run it once.
type Simulation struct {
	Now  int64                          // of the state that it starts from
	From int64                          // before which no demand starts
	By   int64                          // until which Demand.By counts, and after which tickets are late
	End  int64                          // of the simulation
	Hold int64                          // how long other tickets hold what they take; 0 if unknown
	Open func(from time.Time) time.Time // from when on demands may start; nil is at any time

	// Late counts the tickets of demands that end after By, by what they waited for.
	Late map[string]int

	lines      []*Line
	slots      map[string][]*Window // by queue
	unfinished int                  // demands
	lump       int64                // tickets that go as one
	rank       int                  // of the next ticket of a demand
}

// A Demand is tickets that Flow.Add adds to flows, and what became of them, after Run. Those whose hold
// is unknown end when they start.
type Demand struct {
	By    int    // how many end until Simulation.By
	Binds string // what the last one waited for, for longest; empty if for nothing
	Last  int64  // when the last one ends that has started

	left int64
}

// Ends reports whether all tickets of a demand end until the end of the simulation.
func (s *Simulation) Ends(d *Demand) bool { return d.left <= 0 && d.Last <= s.End }

// A Line is what waits for one policy.
type Line struct {
	Opens int64 // the end of a pause

	sim     *Simulation
	share   float64 // of batches
	scopes  map[string]*Scope
	root    *Scope
	sides   []*side
	flows   map[string]*Flow
	waiting flowHeap // those without room in their own windows, by when they have it

	binds  string           // what the line waits for at the root
	waited map[string]int64 // us, by what it waited for there
}

// BySlots is what binds where handler slots do.
const BySlots = "(slots)"

// New returns a simulation without lines.
func New(now, end int64) *Simulation {
	return &Simulation{Now: now, From: now, End: end, Late: map[string]int{}, slots: map[string][]*Window{}}
}

// Line adds the line of a policy with that share of batches.
func (s *Simulation) Line(batchShare float64) *Line {
	l := &Line{
		sim: s, share: batchShare,
		scopes: map[string]*Scope{}, flows: map[string]*Flow{}, waited: map[string]int64{},
	}
	l.waiting.key = (*Flow).byReady
	l.root = l.Scope(Root)
	s.lines = append(s.lines, l)
	return l
}

// A Window is one window of one scope, or the handler slots of a queue.
type Window struct {
	algorithm.Simulated
	Limit  float64       // units
	Name   string        // or BySlots
	Period time.Duration // over which batches use the limit evenly; 0 if they do not
	Place  int           // of its cost in a ticket's costs
	Held   bool          // what it grants is held
}

// A Scope is the windows that count one value of some attributes. That of no attributes is the root of
// its line: all tenants share it. The side with the least tag goes first there, as in
// internal/script/lua/line_order.lua.
type Scope struct {
	Windows []*Window

	line    *Line
	entries []*entry
	v       int64   // the tag of the last start
	paced   float64 // when the next ticket of a batch goes, where no live one waits
	pacedBy *Window // that spreads them so
}

func (s *Scope) root() bool { return s == s.line.root }

// Root is the key of the scope that all tenants share.
const Root = "w:"

// Scope returns the scope of that key, empty when it is new.
func (l *Line) Scope(key string) *Scope {
	s := l.scopes[key]
	if s == nil {
		s = &Scope{line: l}
		l.scopes[key] = s
	}
	return s
}

// SetSlots has no more tickets of some queues run at once. It is for flows that are made later.
func (s *Simulation) SetSlots(n int64, queues ...string) {
	counter := algorithm.Concurrency.Simulate(algorithm.Window{Limit: n}, algorithm.Counted{Now: s.Now})
	w := &Window{Simulated: counter, Limit: float64(n), Name: BySlots, Held: true, Place: -1}
	for _, queue := range queues {
		s.slots[queue] = append(s.slots[queue], w)
	}
}

// SetSlotRate has tickets of a queue start at no more than that rate, in tickets a second. It is for
// flows that are made later.
func (s *Simulation) SetSlotRate(queue string, rate float64) {
	w := &Window{Simulated: &slotRate{each: 1e6 / rate}, Limit: 1e9, Name: BySlots, Place: -1}
	s.slots[queue] = append(s.slots[queue], w)
}

// slotRate are handler slots by the rate at which servers took tickets.
type slotRate struct {
	each float64 // between two tickets (us)
	next float64
}

func (s *slotRate) Fits(t, _ int64) int64 { return max(t, int64(s.next)) }

func (s *slotRate) Take(t, cost, _ int64) {
	s.next = max(s.next, float64(t)-s.each) + s.each*float64(cost)
}

// A Flow is tickets that go one after the other.
type Flow struct {
	Batch  bool
	Scopes []*Scope // that its tickets count in, narrow to broad, without the root
	Queue  string
	Tenant string
	Weight float64 // of its tenant

	line   *Line
	side   *side
	tag    *int64 // of its tenant at the root
	score  int64  // the tag by which it stands there
	works  []work
	scope  *Scope           // where it waits; nil if for a time only
	ready  int64            // until when it waits, if not at the root
	window *Window          // what it waits for at a narrow scope
	since  int64            // when it began to wait there
	waited map[string]int64 // us, by what it waited for; at the root less what its line had waited then
}

// A work is equal tickets of one flow.
type work struct {
	demand     *Demand // nil for none
	costs      []int64 // by Window.Place
	left, hold int64   // hold: how long each holds what it takes; 0 if unknown
	rank       int     // of the first one
}

// Flow returns the flow of that name, made by `build` if there is none.
func (l *Line) Flow(name string, build func() *Flow) *Flow {
	f := l.flows[name]
	if f == nil {
		f = build()
		f.line, f.waited = l, map[string]int64{}
		f.side = l.side(f.Queue, f.Batch)
		f.tag = f.side.tagOf(f.Tenant)
		l.flows[name] = f
	}
	return f
}

// Add adds tickets of a demand to the end of a flow. They wait after all that were added before.
func (f *Flow) Add(d *Demand, tickets int64, costs []int64, hold int64) {
	s := f.line.sim
	if d.left == 0 {
		s.unfinished++
	}
	d.left += tickets
	f.works = append(f.works, work{demand: d, costs: costs, left: tickets, hold: hold, rank: s.rank})
	s.rank += int(tickets)
}

// Before adds tickets of that rank among such tickets to the front of a flow.
func (f *Flow) Before(rank int, tickets int64, costs []int64) {
	first := work{costs: costs, left: tickets, hold: f.line.sim.Hold, rank: rank - 1<<48}
	f.works = slices.Insert(f.works, 0, first)
}

// A side is the flows of one class in one queue. Its heap has those that wait at the root.
type side struct {
	flowHeap
	batch bool
	queue string
	slots []*Window
	tags  map[string]*int64
	v     int64 // of the tenants: the tag of the last start
}

func (l *Line) side(queue string, batch bool) *side {
	i := slices.IndexFunc(l.sides, func(s *side) bool { return s.queue == queue && s.batch == batch })
	if i >= 0 {
		return l.sides[i]
	}
	s := &side{batch: batch, queue: queue, slots: l.sim.slots[queue], tags: map[string]*int64{}}
	s.key = (*Flow).byScore
	l.sides = append(l.sides, s)
	slices.SortFunc(l.sides, func(a, b *side) int {
		if a.batch != b.batch {
			return map[bool]int{false: -1, true: 1}[a.batch]
		}
		return cmp.Compare(a.queue, b.queue)
	})
	return s
}

func (s *side) tagOf(tenant string) *int64 {
	if s.tags[tenant] == nil {
		s.tags[tenant] = new(int64)
	}
	return s.tags[tenant]
}

// A flowHeap is flows: first the one of the least key, and of these the one that came first.
type flowHeap struct {
	flows []*Flow
	key   func(*Flow) int64
}

func (f *Flow) byScore() int64 { return f.score }
func (f *Flow) byReady() int64 { return f.ready }

func (h *flowHeap) Less(i, j int) bool {
	a, b := h.flows[i], h.flows[j]
	if x, y := h.key(a), h.key(b); x != y {
		return x < y
	}
	return a.works[0].rank < b.works[0].rank
}

func (h *flowHeap) Len() int      { return len(h.flows) }
func (h *flowHeap) Swap(i, j int) { h.flows[i], h.flows[j] = h.flows[j], h.flows[i] }
func (h *flowHeap) Push(x any)    { h.flows = append(h.flows, x.(*Flow)) }
func (h *flowHeap) Pop() any {
	last := h.flows[len(h.flows)-1]
	h.flows = h.flows[:len(h.flows)-1]
	return last
}
