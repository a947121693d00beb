package linetest

import (
	"testing"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestALineIsServedInItsOrder(t *testing.T) {
	t.Parallel()
	two := limitertest.SharedWindow(2, 10*s)
	own := throttle.Window{Name: "own", Limit: 2, Period: 10 * s}
	limited := func(tenant string, limit int64, windows ...throttle.Window) throttle.Policy {
		p := limitertest.Policy(windows...)
		p.Tenants = map[string]throttle.Tenant{tenant: {Windows: map[string]throttle.Override{"own": {Limit: limit}}}}
		return p
	}
	plays(t, map[string]play{
		"the walk through time of docs/explanation/line.md": {limitertest.Policy(two), func(sc *scene) {
			sc.expects("a1", 0)
			sc.expects("a2", 0)
			sc.expects("a3", 10*s)
			sc.takes("a1", "a2")
			sc.at(2*s).expects("a4", 8*s)
			sc.at(3*s).expects("b1", 7*s)
			sc.at(10*s - us).takes().asks(us)
			sc.at(10*s).takes("b1", "a3").asks(s)
			sc.at(20*s - us).takes().asks(us)
			sc.at(20 * s).takes("a4").asks(-1)
		}},
		"no newcomer passes those that wait": {limitertest.Policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.at(1 * s).waits("a3")
			sc.at(10*s).denied("b1", 0) // there is room for two
			if d := limitertest.Reserve(sc.t, sc.l, sc.without("c")); d.Granted || d.RetryIn == 0 {
				sc.t.Errorf("one without a ticket: %+v", d)
			}
			sc.takes("a3", "b1")
		}},
		"of one tenant the first comes first": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(sc *scene) {
			sc.joins("a1", "a2", "a3")
			for i, ticket := range []string{"a1", "a2", "a3"} {
				sc.at(10 * s * steps(i)).takes(ticket)
			}
		}},
		"Peek says what is expected": {limitertest.Policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.denied("a3", 10*s)
			sc.denied("a4", 10*s)
			sc.denied("a5", 20*s)
			sc.at(4*s).denied("a5", 16*s)
			before := lineDump(sc.t, sc.client)
			if d := limitertest.Peek(sc.t, sc.l, sc.without("b")); d.Granted || d.RetryIn != 16*s { // behind all who wait
				sc.t.Errorf("of another tenant: granted %v, in %v", d.Granted, d.RetryIn)
			}
			if after := lineDump(sc.t, sc.client); after != before {
				sc.t.Errorf("Peek made\n%s\nof\n%s", after, before)
			}
		}},
		"Leave gives the place to the next": {limitertest.Policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4", "b1")
			sc.leave("a3").leave("nobody")
			sc.at(10*s).takes("a4", "b1").asks(-1)
		}},
		"a ticket that left does not move its tenant's tag": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(sc *scene) {
			sc.granted("b0")
			sc.waits("a1", "a2", "a3", "a4", "b1", "b2")
			sc.leave("a1", "a2")
			sc.at(1 * s).takes("a3")
			sc.at(2 * s).takes("b1")
			sc.at(3 * s).takes("a4")
		}},
		"a ticket that is put back does not move its tenant's tag": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(sc *scene) {
			sc.joins("a1", "b1", "b2")
			sc.takes("a1").putBack("a1")
			sc.takes("a1").putBack("a1")
			sc.takes("a1")
			sc.at(1 * s).takes("b1").putBack("b1") // there is b2 beside it
			sc.takes("b1").putBack("b1").joins("a2")
			sc.takes("b1")
			sc.at(2 * s).takes("b2") // it came before a2
			sc.at(3 * s).takes("a2").asks(-1)
		}},
		"what is given back is not paid for": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(sc *scene) {
			sc.joins("a1", "a2", "a3", "b1", "b2")
			for _, ticket := range []string{"a1", "a2"} {
				limitertest.Must(sc.t, sc.takes(ticket).l.Line("p").Refund(sc.t.Context(), []throttle.TakenTicket{sc.took[ticket]}))
			}
			sc.takes("a3")
			sc.at(1 * s).takes("b1")
			sc.joins("a4")
			sc.at(2 * s).takes("b2")
			sc.at(3 * s).takes("a4").asks(-1)
		}},
		"Cancel gives to the next in line": {limitertest.Policy(two), func(sc *scene) {
			d := sc.granted("a1")
			sc.granted("a2")
			sc.waits("a3")
			sc.at(1 * s).takes()
			limitertest.Cancel(sc.t, sc.l, d.Reservation)
			sc.takes("a3").takes().asks(-1)
		}},
		"in front": {limitertest.Policy(own), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4")
			sc.front = true
			sc.denied("a5", 10*s)
			sc.front = false
			sc.at(10*s).takes("a5", "a3")
		}},
		"in front of its own tenant only": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(sc *scene) {
			sc.granted("c1")
			sc.waits("a1", "b1", "b2")
			sc.front = true
			sc.waits("b3")
			sc.front = false
			for i, ticket := range []string{"b3", "a1", "b1", "b2"} {
				sc.at(steps(i+1) * s).takes(ticket)
			}
		}},
		"an exempt tenant does not wait": {limitertest.Policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3")
			p := limitertest.Policy(two)
			p.Tenants = map[string]throttle.Tenant{"a": {Exempt: true}, "x": {Exempt: true}}
			sc.set(p)
			if d := sc.granted("x1"); d.Windows[0].Used != 3 {
				sc.t.Errorf("%d used", d.Windows[0].Used)
			}
			sc.granted("a3") // its place is given back
			sc.takes().asks(-1)
		}},
		"behind a large one": {limitertest.Policy(limitertest.SharedWindow(10, 10*s)), func(sc *scene) {
			sc.granted("a1", "a2", "a3")
			sc.cost = 9
			sc.waits("b1")
			sc.cost = 1
			if d := limitertest.Reserve(sc.t, sc.l, sc.without("x")); d.Granted || d.RetryIn < 10*s {
				sc.t.Errorf("granted %v, denied for %v", d.Granted, d.RetryIn)
			}
			sc.waits("c1")
			sc.takes().at(10*s).takes("b1", "c1")
		}},
		"a large one is not starved by those of another window": {limited("a", 1, limitertest.SharedWindow(4, 10*s), throttle.Window{Name: "own", Limit: 4, Period: 10 * s}), func(sc *scene) {
			sc.granted("a1")
			sc.at(1 * s).granted("b1")
			sc.at(2 * s).granted("b2")
			sc.cost = 3
			sc.denied("x1", 9*s)
			sc.cost = 1
			sc.waits("a2")        // in its own window
			sc.at(10 * s).takes() // there is room for a2, but x1 was here first
			sc.at(11 * s).takes("x1")
			sc.waits("y1")
			sc.at(12 * s).takes("a2")
			sc.at(21 * s).takes("y1")
		}},
		"over its own limit nobody holds up others": {limitertest.Policy(own, limitertest.SharedWindow(9, 10*s)), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.denied("a3", 10*s)
			sc.granted("b1")
			sc.joins("b2", "b3", "c1")
			sc.takes("b2", "c1")
			sc.at(10*s).takes("a3", "b3")
		}},
		"of two tenants the one with other limits": {limited("b", 4, own, limitertest.SharedWindow(9, s)), func(sc *scene) {
			sc.granted("a1", "a2", "b1", "b2", "b3", "b4")
			sc.denied("a3", 10*s)
			sc.denied("b5", 10*s)
			sc.waits("b6", "b7", "b8", "b9", "a4", "a5")
			sc.at(10*s).takes("a3", "b5", "b6", "a4", "b7", "b8") // b6 came before a4
			sc.at(20*s).takes("a5", "b9").asks(-1)
		}},
		"a ticket that waits for a slot lets others pass, while there is room for it": {limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: 10 * s}), func(sc *scene) {
			sc.cost = 2
			sc.joins("a1")
			sc.cost = 1
			sc.granted("a2", "b1")
			sc.granted("a3") // now there is none
			sc.waits("a4")
			sc.granted("b2")
			sc.takes().at(10*s).takes("a1", "a4").asks(-1)
		}},
		"a tenant may be empty where nothing is counted by it": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(sc *scene) {
			r := throttle.Request{Policy: "p", Ticket: limitertest.Ticket("1")}
			limitertest.Reserve(sc.t, sc.l, r)
			r.Ticket = limitertest.Ticket("2")
			limitertest.Reserve(sc.t, sc.l, r)
			sc.at(s).takes("2").asks(-1)
		}},
		"a ticket that joins again keeps its place": {limitertest.Policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4", "a5")
			sc.denied("a3", 10*s)
			if p := sc.joins("a4"); !p.AlreadyQueued || p.Expected != 10*s {
				sc.t.Errorf("%+v", p)
			}
			sc.at(10*s).denied("a5", 10*s) // it is not its turn
			sc.denied("a4", 0)
			sc.takes("a3", "a4")
		}},
		"a ticket that joins again for another tenant leaves its place": {limitertest.Policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4", "a5")
			moved := sc.of("a3")
			moved.Tenant = "b"
			places, err := sc.l.Line("p").Join(sc.t.Context(), []throttle.Request{moved})
			if err != nil || places[0].Err != nil || places[0].AlreadyQueued {
				sc.t.Fatalf("%+v, %v", places, err)
			}
			sc.at(10*s).takes("a4", "a3")
		}},
		"a ticket that reserves at its turn is granted": {limitertest.Policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3")
			sc.at(10 * s).granted("a3")
			sc.takes().asks(-1)
			sc.granted("a4")
		}},
		"a scope is added while they wait": {limitertest.Policy(two, own), func(sc *scene) {
			sc.with = map[string]string{"user": "bob"}
			sc.granted("a1", "a2")
			sc.waits("a3", "a4", "b1")
			sc.set(limitertest.Policy(two, own, throttle.Window{Name: "user", Limit: 1, Period: 10 * s, Scope: throttle.Per("tenant", "user")}))
			sc.waits("a3") // joins again
			sc.at(10*s).takes("a4", "b1", "a3").asks(-1)
			if sc.took["a4"].Decision.Granted || sc.took["b1"].Decision.Granted || !sc.took["a3"].Decision.Granted {
				sc.t.Error("granted is what all windows count, and nothing else")
			}
		}},
		"a scope is taken away while they wait": {limitertest.Policy(two, throttle.Window{Name: "region", Limit: 1, Period: h, Scope: throttle.Per("region")}, own), func(sc *scene) {
			sc.with = map[string]string{"region": "north"}
			sc.granted("a1")
			sc.waits("a2", "a3", "b1")
			sc.takes()
			sc.set(limitertest.Policy(two, own))
			sc.at(s).takes("a2")
			sc.at(10 * s).takes("b1")
			sc.at(11 * s).takes("a3").asks(-1)
		}},
	})
}
