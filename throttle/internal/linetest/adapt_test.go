package linetest

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
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
	policy := func(keep bool, windows ...throttle.Window) throttle.Policy {
		p := limitertest.Policy(windows...)
		p.KeepRate = keep
		return p
	}
	tell(t, map[string]lineCase{
		"a first refusal spreads what a window holds": {policy(false, second), func(st *story) {
			d := st.granted("a1")
			st.at(10*ms).pause(d.Reservation, ms-1) // for an eighth of the period
			st.waits("a2", "a3", "b1", "b2")
			st.spreads(135*ms, 100*ms, "a2", "b1", "a3", "b2")
		}},
		"the expected start of who waits is that of the spread": {policy(false, second), func(st *story) {
			d := st.granted("a1")
			st.at(10*ms).pause(d.Reservation, 0)
			st.denied("a2", 125*ms)
			st.denied("a3", 225*ms)
			st.denied("a4", 325*ms)
		}},
		"off opens as the windows do": {policy(true, second), func(st *story) {
			st.pause(st.granted("a1").Reservation, -s)
			st.denied("a2", throttle.DefaultPause)
			st.at(3*s).takes("a2").granted("a3", "a4", "a5")
		}},
		"the tenant who was refused adapts": {policy(false, throttle.Window{Name: "own", Limit: 10, Period: s}), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.granted("b1", "b2", "b3")
			st.denied("a2", 125*ms)
		}},
		"costs are spread": {policy(false, second), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.costs(4).waits("a2", "a3")
			st.spreads(125*ms, 400*ms, "a2", "a3")
		}},
		"the shortest window is what is spread": {policy(false, second, throttle.Window{Name: "hour", Limit: 3600, Period: h, Shared: true}), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.waits("a2", "a3", "a4")
			st.spreads(125*ms, 100*ms, "a2", "a3", "a4")
		}},
		"a bucket is spread too": {policy(false, throttle.Window{Name: "all", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Burst: 5, Period: s, Shared: true}), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.waits("a2", "a3", "a4")
			st.spreads(125*ms, 100*ms, "a2", "a3", "a4")
		}},
		"slots are not spread": {policy(false, throttle.Window{Name: "all", Algorithm: throttle.AlgorithmConcurrency, Limit: 10, Shared: true}), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			st.denied("a2", throttle.DefaultPause)
		}},
		"a window whose rate the policy no longer has is not spread": {policy(false, second), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			slots := throttle.Window{Name: "all", Algorithm: throttle.AlgorithmConcurrency, Limit: 10, Shared: true}
			expect.Must(st, st.l.SetPolicies([]throttle.Policy{policy(false, slots)}))
			st.at(s).granted("a2")
		}},
		"another process adapts with its next call": {policy(false, second), func(st *story) {
			other := st.server()
			st.pause(st.granted("a1").Reservation, 0)
			limitertest.WantDenied(st, limitertest.Reserve(st, other.l, requestOf("a")), 125*ms)
			st.at(125 * ms)
			other.granted("a2")
			limitertest.WantDenied(st, limitertest.Reserve(st, st.l, requestOf("a")), 100*ms)
		}},
		"Resume ends it": {policy(false, second), func(st *story) {
			st.pause(st.granted("a1").Reservation, 0)
			expect.Must(st, st.l.Resume(st.Context(), requestOf("a")))
			st.granted("a2", "a3", "a4")
		}},
	})
}

// Who asks learns how often the upstream refused, and what is granted now.
func TestTheRateInForceIsTold(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(10, s)))
	tell := func(want string) {
		t.Helper()
		d := expect.Got(st.l.Peek(t.Context(), st.without("b")))(t)
		got := ""
		if d.Adapted != nil {
			got = d.Adapted.String()
		}
		expect.Equal(t, got, want)
	}
	tell("")
	refused := func(d throttle.Decision, pause time.Duration, rate string) {
		t.Helper()
		refusal, err := d.Reservation.Pause(t.Context(), 0, "")
		got := ""
		if refusal.Adapted != nil {
			got = refusal.Adapted.String()
		}
		expect.That(t, err == nil && refusal.Policy == "p" && refusal.Tenant == "a" &&
			refusal.Pause == pause && got == rate, refusal, got, err, "want a pause of", pause, rate)
	}
	first, together := st.granted("a1"), st.granted("a11")
	refused(first, 125*ms, "refused once since 00:00 UTC, now spread evenly")
	refused(together, 0, "")
	tell("refused once since 00:00 UTC, now spread evenly")
	st.at(s)
	tell("refused once since 00:00 UTC, now spread evenly") // although it would be granted
	d := st.granted("a2")
	st.at(1010 * ms)
	refused(d, 125*ms, "refused 2 times since 00:00 UTC, now 87.5% of the limit")
	tell("refused 2 times since 00:00 UTC, now 87.5% of the limit")
	reason := func(want string) {
		t.Helper()
		expect.Equal(t, limitertest.Reserve(t, st.l, st.without("b")).Reason(), want)
	}
	reason("throttled: p, tenant b, 125ms: paused until 00:00:02 UTC by the upstream's refusal to a, reported by w: refused 2 times since 00:00 UTC, now 87.5% of the limit")
	st.at(1135 * ms).granted("a3")
	reason("throttled: p/shared, tenant b, 115ms: refused 2 times since 00:00 UTC, now 87.5% of the limit")
	st.at(3 * m)
	tell("")
}

