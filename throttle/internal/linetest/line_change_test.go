package linetest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// owning is a policy by which the tenant a has a limit of its own.
func owning(limit int64, windows ...throttle.Window) throttle.Policy {
	p := limitertest.Policy(append([]throttle.Window{{Name: "own", Limit: 9, Period: 10 * s}}, windows...)...)
	p.Tenants = map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: limit}}}}
	return p
}

// Changes, and losses, while tickets wait.
func TestChangesOfAStandingLine(t *testing.T) {
	t.Parallel()
	passing := limitertest.Policy(
		throttle.Window{Name: "region", Limit: 1, Period: 10 * s, Per: []string{"region"}},
		throttle.Window{Name: "own", Limit: 2, Period: 30 * s, Unit: "tokens"},
		limitertest.SharedWindow(1, 15*s),
	)
	tenantWindow := throttle.Window{Name: "own", Limit: 4, Period: 10 * s}
	tell(t, map[string]lineCase{
		"a limit is cut below what the first one costs": {limitertest.Policy(limitertest.SharedWindow(4, 10*s)), func(st *story) {
			st.granted("b0", "b1")
			st.costs(3).joins("a1", "a2", "c1")
			st.costs(1).joins("a3", "b2")
			st.at(s).takes()
			st.set(limitertest.Policy(limitertest.SharedWindow(2, 10*s)))
			st.at(2*s).takes("a1", "a2", "c1")
			st.neverFits("a1", "a2", "c1")
			limitertest.WantUsed(st, st.l, st.without("x"), 2)
			st.at(3 * s).takes() // once
			st.at(10*s).takes("a3", "b2").asks(-1)
		}},
		"a tenant's limit is cut below what it costs": {owning(4), func(st *story) {
			st.costs(3).joins("a0", "a1", "a2")
			st.costs(1).joins("a3")
			st.takes("a0")
			st.set(owning(2))
			st.refresh()
			st.at(s).takes("a1", "a2")
			st.neverFits("a1", "a2")
			st.at(10 * s).takes("a3").asks(-1)
		}},
		"a limit is cut below what waits for a narrower one": {limitertest.Policy(tenantWindow, limitertest.SharedWindow(8, 10*s)), func(st *story) {
			st.costs(3).granted("a0")
			st.joins("a1")
			st.costs(1).joins("a2")
			st.set(limitertest.Policy(tenantWindow, limitertest.SharedWindow(2, 10*s)))
			st.at(2 * s).takes("a1")
			st.neverFits("a1")
			st.at(10 * s).takes("a2").asks(-1)
		}},
		"a limit is cut and raised again": {limitertest.Policy(limitertest.SharedWindow(4, 10*s)), func(st *story) {
			st.granted("a1", "a2")
			st.at(s).granted("a3", "a4")
			st.joins("b1", "b2", "b3", "b4")
			st.set(limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
			st.at(10 * s).takes()
			st.at(10500 * ms).set(limitertest.Policy(limitertest.SharedWindow(4, 10*s)))
			st.at(11*s).takes("b1", "b2", "b3", "b4")
		}},
		"a limit is raised": {limitertest.Policy(limitertest.SharedWindow(1, h)), func(st *story) {
			st.granted("a1")
			st.waits("a2", "a3", "b1")
			st.at(s).takes()
			st.set(limitertest.Policy(limitertest.SharedWindow(3, h)))
			expect.Equal(st, limitertest.Reserve(st, st.l, st.request("c1")).Granted, false)
			st.at(2*s).takes("a2", "b1").asks(s)
		}},
		"a client has yesterday's limit": {limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: h}), func(st *story) {
			st.granted("a1", "a2", "a3", "b1", "b2")
			st.waits("a4")
			st.takes()
			st.set(limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: h}))
			st.at(500 * ms).waits("b3")
			st.set(limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: h}))
			st.at(s).takes("b3")
			st.at(h).takes("a4").asks(-1)
		}},
		"a scope is another": {limitertest.Policy(throttle.Window{Name: "w", Limit: 1, Period: h, Per: []string{"region"}}), func(st *story) {
			st.attributes = map[string]string{"region": "north", "rack": "a"}
			st.granted("a1")
			st.waits("a2")
			st.takes()
			st.set(limitertest.Policy(throttle.Window{Name: "w", Limit: 1, Period: h, Per: []string{"rack"}}))
			st.at(s).takes("a2").asks(-1)
		}},
		"limits change twice within a second": {limitertest.Policy(limitertest.SharedWindow(1, h)), func(st *story) {
			st.granted("a1")
			st.waits("a2", "a3")
			st.takes()
			st.at(500 * ms).set(limitertest.Policy(limitertest.SharedWindow(2, h)))
			st.at(s).takes("a2").asks(s)
			st.set(limitertest.Policy(limitertest.SharedWindow(3, h)))
			st.at(2 * s).takes("a3")
		}},
		"limits change, and change back within a second": {limitertest.Policy(limitertest.SharedWindow(1, h)), func(st *story) {
			st.granted("a1")
			st.waits("a2", "a3")
			st.set(limitertest.Policy(limitertest.SharedWindow(2, h)))
			st.at(s).takes("a2")
			st.set(limitertest.Policy(limitertest.SharedWindow(1, h)))
			st.refunds("a2").takes()
			st.set(limitertest.Policy(limitertest.SharedWindow(2, h)))
			st.at(2 * s).takes("a3").asks(-1)
		}},
		"a tenant's limit is raised": {owning(1, limitertest.SharedWindow(100, s)), func(st *story) {
			st.joins("a1", "a2", "a3", "a4")
			st.takes("a1")
			st.set(owning(3, limitertest.SharedWindow(100, s)))
			st.refresh()
			st.at(s).takes("a2", "a3")
			st.at(10 * s).takes("a4")
		}},
		"weights change": {limitertest.Policy(limitertest.SharedWindow(4, s)), func(st *story) {
			st.joinMany("q", "a", 40)
			st.joinMany("q", "b", 40)
			st.inShares(st.shares(24, 4, "q"), map[string]float64{"a": 1, "b": 1}, 1)
			p := limitertest.Policy(limitertest.SharedWindow(4, s))
			p.Tenants = map[string]throttle.Tenant{"b": {Weight: 3}}
			st.set(p)
			st.refresh()
			st.shares(4, 4, "q")
			st.inShares(st.shares(24, 4, "q"), map[string]float64{"a": 1, "b": 3}, 1)
		}},
		"a client has yesterday's weight": {weighted(map[string]float64{"b": 3}, limitertest.SharedWindow(4, s)), func(st *story) {
			st.refresh() // else a take does it
			st.joinMany("q", "a", 40)
			st.joinMany("q", "b", 40)
			client := limitertest.NewByClock(st, st.client, st.c, limitertest.Policy(limitertest.SharedWindow(4, s)))
			limitertest.Join(st, client, st.request("b"))
			st.inShares(st.shares(40, 4, "q"), map[string]float64{"a": 1, "b": 3}, 1)
		}},
		"another calendar resets sooner": {limitertest.Policy(limitertest.Quota(1, "0 0 1 * *", "")), func(st *story) {
			st.granted("a1")
			st.waits("a2")
			st.at(70 * m).takes()
			st.set(limitertest.Policy(limitertest.Quota(1, "0 * * * *", "")))
			st.at(70*m + s).takes("a2") // it has reset since
		}},
		"the upstream has more left": {limitertest.Policy(limitertest.SharedWindow(10, 10*s)), func(st *story) {
			first := st.granted("a1")
			st.at(1 * ms)
			second := st.granted("a2")
			st.remaining(first.Reservation, 0, m)
			st.waits("a3")
			st.takes()
			st.at(2*ms).remaining(second.Reservation, 5, m)
			st.takes("a3")
		}},
		"a slot is given back": {limitertest.Policy(limitertest.Slots(2)), func(st *story) {
			st.joins("a1", "a2", "a3", "a4")
			st.takes("a1", "a2")
			expect.Must(st, st.took["a1"].Decision.Reservation.Release(st.Context()))
			st.takes("a3")
			st.at(30 * s).takes("a4").asks(-1) // the lease of a2 is over
		}},
		"the clock is set back": {limitertest.Policy(limitertest.SharedWindow(2, 10*s)), func(st *story) {
			st.at(m).granted("a1", "a2")
			st.waits("a3", "a4", "a5")
			st.takes()
			st.at(10 * s).takes() // nothing reopens
			st.joins("b1")
			st.at(m + 10*s - us).takes()
			st.at(m+10*s).takes("a3", "b1")
			st.at(m+20*s).takes("a4", "a5").asks(-1)
		}},
		"the clock is set back by a year": {limitertest.Policy(limitertest.SharedWindow(2, 10*s)), func(st *story) {
			st.at(365*24*h).joins("a1", "a2")
			st.at(0).takes("a1", "a2").joins("b1")
			st.at(s).takes().at(10 * s).takes("b1").asks(-1)
		}},
		"limits change after the clock was set back": {limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: h}), func(st *story) {
			st.at(24*h).joins("a1", "a2", "a3")
			st.set(limitertest.Policy(throttle.Window{Name: "own", Limit: 2, Period: h}))
			st.takes("a1", "a2").at(0).joins("b1", "b2", "b3")
			st.takes("b1", "b2").set(limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: h}))
			st.at(2*s).takes("a3", "b3").asks(-1)
		}},
		"a line that stands for days": {limitertest.Policy(
			throttle.Window{Name: "own", Algorithm: throttle.AlgorithmGCRA, Limit: 1, Period: 30 * h},
			limitertest.SharedWindow(1, h),
		), func(st *story) {
			st.edit(limitertest.WithoutShortExpiry, st.l.Policies()...)
			st.joins("a1", "a2")
			for tenant := 'A'; tenant <= 'Z'; tenant++ { // no key but that of the root changes before their turn
				st.joins(fmt.Sprintf("%c1", tenant))
			}
			for hour := range 31 {
				for name := range limitertest.ReadLine(st, st.client).Keys { // an hour less to live
					key := "sluice:{p}:" + name
					if ttl := st.client.TTL(st.Context(), key).Val(); ttl <= h {
						st.Fatalf("after %d hours %s is gone", hour, name)
					} else {
						st.client.Expire(st.Context(), key, ttl-h)
					}
				}
				taken := st.at(steps(hour) * h).take(1)
				expect.Equal(st, len(taken), map[bool]int{true: 1}[hour < 27 || hour == 30], "taken after", hour, "hours")
			}
			st.asks(-1)
		}},
		"a line is taken from, and nothing joins": {limitertest.Policy(limitertest.SharedWindow(1, h)), func(st *story) {
			st.edit(limitertest.WithoutShortExpiry, st.l.Policies()...)
			st.joins("a1", "a2", "a3")
			for name := range limitertest.ReadLine(st, st.client).Keys {
				st.client.Expire(st.Context(), "sluice:{p}:"+name, h)
			}
			st.takes("a1")
			for name := range limitertest.ReadLine(st, st.client).Keys {
				ttl := st.client.TTL(st.Context(), "sluice:{p}:"+name).Val()
				expect.That(st, ttl > 24*h, name, "changed, and lives for", ttl)
			}
		}},
		"a process is lost with what it took": {limitertest.Policy(limitertest.SharedWindow(2, s)), func(st *story) {
			st.joins("a1", "a2", "a3")
			st.server().takes("a1", "a2")
			st.at(s).takes("a3").asks(-1)
			st.at(4 * s).joins("a4") // behind them, also in a line that was empty
			st.at(5*s - us).takes("a4")
			st.joins("a5")
			st.at(5 * s).takes("a1")
			st.at(6*s).takes("a2", "a5").asks(-1)
		}},
		"a process is lost with what never fits": {owning(2), func(st *story) {
			st.costs(2).joins("a1")
			st.costs(1).joins("a2")
			st.set(owning(1))
			st.refresh()
			lost := st.server()
			lost.take(1)
			lost.neverFits("a1")
			st.at(5*s).takes("a1", "a2").asks(-1)
			st.neverFits("a1")
		}},
		// a1 has passed its region when it leaves, or has no room elsewhere. What was kept for it is b1's.
		"a ticket passed a node and left": {passing, func(st *story) {
			st.attributes = map[string]string{"region": "north"}
			st.tokens = 1
			st.joins("n1", "a1", "b1")
			st.takes("n1").at(10 * s).takes()
			st.leave("a1")
			st.at(15 * s).takes("b1").asks(-1)
		}},
		"a ticket passed a node and never fits": {passing, func(st *story) {
			st.refresh() // else a take does it, for all tenants
			st.attributes = map[string]string{"region": "north"}
			st.tokens = 1
			st.joins("n1")
			st.tokens = 2
			st.joins("a1")
			st.tokens = 1
			st.joins("b1")
			st.takes("n1").at(10 * s).takes()
			before := limitertest.ReadLine(st, st.client).Hashes["f"]
			st.l.SetInterventions(throttle.Interventions{At: limitertest.At(10 * s), Overrides: []throttle.TenantOverride{
				{Policy: "p", Tenant: "a", Until: limitertest.At(h), Windows: map[string]throttle.Override{"own": {Limit: 1}}},
			}})
			limitertest.Until(st, "the cut is in the line", func() bool {
				return !maps.Equal(before, limitertest.ReadLine(st, st.client).Hashes["f"])
			})
			st.at(15 * s).takes("a1").takes("b1").asks(-1)
			st.neverFits("a1")
		}},
		"a ticket passed a node and has no room elsewhere": {passing, func(st *story) {
			st.refresh()
			st.attributes = map[string]string{"region": "north"}
			st.tokens = 1
			st.joins("n1", "a1", "b1")
			st.takes("n1").at(10 * s).takes()
			exempting, other, r := passing, st.server(), st.without("a")
			exempting.Tenants = map[string]throttle.Tenant{"a": {Exempt: true}}
			other.set(exempting)
			r.Cost = map[string]int64{"requests": 0, "tokens": 2}
			limitertest.Reserve(st, other.l, r)
			st.at(15 * s).takes().takes("b1")
			st.at(40 * s).takes("a1").asks(-1)
		}},
	})
}

