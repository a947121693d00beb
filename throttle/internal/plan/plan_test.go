package plan

import (
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

const second = 1_000_000

func held(name string, limit int64) *Window {
	counts := algorithm.Concurrency.Simulate(algorithm.Window{Limit: limit}, algorithm.Counted{})
	return &Window{Simulated: counts, Limit: float64(limit), Name: name, Held: true}
}

// flow adds a flow that counts in the root's windows.
func flow(l *Line, name, queue string) *Flow {
	return l.Flow(Flow{Queue: queue, Tenant: name, Weight: 1})
}

// Live tickets have not gone when the batch begins: it gets its share of the limit from then on, whether they
// wait in one queue or in several.
func TestABatchGetsItsShareFromItsBeginning(t *testing.T) {
	for _, queues := range [][]string{{"a"}, {"a", "b"}} {
		s := New(0, 1000*second)
		s.From = 10 * second
		l := s.Line(0.2)
		l.Root.Windows = []*Window{held("all", 10)}
		for _, queue := range queues {
			flow(l, queue, queue).Add(nil, 300, []int64{1}, second)
		}
		batch := &Demand{}
		l.Flow(Flow{Batch: true, Queue: "c", Tenant: "c", Weight: 1}).Add(batch, 20, []int64{1}, second)
		expect.Must(t, s.Run(t.Context()))
		expect.That(t, batch.Last >= 20*second && batch.Last <= 21*second, "2 of 10 a second, beside", queues, batch)
	}
}

// Tenants take turns, however many flows they have.
func TestTenantsTakeTurns(t *testing.T) {
	s := New(0, 1000*second)
	l := s.Line(0.05)
	l.Root.Windows = []*Window{held("all", 1)}
	one, many := &Demand{}, &Demand{}
	for range 9 {
		flow(l, "many", "q").Add(many, 1, []int64{1}, second)
	}
	flow(l, "one", "q").Add(one, 5, []int64{1}, second)
	expect.Must(t, s.Run(t.Context()))
	expect.That(t, one.Last <= 11*second && many.Last == 14*second, one, many)
}

// Tickets that wait for slots hold up the queues of these slots, in all lines, and no others.
func TestQueuesWithoutSlotsHoldUpNoOther(t *testing.T) {
	for _, also := range []string{"beside", "free"} {
		s := New(0, 1000*second)
		s.SetSlots(1, "busy", also)
		l := s.Line(0.05)
		l.Root.Windows = []*Window{held("at-once", 5)}
		busy, free := &Demand{}, &Demand{}
		flow(l, "a", "busy").Add(busy, 4, []int64{1}, 10*second)
		flow(l, "b", "free").Add(free, 4, []int64{1}, 10*second)
		flow(s.Line(0.05), "c", "beside").Add(nil, 2, nil, 0)
		expect.Must(t, s.Run(t.Context()))
		want := map[string][2]int64{"beside": {40, 10}, "free": {70, 80}}[also]
		expect.That(t, s.Ends(busy) && busy.Last == want[0]*second && busy.Binds == BySlots,
			"one slot, also for", also, busy)
		if !s.Ends(free) || free.Last != want[1]*second || (free.Binds == "") != (also == "beside") {
			t.Errorf("beside it: %+v", free)
		}
	}
}
