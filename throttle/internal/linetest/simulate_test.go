package linetest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A simulation says when the backlog would be done by other limits and weights, and what the line does
// by the policy in force is what it says of that.
func TestSimulateAnswersWhatIf(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(throttle.Window{Name: "own", Limit: 4, Period: 10 * s}, limitertest.SharedWindow(4, 10*s))
		st := newStory(t, client, p)
		st.granted("a1")
		st.at(2500 * ms).granted("b1")
		st.at(5 * s).granted("a2")
		st.at(7500 * ms).granted("b2")
		for _, ticket := range []string{"a3", "a4", "a5", "a6", "a7", "b3", "b4"} {
			st.joins(ticket)
		}
		before := limitertest.Dump(t, client)
		faster, heavier, tighter := p.WithDefaults(), p.WithDefaults(), p.WithDefaults()
		faster.Windows[1].Limit = 8
		heavier.Tenants = map[string]throttle.Tenant{"a": {Weight: 5}}
		tighter.Windows[0].Limit = 1
		got, err := inspect.Of(st.l).Simulate(t.Context(), inspect.Variant{Policy: p}, inspect.Variant{Policy: faster},
			inspect.Variant{Policy: heavier}, inspect.Variant{Policy: tighter})
		expect.Must(t, err)
		expect.Equal(t, len(limitertest.Dump(t, client)), len(before), before)
		for i, want := range []struct{ all, a, b time.Duration }{
			{25 * s, 25 * s, 17500 * ms}, // one each 2.5 s from 10 s on, in turns
			{17500 * ms, 17500 * ms, 7500 * ms},
			{25 * s, 22500 * ms, 25 * s},
			{55 * s, 55 * s, 27500 * ms}, // by its own limit, one each 10 s
		} {
			b := got[i]
			expect.Require(t, len(b.Tenants) == 2 && b.Waiting == 7 &&
				b.Tenants[0].Tenant == "a" && b.Tenants[0].Waiting == 5, "variant", i, b)
			if all, a, other := b.Expected, b.Tenants[0].Expected, b.Tenants[1].Expected; !all.Equal(limitertest.At(want.all)) || !a.Equal(limitertest.At(want.a)) || !other.Equal(limitertest.At(want.b)) {
				t.Errorf("variant %d: all done at %v, a at %v, b at %v; want %v", i, all, a, other, want)
			}
		}
		never := p.WithDefaults()
		never.Windows[0].Limit = 1
		st.costs(2).joins("c1")
		got, err = inspect.Of(st.l).Simulate(t.Context(), inspect.Variant{Policy: never})
		expect.That(t, err == nil && got[0].Expected.IsZero() && got[0].Tenants[2].NeverFits == "own" &&
			!got[0].Tenants[0].Expected.IsZero(), got, err)
		never.Windows[0].Limit = 0
		_, err = inspect.Of(st.l).Simulate(t.Context(), inspect.Variant{Policy: never})
		expect.Err(t, err, new(*throttle.PolicyError))
	})
}

// What operators have put in force for a tenant hides no variant of it.
func TestSimulateReplacesAnOverride(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 10 * s})
	st := newStory(t, limitertest.Redis(t), p)
	override := throttle.TenantOverride{Policy: p.Name, Tenant: "a", Until: time.Now().Add(24 * 365 * time.Hour),
		Windows: map[string]throttle.Override{"own": {Limit: 2}}}
	st.l.SetInterventions(throttle.Interventions{At: time.Now(), Overrides: []throttle.TenantOverride{override}})
	st.granted("a1", "a2")
	for _, ticket := range []string{"a3", "a4", "a5", "a6"} {
		st.joins(ticket)
	}
	override.Windows = map[string]throttle.Override{"own": {Limit: 4}}
	got, err := inspect.Of(st.l).Simulate(t.Context(), inspect.Variant{Policy: p},
		inspect.Variant{Policy: p, Overrides: []throttle.TenantOverride{override}})
	expect.Must(t, err)
	expect.That(t, got[0].Expected.Equal(limitertest.At(20*s)), "now it is done at", got[0].Expected)
	expect.That(t, got[1].Expected.Equal(limitertest.At(10*s)), "with the other override at", got[1].Expected)
	override.Windows = map[string]throttle.Override{"none": {Limit: 4}}
	_, err = inspect.Of(st.l).Simulate(t.Context(), inspect.Variant{Policy: p, Overrides: []throttle.TenantOverride{override}})
	expect.Err(t, err, new(*throttle.PolicyError))
}

// A few tickets that cost more delay all by what they cost.
func TestSimulationsCountWhatTicketsCostOnAverage(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(10, 10*s))
	st := newStory(t, limitertest.Redis(t), p)
	st.joinMany("q", "a", 90)
	st.costs(2).joins("a-1", "a-2", "a-3")
	simulated, err := inspect.Of(st.l).Simulate(t.Context(), inspect.Variant{Policy: p})
	expect.Must(t, err)
	last := time.Duration(0)
	for _, at := range st.starts() {
		last = max(last, at)
	}
	expect.Equal(t, simulated[0].Expected.Sub(limitertest.At(0)), last)
}