// Redis loses a line, its windows or both, by a restart without persistence or by hand. All waiting
// tickets are taken all the same, from the line or after forward has let them join again. No limit
// is exceeded by what is still counted, and nothing is left behind.
func TestWhatIsGivenBackAfterAChangeIsNotThatOfOthers(t *testing.T) {
	fast := throttle.Window{Name: "own", Algorithm: throttle.AlgorithmGCRA, Limit: 100, Period: s}
	slow := throttle.Window{Name: "own", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Period: h}
	fixed := throttle.Window{Name: "own", Algorithm: throttle.AlgorithmFixed, Limit: 10, Period: m}
	changed := func(give func(st *story)) lineCase {
		return lineCase{limitertest.Policy(fast), func(st *story) {
			st.joins("a1")
			st.takes("a1").set(limitertest.Policy(slow))
			st.costs(9).granted("a2")
			give(st.at(200 * ms))
			st.used(10).leave("a1")
		}}
	}
	tell(t, map[string]lineCase{
		"put back": changed(func(st *story) { st.putBack("a1") }),
		"refunded": changed(func(st *story) { st.refunds("a1") }),
		"reserved again": changed(func(st *story) {
			expect.Must(st, expect.ErrOf(st.line().ReserveAgain(st.Context(), st.took["a1"], st.request("a1"))))
		}),
		"by another margin": {limitertest.Policy(fixed), func(st *story) {
			first := st.at(59 * s).costs(10).granted("a1")
			wider := fixed
			wider.Margin = 5 * s
			st.set(limitertest.Policy(wider))
			st.at(66 * s).granted("a2")
			limitertest.Cancel(st, st.l, first.Reservation)
			st.used(10)
		}},
		"a removed policy, whose line was empty, is asked again": {limitertest.Policy(fast), func(st *story) {
			st.joins("a1")
			st.takes("a1")
			expect.Must(st, st.l.SetPolicies(nil))
			st.takes().asks(-1)
			limitertest.Until(st, "the empty line has been left", func() bool { return len(st.l.Lines()) == 0 })
			st.putBack("a1")
			expect.Equal(st, st.l.Lines(), []string{"p"})
			st.takes("a1").asks(-1)
		}},
		"a tenant's own limit is not read by another algorithm": {limitertest.Policy(slow), func(st *story) {
			p := limitertest.Policy(fixed)
			p.Tenants = map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: 2}}}}
			st.set(p)
			st.joins("a1", "a2", "a3", "a4")
			p.Windows = []throttle.Window{{Name: "own", Limit: 1, Period: h}}
			st.set(p)
			st.takes("a1")
		}},
	})
}

