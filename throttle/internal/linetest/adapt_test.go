package linetest

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// refused says that the upstream refused a reservation's call, and not for how long.
func (sc *scene) refused(r throttle.Reservation) *scene { return sc.pause(r, 0) }

// spreads takes tickets that wait, which come one by one, at these times.
func (sc *scene) spreads(first, step time.Duration, tickets ...string) {
	sc.t.Helper()
	for i, ticket := range tickets {
		at := first + time.Duration(i)*step
		sc.at(at - us).takes()
		sc.at(at).takes(ticket)
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
	plays(t, map[string]play{
		"a first refusal spreads what a window holds": {with(throttle.AdaptFull, second), func(sc *scene) {
			d := sc.granted("a1")
			sc.at(10 * ms).refused(d.Reservation) // for an eighth of the period
			sc.waits("a2", "a3", "b1", "b2")
			sc.spreads(135*ms, 100*ms, "a2", "b1", "a3", "b2")
		}},
		"the expected start of who waits is that of the spread": {with(throttle.AdaptFull, second), func(sc *scene) {
			d := sc.granted("a1")
			sc.at(10 * ms).refused(d.Reservation)
			sc.denied("a2", 125*ms)
			sc.denied("a3", 225*ms)
			sc.denied("a4", 325*ms)
		}},
		"off opens as the windows do": {with(throttle.AdaptOff, second), func(sc *scene) {
			sc.refused(sc.granted("a1").Reservation)
			sc.denied("a2", throttle.DefaultPause)
			sc.at(3*s).takes("a2").granted("a3", "a4", "a5")
		}},
		"the tenant who was refused adapts": {with(throttle.AdaptFull, throttle.Window{Name: "own", Limit: 10, Period: s}), func(sc *scene) {
			sc.refused(sc.granted("a1").Reservation)
			sc.granted("b1", "b2", "b3")
			sc.denied("a2", 125*ms)
		}},
		"costs are spread": {with(throttle.AdaptFull, second), func(sc *scene) {
			sc.refused(sc.granted("a1").Reservation)
			sc.cost = 4
			sc.waits("a2", "a3")
			sc.spreads(125*ms, 400*ms, "a2", "a3")
		}},
		"the shortest window is what is spread": {with(throttle.AdaptFull, second, throttle.Window{Name: "hour", Limit: 3600, Period: h, Scope: throttle.ScopeShared}), func(sc *scene) {
			sc.refused(sc.granted("a1").Reservation)
			sc.waits("a2", "a3", "a4")
			sc.spreads(125*ms, 100*ms, "a2", "a3", "a4")
		}},
		"a bucket is spread too": {with(throttle.AdaptFull, throttle.Window{Name: "all", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Burst: 5, Period: s, Scope: throttle.ScopeShared}), func(sc *scene) {
			sc.refused(sc.granted("a1").Reservation)
			sc.waits("a2", "a3", "a4")
			sc.spreads(62500*us, 100*ms, "a2", "a3", "a4")
		}},
		"slots are not spread": {with(throttle.AdaptFull, throttle.Window{Name: "all", Algorithm: throttle.AlgorithmConcurrency, Limit: 10, Scope: throttle.ScopeShared}), func(sc *scene) {
			sc.refused(sc.granted("a1").Reservation)
			sc.denied("a2", throttle.DefaultPause)
		}},
		"Resume ends it": {with(throttle.AdaptFull, second), func(sc *scene) {
			sc.refused(sc.granted("a1").Reservation)
			limitertest.Must(sc.t, sc.l.Resume(sc.t.Context(), of("a")))
			sc.granted("a2", "a3", "a4")
		}},
	})
}
