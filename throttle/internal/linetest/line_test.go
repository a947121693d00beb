package linetest

import (
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestALineIsServedInItsOrder(t *testing.T) {
	t.Parallel()
	two := limitertest.SharedWindow(2, 10*s)
	tenantWindow := throttle.Window{Name: "own", Limit: 2, Period: 10 * s}
	limited := func(tenant string, limit int64, windows ...throttle.Window) throttle.Policy {
		p := limitertest.Policy(windows...)
		p.Tenants = map[string]throttle.Tenant{tenant: {Windows: map[string]throttle.Override{"own": {Limit: limit}}}}
		return p
	}
	tell(t, map[string]lineCase{
		"the walk through time of docs/explanation/line.md": {limitertest.Policy(two), func(st *story) {
			st.expects("a1", 0)
			st.expects("a2", 0)
			st.expects("a3", 10*s)
			st.takes("a1", "a2")
			st.at(2*s).expects("a4", 8*s)
			st.at(3*s).expects("b1", 7*s)
			st.at(10*s - us).takes().asks(us)
			st.at(10*s).takes("b1", "a3").asks(s)
			st.at(20*s - us).takes().asks(us)
			st.at(20 * s).takes("a4").asks(-1)
		}},
		"no newcomer passes those that wait": {limitertest.Policy(two), func(st *story) {
			st.granted("a1", "a2")
			st.at(1 * s).waits("a3")
			st.at(10*s).denied("b1", 0) // there is room for two
			d := limitertest.Reserve(st, st.l, st.without("c"))
			expect.That(st, !d.Granted && d.RetryIn != 0, "one without a ticket", d)
			st.takes("a3", "b1")
		}},
		"of one tenant the first comes first": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(st *story) {
			st.joins("a1", "a2", "a3")
			for i, ticket := range []string{"a1", "a2", "a3"} {
				st.at(10 * s * steps(i)).takes(ticket)
			}
		}},
		"Peek says what is expected": {limitertest.Policy(two), func(st *story) {
			st.granted("a1", "a2")
			st.denied("a3", 10*s)
			st.denied("a4", 10*s)
			st.denied("a5", 20*s)
			st.at(4*s).denied("a5", 16*s)
			before := lineText(st, st.client)
			limitertest.WantDenied(st, limitertest.Peek(st, st.l, st.without("b")), 16*s) // behind all who wait
			expect.Equal(st, lineText(st, st.client), before)
		}},
		"Leave gives the place to the next": {limitertest.Policy(two), func(st *story) {
			st.granted("a1", "a2")
			st.waits("a3", "a4", "b1")
			st.leave("a3").leave("nobody")
			st.at(10*s).takes("a4", "b1").asks(-1)
		}},
		"a ticket that left does not move its tenant's tag": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(st *story) {
			st.granted("b0")
			st.waits("a1", "a2", "a3", "a4", "b1", "b2")
			st.leave("a1", "a2")
			st.at(1 * s).takes("a3")
			st.at(2 * s).takes("b1")
			st.at(3 * s).takes("a4")
		}},
		"a ticket that is put back does not move its tenant's tag": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(st *story) {
			st.joins("a1", "b1", "b2")
			st.takes("a1").putBack("a1")
			st.takes("a1").putBack("a1")
			st.takes("a1")
			st.at(1 * s).takes("b1").putBack("b1") // there is b2 beside it
			st.takes("b1").putBack("b1").joins("a2")
			st.takes("b1")
			st.at(2 * s).takes("b2") // it came before a2
			st.at(3 * s).takes("a2").asks(-1)
		}},
		"what is given back is not paid for": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(st *story) {
			st.joins("a1", "a2", "a3", "b1", "b2")
			for _, ticket := range []string{"a1", "a2"} {
				expect.Must(st, st.takes(ticket).l.Line("p").Refund(st.Context(), []throttle.TakenTicket{st.took[ticket]}))
			}
			st.takes("a3")
			st.at(1 * s).takes("b1")
			st.joins("a4")
			st.at(2 * s).takes("b2")
			st.at(3 * s).takes("a4").asks(-1)
		}},
		"Cancel gives to the next in line": {limitertest.Policy(two), func(st *story) {
			d := st.granted("a1")
			st.granted("a2")
			st.waits("a3")
			st.at(1 * s).takes()
			limitertest.Cancel(st, st.l, d.Reservation)
			st.takes("a3").takes().asks(-1)
		}},
		"in front": {limitertest.Policy(tenantWindow), func(st *story) {
			st.granted("a1", "a2")
			st.waits("a3", "a4")
			st.front = true
			st.denied("a5", 10*s)
			st.denied("a6", 10*s)
			st.denied("a7", 20*s)
			st.front = false
			st.at(10*s).takes("a5", "a6")
			st.at(20*s).takes("a7", "a3")
		}},
		"in front of its own tenant only": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(st *story) {
			st.granted("c1")
			st.waits("a1", "b1", "b2")
			st.front = true
			st.waits("b3")
			st.front = false
			for i, ticket := range []string{"b3", "a1", "b1", "b2"} {
				st.at(steps(i+1) * s).takes(ticket)
			}
		}},
		"an exempt tenant does not wait": {limitertest.Policy(two), func(st *story) {
			st.granted("a1", "a2")
			st.waits("a3")
			p := limitertest.Policy(two)
			p.Tenants = map[string]throttle.Tenant{"a": {Exempt: true}, "x": {Exempt: true}}
			st.set(p)
			expect.Equal(st, st.granted("x1").Windows[0].Used, 3)
			st.granted("a3") // its units are given back
			st.takes().asks(-1)
		}},
		"behind a large one": {limitertest.Policy(limitertest.SharedWindow(10, 10*s)), func(st *story) {
			st.granted("a1", "a2", "a3")
			st.costs(9).waits("b1")
			st.cost = 1
			d := limitertest.Reserve(st, st.l, st.without("x"))
			expect.That(st, !d.Granted && d.RetryIn >= 10*s, "granted", d.Granted, "denied for", d.RetryIn)
			st.waits("c1")
			st.takes().at(10*s).takes("b1", "c1")
		}},
		"a large one is not starved by those of another window": {limited("a", 1, limitertest.SharedWindow(4, 10*s), throttle.Window{Name: "own", Limit: 4, Period: 10 * s}), func(st *story) {
			st.granted("a1")
			st.at(1 * s).granted("b1")
			st.at(2 * s).granted("b2")
			st.costs(3).denied("x1", 9*s)
			st.costs(1).waits("a2") // in its own window
			st.at(10 * s).takes()   // there is room for a2, but x1 was here first
			st.at(11 * s).takes("x1")
			st.waits("y1")
			st.at(12 * s).takes("a2")
			st.at(21 * s).takes("y1")
		}},
		"over its own limit nobody holds up others": {limitertest.Policy(tenantWindow, limitertest.SharedWindow(9, 10*s)), func(st *story) {
			st.granted("a1", "a2")
			st.denied("a3", 10*s)
			st.granted("b1")
			st.joins("b2", "b3", "c1")
			st.takes("b2", "c1")
			st.at(10*s).takes("a3", "b3")
		}},
		"of two tenants the one with other limits": {limited("b", 4, tenantWindow, limitertest.SharedWindow(9, s)), func(st *story) {
			st.granted("a1", "a2", "b1", "b2", "b3", "b4")
			st.denied("a3", 10*s)
			st.denied("b5", 10*s)
			st.waits("b6", "b7", "b8", "b9", "a4", "a5")
			st.at(10*s).takes("a3", "b5", "b6", "a4", "b7", "b8") // b6 came before a4
			st.at(20*s).takes("a5", "b9").asks(-1)
		}},
		"a ticket that waits for a slot lets others pass, while there is room for it": {limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: 10 * s}), func(st *story) {
			st.costs(2).joins("a1")
			st.costs(1).granted("a2", "b1")
			st.granted("a3") // now there is none
			st.waits("a4")
			st.granted("b2")
			st.takes().at(10*s).takes("a1", "a4").asks(-1)
		}},
		"a tenant may be empty where nothing is counted by it": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(st *story) {
			r := throttle.Request{Policy: "p", Ticket: limitertest.Ticket("1")}
			limitertest.Reserve(st, st.l, r)
			r.Ticket = limitertest.Ticket("2")
			limitertest.Reserve(st, st.l, r)
			st.at(s).takes("2").asks(-1)
		}},
		"a ticket that joins again keeps its place": {limitertest.Policy(two), func(st *story) {
			st.granted("a1", "a2")
			st.waits("a3", "a4", "a5")
			st.denied("a3", 10*s)
			p := st.joins("a4")
			expect.That(st, p.AlreadyQueued && p.RetryIn == 10*s, p)
			again := st.request("a4")
			again.Key = "another"          // task of the same ID
			st.at(10*s).denied("a5", 10*s) // it is not its turn
			limitertest.Reserve(st, st.l, again)
			st.takes("a3", "a4")
			expect.Equal(st, st.taken("a4")[0].Key, "another")
		}},
		"a ticket that joins again for another tenant leaves its place": {limitertest.Policy(two), func(st *story) {
			st.granted("a1", "a2")
			st.waits("a3", "a4", "a5")
			moved := st.request("a3")
			moved.Tenant = "b"
			decisions, err := st.line().Join(st.Context(), []throttle.Request{moved})
			expect.Require(st, err == nil && decisions[0].Err == nil && !decisions[0].AlreadyQueued, decisions, err)
			st.at(10*s).takes("a4", "a3")
		}},
		"a ticket that reserves at its turn is granted": {limitertest.Policy(two), func(st *story) {
			st.granted("a1", "a2")
			st.waits("a3")
			st.at(10 * s).granted("a3")
			st.takes().asks(-1)
			st.granted("a4")
		}},
		"a scope is added while they wait": {limitertest.Policy(two, tenantWindow), func(st *story) {
			st.attributes = map[string]string{"user": "bob"}
			st.granted("a1", "a2")
			st.waits("a3", "a4", "b1")
			st.set(limitertest.Policy(two, tenantWindow, throttle.Window{Name: "user", Limit: 1, Period: 10 * s, Per: []string{"tenant", "user"}}))
			st.waits("a3") // joins again
			st.at(10*s).takes("a4", "b1", "a3").asks(-1)
			expect.That(st, !st.took["a4"].Decision.Granted && !st.took["b1"].Decision.Granted &&
				st.took["a3"].Decision.Granted, "granted is what all windows count, and nothing else")
		}},
		"a scope is taken away while they wait": {limitertest.Policy(two, throttle.Window{Name: "region", Limit: 1, Period: h, Per: []string{"region"}}, tenantWindow), func(st *story) {
			st.attributes = map[string]string{"region": "north"}
			st.granted("a1")
			st.waits("a2", "a3", "b1")
			st.takes()
			st.set(limitertest.Policy(two, tenantWindow))
			st.at(s).takes("a2")
			st.at(10 * s).takes("b1")
			st.at(11 * s).takes("a3").asks(-1)
		}},
	})
}
