package plan

import (
	"reflect"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

const second = 1_000_000

func sliding(name string, limit int64) *Window {
	counts := algorithm.Concurrency.Simulate(algorithm.Window{Limit: limit}, algorithm.Counted{})
	return &Window{Simulated: counts, Limit: float64(limit), Name: name, Held: true}
}

// flow adds a flow that counts in the root's windows.
func flow(l *Line, name, queue string) *Flow {
	return l.Flow(Flow{Queue: queue, Tenant: name, Weight: 1})
}

// Tickets that wait for slots hold up the queues of these slots, in all lines, and no others.
func TestQueuesWithoutSlotsHoldUpNoOther(t *testing.T) {
	for _, also := range []string{"beside", "free"} {
		s := New(0, 1000*second)
		s.SetSlots(1, "busy", also)
		l := s.Line(0.05)
		l.Root.Windows = []*Window{sliding("at-once", 5)}
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

// What is late is counted by what it waited for, and the least limit is found.
func TestTheLeastLimitIsFound(t *testing.T) {
	late := func(limits map[string]int64) (int, error) {
		s := New(0, 1000*second)
		s.By = 30 * second
		l := s.Line(0.05)
		l.Root.Windows = []*Window{sliding("first", limits["first"]), sliding("second", limits["second"])}
		flow(l, "a", "q").Add(&Demand{}, 30, []int64{1, 1}, 10*second)
		err := s.Run(t.Context())
		n := 0
		for _, count := range s.Late {
			n += count
		}
		return n, err
	}
	for _, c := range []struct {
		first, second int64
		want          map[string]int64
	}{
		{9, 100, map[string]int64{"first": 10}},
		{9, 4, map[string]int64{"first": 10, "second": 10}},
	} {
		limits := map[string]int64{"first": c.first, "second": c.second}
		got, err := Fit(limits, late)
		expect.That(t, err == nil && reflect.DeepEqual(got, c.want), c, got, err)
	}
	if got, err := Fit(map[string]int64{"none": 1}, func(map[string]int64) (int, error) { return 1, nil }); err != nil || got != nil {
		t.Errorf("no limit helps: %+v, %v", got, err)
	}
}
