package linetest

import (
	"fmt"
	"maps"
	"testing"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// owning is a policy by which the tenant a has a limit of its own.
func owning(limit int64, windows ...throttle.Window) throttle.Policy {
	p := limitertest.Policy(append([]throttle.Window{{Name: "own", Limit: 9, Period: 10 * s}}, windows...)...)
	p.Tenants = map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: limit}}}}
	return p
}

// refresh applies tenants' weights and limits to the waiting tickets, which takes do in the
// background.
func (sc *scene) refresh() {
	sc.t.Helper()
	limitertest.Must(sc.t, sc.hooked.Refresh(sc.t.Context(), "p"))
}

func (sc *scene) neverFits(tickets ...string) {
	sc.t.Helper()
	for _, ticket := range tickets {
		if took := sc.took[ticket]; !took.NeverFits || took.Decision.Granted {
			sc.t.Errorf("%s never fits: %+v", ticket, took)
		}
	}
}

// Changes, and losses, while tickets wait.
func TestChangesOfAStandingLine(t *testing.T) {
	t.Parallel()
	passing := limitertest.Policy(
		throttle.Window{Name: "region", Limit: 1, Period: 10 * s, Scope: throttle.Per("region")},
		throttle.Window{Name: "own", Limit: 2, Period: 30 * s, Unit: "tokens"},
		limitertest.SharedWindow(1, 15*s),
	)
	plays(t, map[string]play{
		"a limit is cut below what the first one costs": {limitertest.Policy(limitertest.SharedWindow(4, 10*s)), func(sc *scene) {
			sc.granted("b0", "b1")
			sc.cost = 3
			sc.joins("a1", "a2", "c1")
			sc.cost = 1
			sc.joins("a3", "b2")
			sc.at(s).takes()
			sc.set(limitertest.Policy(limitertest.SharedWindow(2, 10*s)))
			sc.at(2*s).takes("a1", "a2", "c1")
			sc.neverFits("a1", "a2", "c1")
			if d := limitertest.Peek(sc.t, sc.l, sc.without("x")); d.Windows[0].Used != 2 {
				sc.t.Errorf("%d are used", d.Windows[0].Used)
			}
			sc.at(3 * s).takes() // once
			sc.at(10*s).takes("a3", "b2").asks(-1)
		}},
		"a tenant's limit is cut below what it costs": {owning(4), func(sc *scene) {
			sc.cost = 3
			sc.joins("a0", "a1", "a2")
			sc.cost = 1
			sc.joins("a3")
			sc.takes("a0")
			sc.set(owning(2))
			sc.refresh()
			sc.at(s).takes("a1", "a2")
			sc.neverFits("a1", "a2")
			sc.at(10 * s).takes("a3").asks(-1)
		}},
		"a limit is cut and raised again": {limitertest.Policy(limitertest.SharedWindow(4, 10*s)), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.at(s).granted("a3", "a4")
			sc.joins("b1", "b2", "b3", "b4")
			sc.set(limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
			sc.at(10 * s).takes()
			sc.at(10500 * ms)
			sc.set(limitertest.Policy(limitertest.SharedWindow(4, 10*s)))
			sc.at(11*s).takes("b1", "b2", "b3", "b4")
		}},
		"a limit is raised": {limitertest.Policy(limitertest.SharedWindow(1, h)), func(sc *scene) {
			sc.granted("a1")
			sc.waits("a2", "a3", "b1")
			sc.at(s).takes()
			sc.set(limitertest.Policy(limitertest.SharedWindow(3, h)))
			if d := limitertest.Reserve(sc.t, sc.l, sc.of("c1")); d.Granted {
				sc.t.Error("the last to join is granted")
			}
			sc.at(2*s).takes("a2", "b1").asks(s)
		}},
		"a client has yesterday's limit": {limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: h}), func(sc *scene) {
			sc.granted("a1", "a2", "a3", "b1", "b2")
			sc.waits("a4")
			sc.takes()
			sc.set(limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: h}))
			sc.at(500 * ms).waits("b3")
			sc.set(limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: h}))
			sc.at(s).takes("b3")
			sc.at(h).takes("a4").asks(-1)
		}},
		"a scope is another": {limitertest.Policy(throttle.Window{Name: "w", Limit: 1, Period: h, Scope: throttle.Per("region")}), func(sc *scene) {
			sc.with = map[string]string{"region": "north", "rack": "a"}
			sc.granted("a1")
			sc.waits("a2")
			sc.takes()
			sc.set(limitertest.Policy(throttle.Window{Name: "w", Limit: 1, Period: h, Scope: throttle.Per("rack")}))
			sc.at(s).takes("a2").asks(-1)
		}},
		"limits change twice within a second": {limitertest.Policy(limitertest.SharedWindow(1, h)), func(sc *scene) {
			sc.granted("a1")
			sc.waits("a2", "a3")
			sc.takes()
			sc.at(500 * ms)
			sc.set(limitertest.Policy(limitertest.SharedWindow(2, h)))
			sc.at(s).takes("a2").asks(s)
			sc.set(limitertest.Policy(limitertest.SharedWindow(3, h)))
			sc.at(2 * s).takes("a3")
		}},
		"a tenant's limit is raised": {owning(1, limitertest.SharedWindow(100, s)), func(sc *scene) {
			sc.joins("a1", "a2", "a3", "a4")
			sc.takes("a1")
			sc.set(owning(3, limitertest.SharedWindow(100, s)))
			sc.refresh()
			sc.at(s).takes("a2", "a3")
			sc.at(10 * s).takes("a4")
		}},
		"weights change": {limitertest.Policy(limitertest.SharedWindow(4, s)), func(sc *scene) {
			sc.joinMany("q", "a", 40)
			sc.joinMany("q", "b", 40)
			sc.inShares(sc.shares(24, 4, "q"), map[string]float64{"a": 1, "b": 1}, 1)
			p := limitertest.Policy(limitertest.SharedWindow(4, s))
			p.Tenants = map[string]throttle.Tenant{"b": {Weight: 3}}
			sc.set(p)
			sc.refresh()
			sc.shares(4, 4, "q")
			sc.inShares(sc.shares(24, 4, "q"), map[string]float64{"a": 1, "b": 3}, 1)
		}},
		"a client has yesterday's weight": {weighted(map[string]float64{"b": 3}, limitertest.SharedWindow(4, s)), func(sc *scene) {
			sc.refresh() // else a take does it
			sc.joinMany("q", "a", 40)
			sc.joinMany("q", "b", 40)
			client := limitertest.NewBy(sc.t, sc.client, sc.c, limitertest.Policy(limitertest.SharedWindow(4, s)))
			limitertest.Join(sc.t, client, sc.of("b"))
			sc.inShares(sc.shares(40, 4, "q"), map[string]float64{"a": 1, "b": 3}, 1)
		}},
		"another calendar resets sooner": {limitertest.Policy(limitertest.Quota(1, "0 0 1 * *", "")), func(sc *scene) {
			sc.granted("a1")
			sc.waits("a2")
			sc.at(10 * m).takes()
			sc.set(limitertest.Policy(limitertest.Quota(1, "0 * * * *", "")))
			sc.at(10*m + s).takes("a2") // it has reset since
		}},
		"the upstream has more left": {limitertest.Policy(limitertest.SharedWindow(10, 10*s)), func(sc *scene) {
			first := sc.granted("a1")
			sc.at(1 * ms)
			second := sc.granted("a2")
			sc.remaining(first.Reservation, 0, m)
			sc.waits("a3")
			sc.takes()
			sc.at(2*ms).remaining(second.Reservation, 5, m)
			sc.takes("a3")
		}},
		"a slot is given back": {limitertest.Policy(limitertest.Slots(2)), func(sc *scene) {
			sc.joins("a1", "a2", "a3", "a4")
			sc.takes("a1", "a2")
			limitertest.Must(sc.t, sc.took["a1"].Decision.Reservation.Release(sc.t.Context()))
			sc.takes("a3")
			sc.at(30 * s).takes("a4").asks(-1) // the lease of a2 is over
		}},
		"the clock is set back": {limitertest.Policy(limitertest.SharedWindow(2, 10*s)), func(sc *scene) {
			sc.at(m).granted("a1", "a2")
			sc.waits("a3", "a4", "a5")
			sc.takes()
			sc.at(10 * s).takes() // nothing reopens
			sc.joins("b1")
			sc.at(m + 10*s - us).takes()
			sc.at(m+10*s).takes("a3", "b1")
			sc.at(m+20*s).takes("a4", "a5").asks(-1)
		}},
		"the clock is set back by a year": {limitertest.Policy(limitertest.SharedWindow(2, 10*s)), func(sc *scene) {
			sc.at(365*24*h).joins("a1", "a2")
			sc.at(0).takes("a1", "a2").joins("b1")
			sc.at(s).takes().at(10 * s).takes("b1").asks(-1)
		}},
		"a line that stands for days": {limitertest.Policy(limitertest.SharedWindow(2, 10*s)), func(sc *scene) {
			sc.edit(limitertest.WithoutShortExpiry, sc.l.Policies()...)
			sc.joinMany("q", "a", 200)
			for hour := range 30 {
				for name := range limitertest.ReadLine(sc.t, sc.client).Keys { // an hour less to live
					key := "sluice:{p}:" + name
					if ttl := sc.client.TTL(sc.t.Context(), key).Val(); ttl <= h {
						sc.t.Fatalf("after %d hours %s is gone", hour, name)
					} else {
						sc.client.Expire(sc.t.Context(), key, ttl-h)
					}
				}
				sc.at(steps(hour)*h).takes(fmt.Sprint("a", 2*hour), fmt.Sprint("a", 2*hour+1))
			}
		}},
		"a process is lost with what it took": {limitertest.Policy(limitertest.SharedWindow(2, s)), func(sc *scene) {
			sc.joins("a1", "a2", "a3")
			if got := ids(limitertest.Take(sc.t, sc.server(), 64, "q")); got != "a1 a2" {
				sc.t.Fatalf("took %q", got)
			}
			sc.at(s).takes("a3").asks(-1)
			sc.at(4 * s).joins("a4") // behind them, also in a line that was empty
			sc.at(5*s - us).takes("a4")
			sc.joins("a5")
			sc.at(5 * s).takes("a1")
			sc.at(6*s).takes("a2", "a5").asks(-1)
		}},
		"a process is lost with what never fits": {owning(2), func(sc *scene) {
			sc.cost = 2
			sc.joins("a1")
			sc.cost = 1
			sc.joins("a2")
			sc.set(owning(1))
			sc.refresh()
			lost := sc.server()
			if taken := limitertest.Take(sc.t, lost, 1, "q"); ids(taken) != "a1" || !taken.Tickets[0].NeverFits {
				sc.t.Fatalf("%+v", taken)
			}
			sc.at(5*s).takes("a1", "a2").asks(-1)
			if !sc.took["a1"].NeverFits {
				sc.t.Errorf("%+v", sc.took["a1"])
			}
		}},
		// a1 has passed its region when it leaves, or turns out to have no room elsewhere. What was
		// kept for it is b1's.
		"a ticket passed a node and left": {passing, func(sc *scene) {
			sc.with = map[string]string{"region": "north"}
			sc.tokens = 1
			sc.joins("n1", "a1", "b1")
			sc.takes("n1").at(10 * s).takes()
			sc.leave("a1")
			sc.at(15 * s).takes("b1").asks(-1)
		}},
		"a ticket passed a node and never fits": {passing, func(sc *scene) {
			sc.refresh() // else a take does it, for all tenants
			sc.with = map[string]string{"region": "north"}
			sc.tokens = 1
			sc.joins("n1")
			sc.tokens = 2
			sc.joins("a1")
			sc.tokens = 1
			sc.joins("b1")
			sc.takes("n1").at(10 * s).takes()
			before := limitertest.ReadLine(sc.t, sc.client).Hashes["f"]
			sc.l.SetInterventions(throttle.Interventions{At: limitertest.At(10 * s), Overrides: []throttle.TenantOverride{
				{Policy: "p", Tenant: "a", Until: limitertest.At(h), Windows: map[string]throttle.Override{"own": {Limit: 1}}},
			}})
			limitertest.Until(sc.t, "the cut is in the line", func() bool {
				return !maps.Equal(before, limitertest.ReadLine(sc.t, sc.client).Hashes["f"])
			})
			sc.at(15 * s).takes("a1").takes("b1").asks(-1)
			sc.neverFits("a1")
		}},
		"a ticket passed a node and has no room elsewhere": {passing, func(sc *scene) {
			sc.refresh()
			sc.with = map[string]string{"region": "north"}
			sc.tokens = 1
			sc.joins("n1", "a1", "b1")
			sc.takes("n1").at(10 * s).takes()
			r := sc.without("a")
			r.Exempt, r.Cost = true, map[string]int64{"requests": 0, "tokens": 2}
			limitertest.Reserve(sc.t, sc.l, r)
			sc.at(15 * s).takes().takes("b1")
			sc.at(40 * s).takes("a1").asks(-1)
		}},
	})
}