// rate returns the rate in force for a tenant, in units per second, and 0 without one.
func (st *story) rate(tenant string) float64 {
	st.Helper()
	if d := limitertest.Peek(st, st.l, st.without(tenant)); d.Adapted != nil {
		return d.Adapted.Rate
	}
	return 0
}

// refusedAt has a call refused, 10 ms after it was granted.
func (st *story) refusedAt(at time.Duration, ticket string) {
	st.Helper()
	d := st.at(at).granted(ticket)
	st.at(at+10*ms).pause(d.Reservation, 0)
}

// However often calls are refused, a 64th of the rate goes on, and tries again.
func TestTheRateHasAFloor(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(64, s)))
	var rates []float64
	for at := time.Duration(0); at < 50*m && len(rates) < 100; at += 2 * s {
		d := limitertest.Reserve(t, st.l, st.at(at).without("a"))
		if !d.Granted {
			continue
		}
		st.at(at+ms).pause(d.Reservation, 0)
		rates = append(rates, st.rate("a"))
	}
	expect.Require(t, len(rates) >= 100 && slices.Min(rates) == 1,
		len(rates), "calls, at rates down to", slices.Min(rates), ", want 100 and 1")
	waits := st.joins("a1", "a2")
	if waits.RetryIn > s+s { // a pause of a period, and a call in a second
		t.Errorf("at the floor the second call starts in %v", waits.RetryIn)
	}
}

// Only what was refused adapts, as the policy says whose count that is.
func TestOnlyWhatWasRefusedAdapts(t *testing.T) {
	t.Parallel()
	tenantWindow := throttle.Window{Name: "own", Limit: 10, Period: s}
	type row struct {
		upstreamShared bool
		windows        []throttle.Window
		others         bool
	}
	limitertest.EachCase(t, map[string]row{
		"the tenant":                         {false, []throttle.Window{tenantWindow}, false},
		"the tenant, beside a shared window": {false, []throttle.Window{tenantWindow, limitertest.SharedWindow(100, s)}, false},
		"all":                                {true, []throttle.Window{tenantWindow, limitertest.SharedWindow(100, s)}, true},
		"all, of a shared window":            {false, []throttle.Window{limitertest.SharedWindow(100, s)}, true},
	}, func(t *testing.T, client *redis.Client, r row) {
		p := limitertest.Policy(r.windows...)
		p.UpstreamShared = r.upstreamShared
		st := newStory(t, client, p)
		st.refusedAt(0, "a1")
		expect.That(t, st.rate("a") > 0, "a does not adapt")
		expect.Equal(t, st.rate("b") > 0, r.others, "b adapts")
	})
}

// Those who wait are told when the rate in force lets them start, and do.
func TestExpectedStartsKnowTheRate(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(10, s)))
	st.refusedAt(0, "a1")
	st.refusedAt(s, "a2")
	var told []time.Duration
	for _, ticket := range []string{"a3", "a4", "a5"} {
		told = append(told, 1010*ms+st.joins(ticket).RetryIn)
	}
	for i, at := range told {
		want := 1135*ms + time.Duration(math.Ceil(float64(i)*1e6/8.75))*us
		expect.Require(t, at == want, "told", told, "want", want)
	}
	for i, ticket := range []string{"a3", "a4", "a5"} {
		const early = 2 * (s*100/875 - s*100/880) // the rate grows meanwhile, but not to 8.8/s
		st.at(told[i] - early).takes()
		st.at(told[i]).takes(ticket)
	}
}

// The observer is told of each refusal, and of a changed rate once.
func TestRefusalsAreObserved(t *testing.T) {
	client := limitertest.RedisClient(t)
	var told []throttle.Refusal
	l := limitertest.NewFrom(t, throttle.Config{
		Client: client, Policies: []throttle.Policy{limitertest.Policy(limitertest.SharedWindow(10, s))},
		Observer: expect.On(func(r throttle.Refusal) { told = append(told, r) }),
	})
	r := throttle.Request{Policy: "p", Tenant: "a"}
	calls := []throttle.Decision{limitertest.Reserve(t, l, r), limitertest.Reserve(t, l, r), limitertest.Reserve(t, l, r)}
	for _, d := range calls {
		expect.Must(t, expect.ErrOf(d.Reservation.Pause(t.Context(), 0, "")))
	}
	expect.Require(t, len(told) == 3 && told[0].Adapted != nil &&
		told[0].Adapted.Window == "shared" && told[0].Pause == 125*ms, "told", told)
	a := told[0].Adapted
	expect.Equal(t, a.Until.Sub(a.Since), m+125*ms)
	for _, r := range told[1:] {
		expect.Equal(t, r, (throttle.Refusal{Policy: "p", Tenant: "a"}))
	}
}

// A pause that the upstream asks for begins also if the rate stays.
func TestAPauseMayBeginWithoutAnotherRate(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(10, s)))
	st.refusedAt(0, "a1")
	d := st.at(200 * ms).granted("a2")
	refusal, err := d.Reservation.Pause(t.Context(), 3*s, "")
	want := (throttle.Refusal{Pause: 3 * s, Policy: "p", Tenant: "a"})
	expect.That(t, err == nil && refusal == want, refusal, err, "want", want)
}
