package linetest

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// spreads takes tickets that wait, which come one by one, at these times.
func (st *story) spreads(first, step time.Duration, tickets ...string) {
	st.Helper()
	for i, ticket := range tickets {
		at := first + time.Duration(i)*step
		st.at(at - us).takes()
		st.at(at).takes(ticket)
	}
}

func TestAdaptingToRefusals(t *testing.T) {
	t.Parallel()
	second := limitertest.SharedWindow(10, s)
	with := func(adapt throttle.Adapt, windows ...throttle.Window) throttle.Policy {
		p := limitertest.Policy(windows...)
		p.Adapt = adapt
		return p
	}
	tell(t, map[string]scenario{
		"a first refusal spreads what a window holds": {with(throttle.AdaptFull, second), func(st *story) {
			d := st.granted("a1")
			st.at(10*ms).pause(d.Reservation, 0) // for an eighth of the period
			st.waits("a2", "a3", "b1", "b2")
			st.spreads(135*ms, 100*ms, "a2", "b1", "a3", "b2")
		}},
		"the expected start of who waits is that of the spread": {with(throttle.AdaptFull, second), func(st *story) {
			d := st.granted("a1")
			st.at(10*ms).pause(d.Reservation, 0)
			st.denied("a2", 125*ms)
			st.denied("a3", 225*ms)
			st.denied("a4", 325*ms)
		}},
		"off opens as the windows do": {with(throttle.AdaptOff, second), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.denied("a2", throttle.DefaultPause)
			st.at(3*s).takes("a2").granted("a3", "a4", "a5")
		}},
		"the tenant who was refused adapts": {with(throttle.AdaptFull, throttle.Window{Name: "own", Limit: 10, Period: s}), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.granted("b1", "b2", "b3")
			st.denied("a2", 125*ms)
		}},
		"costs are spread": {with(throttle.AdaptFull, second), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.costs(4).waits("a2", "a3")
			st.spreads(125*ms, 400*ms, "a2", "a3")
		}},
		"the shortest window is what is spread": {with(throttle.AdaptFull, second, throttle.Window{Name: "hour", Limit: 3600, Period: h, Scope: throttle.ScopeShared}), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.waits("a2", "a3", "a4")
			st.spreads(125*ms, 100*ms, "a2", "a3", "a4")
		}},
		"a bucket is spread too": {with(throttle.AdaptFull, throttle.Window{Name: "all", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Burst: 5, Period: s, Scope: throttle.ScopeShared}), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.waits("a2", "a3", "a4")
			st.spreads(62500*us, 100*ms, "a2", "a3", "a4")
		}},
		"slots are not spread": {with(throttle.AdaptFull, throttle.Window{Name: "all", Algorithm: throttle.AlgorithmConcurrency, Limit: 10, Scope: throttle.ScopeShared}), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.denied("a2", throttle.DefaultPause)
		}},
		"Resume ends it": {with(throttle.AdaptFull, second), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			limitertest.Must(st, st.l.Resume(st.Context(), of("a")))
			st.granted("a2", "a3", "a4")
		}},
	})
}
