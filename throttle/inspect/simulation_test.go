package inspect

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

const second = 1_000_000

// simulated begins at 0, and ends after 1000 s.
func simulated(o PlanOptions) *simulation {
	s := (&prepared{PlanOptions: o}).newSimulation(nil)
	s.end = 1000 * second
	return s
}

func held(name string, limit int64) *window {
	counts := algorithm.Concurrency.Simulate(algorithm.Window{Limit: limit}, algorithm.Counted{})
	return &window{Simulated: counts, limit: float64(limit), name: name, held: true}
}

// flowIn adds a flow that counts in the root's windows.
func flowIn(l *simLine, name, queue string, class throttle.Class) *simFlow {
	return l.flow(throttle.Request{Class: class, Tenant: name, Ticket: throttle.Ticket{Queue: queue}}, 1)
}

// Live tickets have not gone when the batch begins: it gets its share of the limit from then on, whether they
// wait in one queue or in several.
func TestABatchGetsItsShareFromItsBeginning(t *testing.T) {
	for _, queues := range [][]string{{"a"}, {"a", "b"}} {
		begins := func(t time.Time) time.Time { return time.UnixMicro(max(10*second, t.UnixMicro())) }
		s := simulated(PlanOptions{Open: begins})
		l := s.line(nil, 0.2)
		l.root.windows = []*window{held("all", 10)}
		for _, queue := range queues {
			flowIn(l, queue, queue, "").add(nil, 300, []int64{1}, second)
		}
		batch := &finish{}
		flowIn(l, "c", "c", throttle.ClassBatch).add(batch, 20, []int64{1}, second)
		expect.Must(t, s.run(t.Context()))
		expect.That(t, batch.last >= 20*second && batch.last <= 21*second, "2 of 10 a second, beside", queues, batch)
	}
}

// Tenants take turns, however many flows they have.
func TestTenantsTakeTurns(t *testing.T) {
	s := simulated(PlanOptions{})
	l := s.line(nil, 0.05)
	l.root.windows = []*window{held("all", 1)}
	one, many := &finish{}, &finish{}
	for range 9 {
		flowIn(l, "many", "q", "").add(many, 1, []int64{1}, second)
	}
	flowIn(l, "one", "q", "").add(one, 5, []int64{1}, second)
	expect.Must(t, s.run(t.Context()))
	expect.That(t, one.last <= 11*second && many.last == 14*second, one, many)
}

// Tickets that wait for slots hold up the queues of these slots, in all lines, and no others.
func TestQueuesWithoutSlotsHoldUpNoOther(t *testing.T) {
	for _, also := range []string{"beside", "free"} {
		s := simulated(PlanOptions{Slots: []Slots{{Count: 1, Queues: []string{"busy", also}}}})
		l := s.line(nil, 0.05)
		l.root.windows = []*window{held("at-once", 5)}
		busy, free := &finish{}, &finish{}
		flowIn(l, "a", "busy", "").add(busy, 4, []int64{1}, 10*second)
		flowIn(l, "b", "free", "").add(free, 4, []int64{1}, 10*second)
		flowIn(s.line(nil, 0.05), "c", "beside", "").add(nil, 2, nil, 0)
		expect.Must(t, s.run(t.Context()))
		want := map[string][2]int64{"beside": {40, 10}, "free": {70, 80}}[also]
		expect.That(t, busy.left == 0 && busy.last == want[0]*second && busy.Binds == throttle.BySlots,
			"one slot, also for", also, busy)
		if free.left > 0 || free.last != want[1]*second || (free.Binds == "") != (also == "beside") {
			t.Errorf("beside it: %+v", free)
		}
	}
}
