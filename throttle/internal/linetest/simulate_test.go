package linetest

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A simulation says when the backlog would be done by other limits. What it says of those in force comes true.
func TestSimulateAnswersWhatIf(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(throttle.Window{Name: "own", Limit: 4, Period: 10 * s}, limitertest.SharedWindow(4, 10*s))
		st := newStory(t, client, p)
		st.granted("a1")
		st.at(2500 * ms).granted("b1")
		st.at(5 * s).granted("a2")
		st.at(7500 * ms).granted("b2")
		st.joins("a3", "a4", "a5", "a6", "a7", "b3", "b4")
		before := limitertest.Dump(t, client)
		faster, heavier, tighter := p.WithDefaults(), p.WithDefaults(), p.WithDefaults()
		faster.Windows[1].Limit = 8
		heavier.Tenants = map[string]throttle.Tenant{"a": {Weight: 5}}
		tighter.Windows[0].Limit = 1
		for i, c := range []struct {
			policy    throttle.Policy
			all, a, b time.Duration
		}{
			{p, 25 * s, 25 * s, 17500 * ms}, // one each 2.5 s from 10 s on, in turns
			{faster, 17500 * ms, 17500 * ms, 7500 * ms},
			{heavier, 25 * s, 22500 * ms, 25 * s},
			{tighter, 55 * s, 55 * s, 27500 * ms}, // by its own limit, one each 10 s
		} {
			now, then, err := inspect.Of(st.l).Simulate(t.Context(), c.policy)
			expect.Require(t, err == nil && now.Expected.Equal(limitertest.At(25*s)) && len(then.Tenants) == 2 && then.Count == 7 &&
				then.Tenants[0].Tenant == "a" && then.Tenants[0].Count == 5, "variant", i, now, then, err)
			got := []time.Time{then.Expected, then.Tenants[0].Expected, then.Tenants[1].Expected}
			expect.Equal(t, got, []time.Time{limitertest.At(c.all), limitertest.At(c.a), limitertest.At(c.b)}, "variant", i)
		}
		expect.Equal(t, len(limitertest.Dump(t, client)), len(before), before)
		never := p.WithDefaults()
		never.Windows[0].Limit = 1
		st.costs(2).joins("c1")
		_, got, err := inspect.Of(st.l).Simulate(t.Context(), never)
		expect.That(t, err == nil && got.Expected.IsZero() && got.Tenants[2].NeverFits == "own" &&
			!got.Tenants[0].Expected.IsZero(), got, err)
		never.Windows[0].Limit = 0
		_, _, err = inspect.Of(st.l).Simulate(t.Context(), never)
		expect.Err(t, err, new(*throttle.PolicyError))
		sharded := limitertest.Policy(p.Windows[0])
		sharded.Shards = 2
		_, _, err = inspect.Of(st.l).Simulate(t.Context(), sharded)
		expect.That(t, errors.As(err, new(*throttle.PolicyError)) && strings.Contains(err.Error(), "shards"), err)
	})
}

// What operators have put in force for a tenant hides no variant of it.
func TestSimulateReplacesAnOverride(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 10 * s})
	st := newStory(t, limitertest.RedisClient(t), p)
	override := throttle.TenantOverride{Policy: p.Name, Tenant: "a", Until: time.Now().Add(24 * 365 * time.Hour),
		Windows: map[string]throttle.Override{"own": {Limit: 2}}}
	st.l.SetInterventions(throttle.Interventions{At: time.Now(), Overrides: []throttle.TenantOverride{override}})
	st.granted("a1", "a2")
	st.joins("a3", "a4", "a5", "a6")
	override.Windows = map[string]throttle.Override{"own": {Limit: 4}}
	now, then, err := inspect.Of(st.l).Simulate(t.Context(), p, override)
	expect.Must(t, err)
	expect.That(t, now.Expected.Equal(limitertest.At(20*s)), "now it is done at", now.Expected)
	expect.That(t, then.Expected.Equal(limitertest.At(10*s)), "with the other override at", then.Expected)
	override.Windows = map[string]throttle.Override{"none": {Limit: 4}}
	_, _, err = inspect.Of(st.l).Simulate(t.Context(), p, override)
	expect.Err(t, err, new(*throttle.PolicyError))
}

// A few tickets that cost more delay all by what they cost.
func TestSimulationsCountWhatTicketsCostOnAverage(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(10, 10*s))
	st := newStory(t, limitertest.RedisClient(t), p)
	st.joinMany("q", "a", 90)
	st.costs(2).joins("a-1", "a-2", "a-3")
	simulated, _, err := inspect.Of(st.l).Simulate(t.Context(), p)
	expect.Must(t, err)
	last := slices.Max(slices.Collect(maps.Values(st.starts())))
	expect.Equal(t, simulated.Expected.Sub(limitertest.At(0)), last)
}

// A tenant that its upstream or an operator has paused starts after the pause. An exempt one does not wait for its upstream.
func TestSimulationsKnowPauses(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 4, Period: 10 * s})
	st := newStory(t, limitertest.RedisClient(t), p)
	st.joins("a1", "b1", "c1", "d1")
	st.pauseOf("a", 5*m).pauseOf("d", 5*m)
	st.pauses("b") // for an hour
	p.Tenants = map[string]throttle.Tenant{"d": {Exempt: true}}
	now, then, err := inspect.Of(st.l).Simulate(t.Context(), p)
	expect.Must(t, err)
	for i, want := range []time.Duration{5 * m, h, 0, 5 * m} {
		expect.Equal(t, now.Tenants[i].Expected, limitertest.At(want), now.Tenants[i].Tenant)
	}
	expect.Equal(t, then.Tenants[3].Expected, limitertest.At(0), "exempt")
}
