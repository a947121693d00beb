package linetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestLiveTicketsGoBeforeBatches(t *testing.T) {
	t.Parallel()
	two := limitertest.SharedWindow(2, 100*s) // too long a period for a pace
	sharedWindow10 := limitertest.Policy(limitertest.SharedWindow(10, 10*s))
	tenantWindow := throttle.Window{Name: "own", Limit: 1, Period: 100 * s}
	halves := limitertest.Policy(throttle.Window{Name: "own", Limit: 4, Period: 10 * s})
	halves.BatchShare = 0.5
	spread := limitertest.Policy(throttle.Window{Name: "own", Limit: 10, Period: 10 * s}, limitertest.SharedWindow(1000, s))
	tell(t, map[string]lineCase{
		"of all tenants, whenever they come": {limitertest.Policy(two), func(st *story) {
			st.batch().joins("a1", "a2", "b1", "b2")
			st.takes("a1", "b1")
			st.at(50*s).live().joins("a5", "c5", "c6")
			st.at(100*s).takes("a5", "c5").asks(s)
			st.at(200*s).takes("c6", "a2").asks(s)
			st.at(300 * s).takes("b2").asks(-1)
		}},
		"a batch waits where a live ticket has no room": {limitertest.Policy(two), func(st *story) {
			st.granted("a0")
			st.costs(2).joins("a1")
			st.costs(1).batch().joins("b1")
			st.takes().asks(s)
			st.at(100 * s).takes("a1")
			st.at(200 * s).takes("b1").asks(-1)
		}},
		"of one tenant at its own window, and others are not delayed": {limitertest.Policy(tenantWindow, limitertest.SharedWindow(5, s)), func(st *story) {
			st.granted("a0")
			st.batch().joins("a1", "b1")
			st.live().joins("a2")
			st.takes("b1")
			st.at(100 * s).takes("a2")
			st.at(200 * s).takes("a1").asks(-1)
		}},
		"a live newcomer passes a batch, one of a batch nobody": {limitertest.Policy(two), func(st *story) {
			st.granted("a1")
			st.costs(2).batch().joins("b1")
			st.costs(1).batch().waits("c1")
			st.live().granted("c2")
			st.leave("b1", "c1")
			st.at(100 * s).live().joins("d1")
			st.batch().waits("c3")
			st.at(100*s).takes("d1", "c3").asks(-1)
		}},
		"of claims and other queues too": {limitertest.Policy(two), func(st *story) {
			st.granted("a1", "a2")
			st.batch().joins("b1", "b2")
			r := st.live().request("c1")
			r.Ticket.Queue = "r"
			limitertest.Join(st, st.l, r)
			st.at(100 * s)
			taken := limitertest.Take(st, st.l, throttle.MaxTake, "q", "r")
			expect.Require(st, len(taken.Tickets) == 2 && taken.Tickets[0].ID == "c1" &&
				taken.Tickets[1].ID == "b1", "took", taken.Tickets)
		}},
		"a ticket is put back in its class": {limitertest.Policy(two), func(st *story) {
			st.batch().joins("a1", "a2")
			st.takes("a1", "a2")
			got := st.took["a1"]
			expect.That(st, got.Decision.Reservation.Class == throttle.ClassBatch &&
				st.line().Matches(got, st.request("a1")) && !st.line().Matches(got, st.live().request("a1")),
				"taken is", got)
			st.putBack("a1", "a2")
			st.live().joins("b1")
			st.takes("b1", "a1").asks(s)
		}},
		"a ticket that joins in another class changes its flow": {limitertest.Policy(two), func(st *story) {
			st.granted("a0", "a9")
			st.batch().joins("a1", "a2")
			st.live().joins("b1", "a2")
			st.at(100*s).takes("b1", "a2").asks(s)
			st.at(200 * s).takes("a1").asks(-1)
		}},
		"a batch is spread over a short period, and live tickets are not": {sharedWindow10, func(st *story) {
			st.batch().joins("a1", "a2", "a3", "a4")
			st.takes("a1").asks(900 * ms)
			st.at(900 * ms).takes("a2").asks(s)
			st.at(1*s).live().joins("b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8")
			st.takes("b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8") // the window is full until 10 s
			st.at(2000 * ms).takes()
			st.at(10 * s).takes("a3").asks(900 * ms)
			st.at(10900 * ms).takes("a4").asks(-1)
		}},
		"a batch is spread at its tenant's window, though a live ticket was looked at there first": {spread, func(st *story) {
			st.costs(10).granted("b0")
			st.costs(1).joins("b1")
			st.batch().joins("a1", "a2")
			st.live().joins("a3")
			st.takes("a3", "a1").asks(900 * ms)
		}},
		"a live ticket whose turn is after a batch's does not wait for the batch's time": {halves, func(st *story) {
			st.batch().joins("a1", "a2")
			st.takes("a1").live().joins("a3")
			st.takes("a3").joins("a4")
			st.takes("a4").joins("a5")
			st.takes("a5").asks(s)
		}},
		"a batch that was alone goes behind live tickets": {limitertest.Policy(limitertest.SharedWindow(4, 100*s)), func(st *story) {
			st.joinIn("q", "b1")
			st.joinIn("r", "c1")
			st.from("q", "r").takes("b1", "c1").batch().joins("a1", "a2")
			st.from("q", "r").take(1)
			st.live().joins("b2")
			st.from("q", "r").takes("b2")
		}},
	})
}

