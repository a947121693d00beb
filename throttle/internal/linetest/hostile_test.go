package linetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

var hostileNames = []string{
	"acme", "{acme}", "acme}:q", "a:b", "a,b", "%61", "a\x00b", "a\nb", "\xff\xfe", " ", "w x;y 1 2 3 4;", "0.5", "-",
	strings.Repeat("\n", throttle.MaxValueBytes), strings.Repeat("}", throttle.MaxValueBytes),
}

// Tenants, attributes, queues, tickets and keys are data in the line too: each waits, is taken by
// its own name and leaves, beside all others, and nothing stays.
func TestHostileNamesInALine(t *testing.T) {
	client := limitertest.RedisClient(t)
	for _, shared := range []bool{true, false} {
		p := limitertest.Policy(
			throttle.Window{Name: "user", Limit: 1, Period: 10 * s, Per: []string{"tenant", "user"}},
			throttle.Window{Name: "own", Limit: 100, Period: 10 * s},
		)
		if shared {
			p.Windows = append(p.Windows, throttle.Window{Name: "all", Limit: 1000, Period: 10 * s, Shared: true})
		}
		st := newStory(t, client, p)
		type names struct{ tenant, user, queue, id, key string }
		var all []names
		for i, name := range hostileNames {
			other := func(n int) string { return hostileNames[(i+n)%len(hostileNames)] }
			all = append(all, names{name, other(3), other(5), other(7), other(11)[:min(len(other(11)), throttle.MaxKeyBytes)]})
		}
		request := func(n names) throttle.Request {
			return throttle.Request{
				Policy: "p", Tenant: n.tenant, Attributes: map[string]string{"user": n.user}, Ticket: throttle.Ticket{Queue: n.queue, ID: n.id}, Key: n.key,
			}
		}
		for _, n := range all {
			expect.Equal(t, limitertest.Reserve(t, st.l, request(n)).Granted, true)
			before := limitertest.Dump(t, client)
			limitertest.WantDenied(t, limitertest.Reserve(t, st.l, request(n)), 10*s, n)
			later := request(n)
			later.Ticket.ID = "later/" + n.id
			decisions, err := st.line().Join(t.Context(), []throttle.Request{later})
			expect.Require(t, err == nil && decisions[0].Err == nil && decisions[0].RetryIn == 20*s &&
				!decisions[0].AlreadyQueued, n, decisions, err)
			for key, value := range before {
				expect.Equal(t, client.Exists(t.Context(), key).Val(), 1, n, key, value)
			}
		}
		st.at(10 * s)
		taken, err := st.line().Take(t.Context(), throttle.TakeOptions{Queues: limitertest.Queues(hostileNames...), Max: throttle.MaxTake})
		expect.Require(t, err == nil && len(taken.Tickets) == len(all), len(taken.Tickets), "tickets of", len(all), err)
		for _, n := range all {
			i := slices.IndexFunc(taken.Tickets, func(t throttle.TakenTicket) bool { return t.Ticket == request(n).Ticket })
			if i < 0 {
				t.Errorf("%q was not taken", n)
				continue
			}
			got := taken.Tickets[i]
			expect.That(t, got.Key == n.key && got.Decision.Tenant == n.tenant &&
				got.Decision.Reservation.Attributes["user"] == n.user && st.line().Matches(got, request(n)),
				n, "was taken as", got)
			w := got.Decision.Windows
			expect.That(t, len(w) == len(p.Windows) && w[0].Used == 1 && w[1].Used == 1 &&
				slices.Equal(w[0].Scope.Values, []string{n.tenant, n.user}), n, w)
			expect.Must(t, st.line().Leave(t.Context(), throttle.Ticket{Queue: n.queue, ID: "later/" + n.id}))
		}
		expect.Must(t, st.line().Acknowledge(t.Context()))
		for _, key := range client.Keys(t.Context(), "*").Val() {
			kind := client.Type(t.Context(), key).Val()
			expect.That(t, kind == "string" && !strings.HasSuffix(key, ":q"), "the line has left the", kind, key)
		}
	}
}

// As many windows as a policy may have, each of a unit and a scope of its own, with a line.
func TestManyWindowsWithALine(t *testing.T) {
	client := limitertest.RedisClient(t)
	var p throttle.Policy
	p.Name = "p"
	r := throttle.Request{Policy: "p", Tenant: "a", Cost: map[string]int64{}, Attributes: map[string]string{}}
	for i := range throttle.MaxWindows {
		attribute, unit := fmt.Sprint("attribute", i), fmt.Sprint("unit", i)
		p.Windows = append(p.Windows, throttle.Window{
			Name: fmt.Sprint("w", i), Limit: 3, Period: 10 * s, Unit: unit, Per: []string{attribute, "tenant"}[:1+i%2],
			Algorithm: []throttle.Algorithm{throttle.AlgorithmSliding, throttle.AlgorithmFixed, throttle.AlgorithmGCRA}[i%3],
		})
		r.Cost[unit], r.Attributes[attribute] = 3, "\xff\n"
	}
	st := newStory(t, client, p)
	ticket := func(name string) throttle.Request {
		r := r
		r.Ticket = limitertest.Ticket(name)
		return r
	}
	expect.Equal(t, limitertest.Reserve(t, st.l, ticket("a1")).Granted, true)
	for i, name := range []string{"a2", "a3"} {
		limitertest.WantDenied(t, limitertest.Reserve(t, st.l, ticket(name)), time.Duration(i+1)*10*s, name)
	}
	limitertest.WantDenied(t, limitertest.Peek(t, st.l, r), 30*s, "a request that costs nothing")
	st.at(10 * s).takes("a2")
	expect.Equal(t, slices.Max(limitertest.Used(limitertest.Cancel(t, st.l, st.took["a2"].Decision.Reservation))), 0)
	st.takes("a3")
	expect.Equal(t, client.Exists(t.Context(), "sluice:{p}:q").Val(), 0, "the line is not empty")
}

// The largest numbers there may be, side by side, in windows and in a line.
func TestLargestNumbers(t *testing.T) {
	const most = throttle.MaxLimit
	for _, algorithm := range []throttle.Algorithm{throttle.AlgorithmSliding, throttle.AlgorithmFixed, throttle.AlgorithmGCRA} {
		t.Run(string(algorithm), func(t *testing.T) {
			client := limitertest.RedisClient(t)
			p := limitertest.Policy(throttle.Window{Name: "w", Limit: most, Period: throttle.MaxPeriod, Algorithm: algorithm, Shared: true})
			p.Tenants = map[string]throttle.Tenant{"a": {Weight: 1e6}, "b": {Weight: 0.001}, "x": {Exempt: true}}
			st := newStory(t, client, p)
			st.costs(most).granted("a1")
			for range 20 {
				st.granted("x1") // an exempt tenant counts on and on
			}
			var last time.Duration
			for _, name := range []string{"a2", "a3", "b1", "c1"} {
				d := limitertest.Reserve(t, st.l, st.request(name))
				expect.That(t, !d.Granted && d.RetryIn > 0 && d.Windows[0].Used >= most && d.Windows[0].Remaining == 0, name, d)
				last = max(last, d.RetryIn)
			}
			st.at(last)
			taken, err := st.line().Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: throttle.MaxTake})
			expect.That(t, err == nil && len(taken.Tickets) == 1 &&
				taken.Tickets[0].Decision.Windows[0].Used == most, "after", last, "took", taken, err)
		})
	}
}