func TestKeysOfALineVanish(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 2, Period: 7 * s}, limitertest.SharedWindow(3, 10*s))
	client := limitertest.RedisClient(t)
	for seed := range uint64(9) {
		random := rand.New(rand.NewPCG(seed, 7))
		st := newStory(t, client, p)
		logs := map[string][]limitertest.LoggedGrant{}
		note := func(d throttle.Decision) {
			for i, w := range d.Windows {
				name := fmt.Sprint(i, w.Scope)
				logs[name] = append(logs[name], limitertest.LoggedGrant{At: d.At.UnixMicro(), Units: 1})
			}
		}
		var waiting []string
		for i := range 15 {
			ticket := fmt.Sprint(string("abc"[random.IntN(3)]), i)
			if d := limitertest.Reserve(t, st.at(steps(i)*400*ms).l, st.request(ticket)); d.Granted {
				note(d)
			} else {
				waiting = append(waiting, ticket)
			}
		}
		lost := []string{"everything", "the line", "some windows"}[seed%3]
		for _, key := range client.Keys(t.Context(), "*").Val() {
			window, coin := strings.HasPrefix(key, "sluice:{p}:w:"), random.IntN(2) == 0
			if lost == "everything" || lost == "the line" && !window || lost == "some windows" && window && coin {
				client.Del(t.Context(), key)
			}
		}
		if lost != "the line" {
			clear(logs) // what was counted before is forgotten
		}
		for now := 6 * s; len(waiting) > 0; now += s {
			expect.Require(t, now <= 10*m, "seed", seed, "without", lost, waiting, "wait")
			if st.at(now); now%m == 0 { // forward
				st.joins(waiting...)
			}
			for _, ticket := range st.take(throttle.MaxTake) {
				i := slices.Index(waiting, ticket.ID)
				expect.Require(t, i >= 0, "seed", seed, "without", lost, ticket.ID, "was taken twice")
				waiting = slices.Delete(waiting, i, i+1)
				note(ticket.Decision)
			}
		}
		for name, log := range logs {
			over := limitertest.MostOver(p.Windows[name[0]-'0'], log)
			expect.Equal(t, max(0, over), 0, seed, "without", lost, "over of", name)
		}
		st.at(20 * m).take(1)
		for _, key := range client.Keys(t.Context(), "*").Val() {
			expect.Equal(t, client.Type(t.Context(), key).Val(), "string", seed, "without", lost, key, "is left")
		}
	}
}