// Where both wait, a batch gets its share: of a shared window, of a tenant's own and of slots,
// whatever its tickets cost. Where no live ticket waits it gets all.
func TestShareOfABatch(t *testing.T) {
	client := limitertest.RedisClient(t)
	for name, c := range map[string]struct {
		windows []throttle.Window
		cost    int64 // of a ticket of the batch
		most    int   // that one take asks for
	}{
		"shared window":       {[]throttle.Window{limitertest.SharedWindow(20, s)}, 1, 16},
		"one at a time":       {[]throttle.Window{{Name: "w", Limit: 1, Period: 100 * ms, Shared: true}}, 1, 16},
		"large tickets":       {[]throttle.Window{limitertest.SharedWindow(10, s)}, 7, 16},
		"a tenant's own":      {[]throttle.Window{{Name: "own", Limit: 10, Period: s}}, 1, 16},
		"both":                {[]throttle.Window{{Name: "own", Limit: 10, Period: s}, limitertest.SharedWindow(1000, s)}, 1, 16},
		"slots":               {[]throttle.Window{limitertest.SharedWindow(1_000_000, s)}, 1, 8},
		"slots, one by one":   {[]throttle.Window{{Name: "own", Limit: 1_000_000, Period: s}}, 1, 1},
		"fixed, and by tens":  {[]throttle.Window{{Name: "w", Algorithm: throttle.AlgorithmFixed, Limit: 100, Period: s, Shared: true}}, 10, 64},
		"gcra, evenly spaced": {[]throttle.Window{{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Burst: 7, Period: s, Shared: true}}, 7, 16},
	} {
		p := limitertest.Policy(c.windows...)
		p.BatchShare = 0.1
		st := newStory(t, client, p)
		st.joinMany("q", "live", 250)
		st.cost = c.cost
		st.batch().joinMany("q", "live-batch", 1) // another tenant: where only tenants count it has room
		for i := range 60 {
			r := st.request("live")
			r.Tenant, r.Ticket.ID = "live", fmt.Sprint("batch", i)
			limitertest.Join(t, st.l, r)
		}
		got := st.shares(240, c.most, "q")
		live, batch := got["live"], got["live, batch"]
		t.Logf("%s: %v", name, got)
		// A ticket of the batch goes when the batch is owed it, less what the ticket itself adds. The
		// other tenant's may have gone before. What live tickets add meanwhile is at most a take.
		owed := p.BatchShare*float64(live+batch) - float64(batch)
		most := (1-p.BatchShare)*float64(2*c.cost) + p.BatchShare*float64(c.most)
		expect.That(t, owed >= 0 && owed <= most, name, "the batch is owed", owed, "of", got, "want 0 to", most)
	}
}

// The share holds also where several tenants of each class wait, some for their own window.
func TestAGrantThatIsReplacedCountsOnceInTheShareOfABatch(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(2, s))
	p.BatchShare = 0.5
	st, batch := newStory(t, limitertest.RedisClient(t), p), 0
	for i := range 40 {
		st.live().joins(fmt.Sprint("a", i))
		st.batch().joins(fmt.Sprint("b", i))
	}
	for range 40 {
		for _, ticket := range st.take(1) {
			if ticket.Decision.Reservation.Class == throttle.ClassBatch {
				batch++
			}
			st.pass(200 * ms)
			d, err := st.line().ReserveAgain(t.Context(), ticket, ticket.Decision.Reservation.Request)
			expect.Require(t, err == nil && d.Granted, d, err)
		}
		st.pass(s)
	}
	expect.That(t, batch >= 19, "of 40 the batch got", batch)
}

