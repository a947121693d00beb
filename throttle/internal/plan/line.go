// Package plan simulates a line and its windows: when would requests start, if nothing else comes
// and servers ask in time? It has classes, weights, windows and handler slots, and knows nothing of
// policies or Redis. Times are microseconds since 1970.
package plan

import (
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// pacedPeriod and paceBurst are those of internal/script/lua/line_order.lua.
const (
	pacedPeriod = int64(time.Minute / time.Microsecond)
	paceBurst   = int64(100 * time.Millisecond / time.Microsecond)
)

// A Line is what waits for a policy, and what its windows have counted. Fill it, and Run it once.
type Line struct {
	Now   int64                          // of the state that it starts from
	From  int64                          // before which no demand starts
	By    int64                          // until which Start.By counts
	End   int64                          // of the simulation
	Opens int64                          // the end of a pause
	Open  func(from time.Time) time.Time // from when on demands may start; nil is at any time

	flows       map[string]*Flow
	windows     map[string]*Window
	slots       map[string]*Window // by queue; nil where slots do not bind
	demands     []*work
	unfinished  int
	live, batch class    // by tag
	waiting     flowHeap // those without room in their own windows, by when they have it
	owed, share float64  // what is owed to batches, in parts of a shared window; their share
	heldBy      *Window  // the shared one that the next flow in turn waited for last
	lump        int64    // tickets that go as one
}

// New returns an empty line of a policy with that share of batches.
func New(batchShare float64) *Line {
	return &Line{
		flows: map[string]*Flow{}, windows: map[string]*Window{}, slots: map[string]*Window{}, share: batchShare,
		live: class{flowHeap: flowHeap{less: byTag}}, batch: class{flowHeap: flowHeap{less: byTag}}, waiting: flowHeap{less: byReady},
	}
}

// A Window is one window of one scope, or the handler slots of a queue.
type Window struct {
	algorithm.Simulated
	Limit  float64       // units
	Name   string        // empty for slots
	Period time.Duration // over which batches use the limit evenly; 0 if they do not
	Place  int           // of its cost in a demand's costs
	Shared bool          // all tenants count together
	Slots  bool          // its cost is one for each ticket

	spread float64 // us a unit by which batches are paced; 0 if they are not
	next   float64 // when the next one of a batch goes at its pace, where no live one waits

	live, batches int     // how many flows of each class wait for it, if it is of one tenant
	owed          float64 // to batches there, in parts of it
}

// Window returns the window of that key, made by `build` if there is none.
func (l *Line) Window(key string, build func() *Window) *Window {
	w := l.windows[key]
	if w == nil {
		w = build()
		if period := w.Period.Microseconds(); period <= pacedPeriod {
			w.spread = float64(period) / w.Limit
		}
		l.windows[key] = w
	}
	return w
}

// SetSlots has tickets of a queue start at no more than that rate, in tickets a second. At 0 slots
// do not bind. It is for flows that are made later.
func (l *Line) SetSlots(queue string, rate float64) {
	if rate > 0 {
		l.slots[queue] = &Window{Simulated: &algorithm.Slots{Each: 1e6 / rate}, Slots: true}
	}
}
