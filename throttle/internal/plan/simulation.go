// Package plan simulates lines and their windows: when would requests start and end, if nothing else
// comes and servers ask in time? It has classes, weights, windows and handler slots, and knows nothing
// of policies or Redis. Times are microseconds since 1970.
package plan

import (
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// A Simulation is what waits in lines, and what their windows have counted. Fill it, and Run it once.
type Simulation struct {
	Now  int64                          // of the state that it starts from
	From int64                          // before which no demand starts
	By   int64                          // after which tickets are late that have not ended
	End  int64                          // of the simulation
	Open func(from time.Time) time.Time // from when on demands may start; nil is at any time

	lines []*Line
	slots map[string][]*Window // by queue
	left  int64                // tickets of demands that have not started
	rank  int                  // of the next ticket
}

// A Demand is tickets that Flow.Add adds to flows, and what became of them, after Run. Those whose hold
// is unknown end when they start.
type Demand struct {
	Binds  string // what the last one waited for, for longest; empty if for nothing
	InTime int    // how many end until Simulation.By
	Last   int64  // when the last one ends that has started

	left int64
}

// Ends reports whether all tickets of a demand end until the end of the simulation.
func (s *Simulation) Ends(d *Demand) bool { return d.left <= 0 && d.Last <= s.End }

// New returns a simulation without lines.
func New(now, end int64) *Simulation {
	return &Simulation{Now: now, From: now, End: end, slots: map[string][]*Window{}}
}

// A Window is one window of one scope, or the handler slots of a queue.
type Window struct {
	algorithm.Simulated
	Limit  float64       // units
	Name   string        // or BySlots
	Period time.Duration // over which batches use the limit evenly; 0 if they do not
	Place  int           // of its cost in a ticket's costs; below 0: each costs 1
	Held   bool          // what it grants is held

	paced int64 // when the next of a batch goes
}

// BySlots is what binds where handler slots do.
const BySlots = "(slots)"

// SetSlots has no more tickets of some queues run at once. It is for flows that are made later.
func (s *Simulation) SetSlots(n int64, queues ...string) {
	counter := algorithm.Concurrency.Simulate(algorithm.Window{Limit: n}, algorithm.Counted{Now: s.Now})
	w := &Window{Simulated: counter, Limit: float64(n), Name: BySlots, Held: true, Place: -1}
	for _, queue := range queues {
		s.slots[queue] = append(s.slots[queue], w)
	}
}

// A Scope is the windows that count one value of some attributes.
type Scope struct {
	Windows []*Window

	batch int64   // when one of a batch had room here last
	owed  float64 // tickets of batches that are their share
}

// A Line is what waits for one policy.
type Line struct {
	Root Scope // that all tenants share

	sim     *Simulation
	flows   []*Flow
	waiting heapOf  // flows without room in their own scopes, or before their time
	sides   []*side // of the others
	last    int64   // the tag of the last start

	share  float64          // of batches
	binds  string           // what all wait for at the root now
	waited map[string]int64 // us, by what they waited for there
}

// A side is the flows of one class in one queue that have room in their own scopes. Sides share the root by
// tags, as in internal/script/lua/line_order.lua, and tenants share a side, as in line_fair.lua.
type side struct {
	flows heapOf
	batch bool
	queue string
	slots Scope

	tag  int64             // by when its next ticket has had its turn
	tags map[string]*int64 // of tenants
	last int64             // of these: the tag of the last start
}

// Line adds the line of a policy with that share of batches.
func (s *Simulation) Line(batchShare float64) *Line {
	l := &Line{sim: s, share: batchShare, waited: map[string]int64{}}
	s.lines = append(s.lines, l)
	return l
}

// side returns that of a flow.
func (l *Line) side(f Flow) *side {
	for _, s := range l.sides {
		if s.queue == f.Queue && s.batch == f.Batch {
			return s
		}
	}
	s := &side{batch: f.Batch, queue: f.Queue, tag: -1, tags: map[string]*int64{}}
	s.slots.Windows = l.sim.slots[f.Queue]
	l.sides = append(l.sides, s)
	return s
}

// A Flow is tickets that go one after the other.
type Flow struct {
	Batch  bool
	Opens  int64    // the end of a pause
	Scopes []*Scope // that its tickets count in, without the root
	Queue  string
	Tenant string
	Weight float64 // of its tenant

	line   *Line
	side   *side
	all    []*Scope
	tag    *int64 // of its tenant
	works  []work
	key    int64            // until when it waits; on its side the tag by which it stands there
	window *Window          // what it waits for, nil if for a time only
	since  int64            // when it began to
	waited map[string]int64 // us, by what it waited for; on its side less what its line had waited then
}

// A work is equal tickets of one flow.
type work struct {
	demand     *Demand // nil for none
	costs      []int64 // by Window.Place
	left, hold int64   // hold: how long each holds what it takes; 0 if unknown
	lump       int64   // so many go as one
	rank       int     // of the first one
}

// Flow adds a flow without tickets.
func (l *Line) Flow(f Flow) *Flow {
	f.line, f.side, f.waited = l, l.side(f), map[string]int64{}
	if f.tag = f.side.tags[f.Tenant]; f.tag == nil {
		f.tag = new(int64)
		f.side.tags[f.Tenant] = f.tag
	}
	f.all = append(slices.Clone(f.Scopes), &l.Root, &f.side.slots)
	l.flows = append(l.flows, &f)
	return &f
}

// Add adds tickets to the end of a flow, of a demand or of none. They wait after all that were added
// before, to any flow.
func (f *Flow) Add(d *Demand, tickets int64, costs []int64, hold int64) {
	s := f.line.sim
	if d != nil {
		d.left += tickets
		s.left += tickets
	}
	s.rank += int(tickets)
	if n := len(f.works) - 1; n >= 0 && f.works[n].demand == d && f.works[n].hold == hold && slices.Equal(f.works[n].costs, costs) {
		f.works[n].left += tickets
		return
	}
	f.works = append(f.works, work{demand: d, costs: costs, left: tickets, hold: hold, rank: s.rank - int(tickets)})
}

// heapOf is flows: first the one of the least key, and of these the one that came first.
type heapOf []*Flow

func (h heapOf) Less(i, j int) bool {
	if h[i].key != h[j].key {
		return h[i].key < h[j].key
	}
	return h[i].works[0].rank < h[j].works[0].rank
}

func (h heapOf) Len() int      { return len(h) }
func (h heapOf) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *heapOf) Push(x any)   { *h = append(*h, x.(*Flow)) }
func (h *heapOf) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
