package modeltest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Random histories: tickets come, leave, are lost and change. No limit is exceeded, no ticket is overtaken in its
// flow, and each that fits is taken. The keys agree after every step. In the end nothing is left.
func TestLineHoldsWhateverHappens(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		onMiniredis, n := strings.HasSuffix(t.Name(), "/miniredis"), 0
		rapid.Check(t, func(t *rapid.T) {
			if n++; !onMiniredis || n <= 5 { // it is ten times as slow
				crowdHistory(t, client)
			}
		})
	})
}

func anyLineWindow(t *rapid.T, i int, scopes [][]string, algorithms []throttle.Algorithm) throttle.Window {
	w := throttle.Window{
		Algorithm: rapid.SampledFrom(algorithms).Draw(t, "algorithm"),
		Limit:     rapid.Int64Range(1, 6).Draw(t, "limit"),
		Name:      fmt.Sprint("w", i),
		Per:       rapid.SampledFrom(scopes).Draw(t, "per"),
		Period:    rapid.SampledFrom([]time.Duration{100 * ms, s, 3 * s, 10 * s}).Draw(t, "period"),
		Unit:      rapid.SampledFrom([]string{"requests", "requests", "tokens"}).Draw(t, "unit"),
	}
	w.Shared = w.Per == nil
	if w.Algorithm == throttle.AlgorithmGCRA {
		w.Burst = rapid.Int64Range(1, 5).Draw(t, "burst")
	}
	return w
}