func TestShareOfABatchOfManyTenants(t *testing.T) {
	client := limitertest.RedisClient(t)
	for _, c := range []struct {
		perTenant, shared int64
		nights            int // tenants of batches
	}{
		{2, 7, 4}, {4, 7, 4}, {1000, 7, 4},
		{50, 50, 1}, // all of the shared window goes at once, and the batch is spread over its own
	} {
		p := limitertest.Policy(throttle.Window{Name: "own", Limit: c.perTenant, Period: s}, limitertest.SharedWindow(c.shared, s))
		p.BatchShare = 0.2
		st := newStory(t, client, p)
		for i := range 4 {
			st.live().joinMany("q", fmt.Sprint("live", i), 200)
		}
		for i := range c.nights {
			st.batch().joinMany("q", fmt.Sprint("night", i), 100)
		}
		batches, all := int64(0), int64(350)
		for tenant, units := range st.shares(int(all), throttle.MaxTake, "q") {
			if strings.HasSuffix(tenant, ", batch") {
				batches += units
			}
		}
		owed := p.BatchShare*float64(all) - float64(batches)
		expect.That(t, owed >= -2 && owed <= 2, c, batches, all, "are of batches")
	}
}

// Expected starts count the other class as it is served, and each ticket starts between its bounds.
func TestExpectedStartsOfClasses(t *testing.T) {
	t.Parallel()
	limitertest.EachCase(t, etaPolicies, func(t *testing.T, client *redis.Client, windows []throttle.Window) {
		st := newStory(t, client, limitertest.Policy(windows...))
		st.attributes = map[string]string{"user": "bob"}
		alone := st.told("a00", "b00", "a01", "b01", "a02", "b02", "a03", "b03", "a04", "b04", "a05", "b05", "a06", "b06",
			"a07", "b07", "a08", "b08")
		var all []string
		for ticket := range alone {
			all = append(all, ticket)
		}
		st.leave(all...)
		limitertest.IsGone(t, client)
		st.batch().joins("a90", "a91", "a92", "a93", "b90", "b91", "c90")
		told := st.live().told("a00", "b00", "a01", "b01", "a02", "b02", "a03", "b03", "a04", "b04", "a05", "b05", "a06", "b06")
		for ticket, p := range st.batch().told("a94", "c91", "d90") {
			told[ticket] = p
		}
		for ticket, p := range told {
			// Batches get their share of what goes before, rounded up to one ticket, and one more.
			later := fmt.Sprintf("%s%d", ticket[:2], int(ticket[2]-'0')+2)
			without, live := alone[later]
			expect.That(t, !live || p.RetryIn <= without.Latest, ticket, "is told", p, "beside a batch, and", later, without, "without")
		}
		starts := st.starts()
		for ticket, p := range told {
			at := starts[ticket]
			expect.That(t, at <= p.Latest, ticket, "starts at", at, "and was told", p.RetryIn, "to", p.Latest)
		}
		shared := slices.ContainsFunc(windows, func(w throttle.Window) bool { return w.Shared })
		expect.That(t, told["a94"].RetryIn >= told["a06"].RetryIn && (!shared || told["d90"].RetryIn >= told["b06"].RetryIn),
			"batches are told", told["a94"], told["d90"], "live tickets before them", told["a06"], told["b06"])
	})
}

// A batch in a queue of another server waits for live tickets that are about to be taken, and gets
// its share of what they take. Live tickets of a server that does not ask hold it up no more.
func TestClassesOfSeveralServers(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(10, s))
	p.BatchShare = 0.1
	st := newStory(t, limitertest.RedisClient(t), p)
	st.live().joinMany("live", "a", 300)
	st.batch().joinMany("night", "b", 100)
	r := newRotation(st, []string{"night"}, []string{"live"})
	r.most = 8
	got := r.run(20 * s)
	night, live := got[0]["night"], got[1]["live"]
	owed := p.BatchShare*200 - float64(night)
	if most := 1 - p.BatchShare + p.BatchShare*8; live+night != 200 || owed < 0 || owed > most { // as above
		t.Errorf("they got %v, want a tenth of 200, less up to %.1f", got, most)
	}
	r.servers[1].asksAt = -1 // it is gone
	left := 100 - night
	expect.Equal(t, r.run(21*s + steps(left+1)*100*ms)[0]["night"], left)
}