// crowdHistory is one history of a line of any policy, against the model.
func crowdHistory(t *rapid.T, client *redis.Client) {
	expect.Must(t, client.FlushDB(t.Context()).Err())
	cr := &crowd{t: t, client: client, c: limitertest.NewClock(), flows: map[string][]*standing{}, lost: map[string]lostTake{}}
	cr.c.Set(0)
	cr.nested, cr.same = rapid.Bool().Draw(t, "nested"), rapid.Bool().Draw(t, "all cost the same")
	var all []string // shared
	tenant, user, region := []string{"tenant"}, []string{"tenant", "user"}, []string{"region"}
	scopes := [][]string{tenant, user, all, region, {"tenant", "region"}}
	if cr.nested {
		scopes = rapid.SampledFrom([][][]string{
			{tenant, all}, {tenant}, {all}, {user, tenant, all}, {region, all}, {{"region", "user"}, region},
		}).Draw(t, "scopes")
	}
	changing := rapid.Bool().Draw(t, "limits change")
	algorithms := []throttle.Algorithm{throttle.AlgorithmSliding, throttle.AlgorithmSliding, throttle.AlgorithmFixed}
	if !changing {
		algorithms = append(algorithms, throttle.AlgorithmGCRA)
	}
	cr.p = limitertest.Policy()
	cr.p.BatchShare = 0.001 // less than one ticket in a history
	batches := rapid.Bool().Draw(t, "batches")
	for i := range rapid.IntRange(1, 4).Draw(t, "windows") {
		cr.p.Windows = append(cr.p.Windows, anyLineWindow(t, i, scopes, algorithms))
	}
	cr.p = cr.p.WithDefaults()
	tokens := slices.ContainsFunc(cr.p.Windows, func(w throttle.Window) bool { return w.Unit == "tokens" })
	cr.m = newModel("exempt", cr.p.Windows)
	for range 2 {
		cr.servers = append(cr.servers, cr.newServer())
	}

	anyRequest := func(t *rapid.T) throttle.Request {
		cr.seq++
		r := throttle.Request{
			Attributes: map[string]string{
				"user":   rapid.SampledFrom([]string{"bob", "eve"}).Draw(t, "user"),
				"region": rapid.SampledFrom([]string{"north", "south"}).Draw(t, "region"),
			},
			Cost:   map[string]int64{"requests": 1},
			Policy: "p",
			Tenant: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "tenant"),
			Ticket: throttle.Ticket{Queue: rapid.SampledFrom([]string{"q1", "q1", "q2"}).Draw(t, "queue"), ID: fmt.Sprintf("t%03d", cr.seq)},
		}
		if tokens {
			r.Cost["tokens"] = 1
		}
		if batches {
			r.Class = rapid.SampledFrom([]throttle.Class{throttle.ClassLive, throttle.ClassBatch}).Draw(t, "class")
		}
		if !cr.same {
			r.Cost["requests"] = rapid.SampledFrom([]int64{1, 1, 1, 2, 3, 0}).Draw(t, "cost")
			if tokens {
				r.Cost["tokens"] = rapid.Int64Range(0, 3).Draw(t, "tokens")
			}
		}
		return r
	}
	waiting := func(t *rapid.T) *standing {
		all := cr.waiting()
		if len(all) == 0 {
			t.Skip("nobody waits")
		}
		return all[rapid.IntRange(0, len(all)-1).Draw(t, "waiting")]
	}
	anyQueues := func(t *rapid.T) []string {
		return rapid.SampledFrom([][]string{{"q1", "q2"}, {"q2", "q1"}, {"q1"}, {"q2"}}).Draw(t, "queues")
	}
	takenTicket := func(t *rapid.T) int {
		if len(cr.taken) == 0 {
			t.Skip("nothing was taken")
		}
		i := rapid.IntRange(max(0, len(cr.taken)-5), len(cr.taken)-1).Draw(t, "taken")
		if cr.m.outlived(cr.taken[i].Decision.Reservation, cr.now()) {
			t.Skip("a window has forgotten it")
		}
		return i
	}
	anyServer := func(t *rapid.T) *limitertest.Hooked {
		return cr.servers[rapid.IntRange(0, len(cr.servers)-1).Draw(t, "server")]
	}
	check := func(err error) {
		expect.Must(cr.t, err)
	}
	next := time.Duration(0)
	actions := map[string]func(*rapid.T){
		"reserve": func(t *rapid.T) { cr.reserve(anyRequest(t)) },
		"reserve without a ticket": func(t *rapid.T) {
			r := anyRequest(t)
			r.Ticket = throttle.Ticket{}
			cr.reserve(r)
		},
		"come again": func(t *rapid.T) { cr.reserve(waiting(t).request) },
		"join":       func(t *rapid.T) { cr.join(anyRequest(t), 0, 0) },
		"join many": func(t *rapid.T) {
			r := anyRequest(t)
			for range rapid.IntRange(2, 8).Draw(t, "times") {
				cr.seq++
				r.Ticket.ID = fmt.Sprintf("t%03d", cr.seq)
				cr.join(r, 0, 0)
			}
		},
		"join in front": func(t *rapid.T) {
			r := anyRequest(t)
			r.Front = true
			cr.join(r, 0, 0)
		},
		"join again": func(t *rapid.T) { cr.join(waiting(t).request, time.Duration(0), 1) },
		"join as another user": func(t *rapid.T) {
			r := waiting(t).request
			r.Attributes = map[string]string{"user": "bob", "region": "south"}
			cr.join(r, 0, 0)
		},
		"join if soon": func(t *rapid.T) {
			cr.join(anyRequest(t), rapid.SampledFrom([]time.Duration{0, us, 2 * s}).Draw(t, "max wait"), rapid.SampledFrom([]int{0, 3}).Draw(t, "backlog"))
		},
		"leave": func(t *rapid.T) {
			w := waiting(t)
			check(cr.servers[0].Line("p").Leave(t.Context(), w.id))
			cr.remove(w.id)
		},
		"take": func(t *rapid.T) {
			next = cr.take(anyServer(t), rapid.IntRange(0, 4).Draw(t, "most"), anyQueues(t)...).Next
		},
		"take all": func(t *rapid.T) { next = cr.takeAll(anyQueues(t)...) },
		"put back": func(t *rapid.T) {
			i := takenTicket(t)
			ticket := cr.taken[i]
			if _, j := cr.find(ticket.Ticket); j >= 0 {
				t.Skip("it joined again")
			}
			check(cr.servers[0].Line("p").PutBack(t.Context(), []throttle.TakenTicket{ticket.TakenTicket}))
			cr.m.cancel(ticket.Decision.Reservation, cr.now())
			cr.insert(standing{ticket.Ticket, ticket.request, ticket.Rank - limitertest.LineZero})
			cr.taken = slices.Delete(cr.taken, i, i+1)
		},
		"give back": func(t *rapid.T) {
			i := takenTicket(t)
			check(cr.servers[0].Line("p").Refund(t.Context(), []throttle.TakenTicket{cr.taken[i].TakenTicket}))
			cr.m.cancel(cr.taken[i].Decision.Reservation, cr.now())
			cr.taken = slices.Delete(cr.taken, i, i+1)
		},
		"lose a server": func(t *rapid.T) {
			if len(cr.lost) >= 4 {
				t.Skip("so many are put back in one call")
			}
			n, failed := len(cr.taken), len(cr.failed)
			server := cr.newServer()
			cr.take(server, rapid.IntRange(1, 3).Draw(t, "most"), anyQueues(t)...)
			for _, ticket := range slices.Concat(cr.taken[n:], cr.failed[failed:]) {
				cr.lost[ticket.Queue+ticket.ID] = lostTake{cr.now(), standing{ticket.Ticket, ticket.request, ticket.Rank - limitertest.LineZero}}
			}
			cr.taken = cr.taken[:n]
		},
		"pass": func(t *rapid.T) {
			cr.pass(rapid.SampledFrom([]time.Duration{us, 10 * ms, 100 * ms, 500 * ms, s, 3 * s, 12 * s, 70 * s}).Draw(t, "time"))
		},
		"pass until due": func(t *rapid.T) {
			cr.pass(max(0, next))
		},
		"change a weight": func(t *rapid.T) {
			weight := rapid.SampledFrom([]float64{0.001, 0.5, 4}).Draw(t, "weight")
			cr.p.Tenants = map[string]throttle.Tenant{"b": {Weight: weight}}
			cr.light = cr.light || weight == 0.001
			cr.set()
		},
		"": func(t *rapid.T) { cr.agree() },
	}
	if changing {
		actions["change a limit"] = func(t *rapid.T) {
			i := rapid.IntRange(0, len(cr.p.Windows)-1).Draw(t, "window")
			cr.p.Windows = slices.Clone(cr.p.Windows)
			cr.p.Windows[i].Limit = rapid.Int64Range(1, 6).Draw(t, "limit")
			cr.set()
			cr.m.setWindows(cr.p.Windows)
			cr.changedAt = cr.now()
		}
	}
	t.Repeat(actions)
	cr.drain()
}
