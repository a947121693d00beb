package linetest

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A rota is servers that ask for their own queues at their appointments, by a handed clock.
type rota struct {
	sc    *scene
	now   time.Duration
	desks []*desk
	asked int
}

type desk struct {
	l      *throttle.Limiter
	queues []string
	asksAt time.Duration // below 0: it never asks
	lag    time.Duration // it asks so much later than it was to
	got    map[string]int
}

func newRota(sc *scene, queues ...[]string) *rota {
	r := &rota{sc: sc}
	for _, names := range queues {
		r.desks = append(r.desks, &desk{l: sc.server(), queues: names, got: map[string]int{}})
	}
	return r
}

// backlog has so many tickets of a tenant join.
func (r *rota) backlog(queue, tenant string, n int) {
	r.sc.t.Helper()
	requests := make([]throttle.Request, n)
	for i := range requests {
		requests[i] = throttle.Request{
			Cost:   map[string]int64{"requests": r.sc.cost},
			Tenant: tenant,
			Ticket: throttle.Ticket{Queue: queue, ID: fmt.Sprint(tenant, i)},
		}
	}
	if _, err := r.sc.l.Line("p").Join(r.sc.t.Context(), requests); err != nil {
		r.sc.t.Fatal(err)
	}
}

// run goes on to a time, and returns what each desk took since, by queue.
func (r *rota) run(until time.Duration) []map[string]int {
	r.sc.t.Helper()
	for {
		var next *desk
		for _, d := range r.desks {
			if d.asksAt >= 0 && (next == nil || d.asksAt+d.lag < next.asksAt+next.lag) {
				next = d
			}
		}
		if next == nil || next.asksAt+next.lag >= until {
			break
		}
		r.now = max(r.now, next.asksAt+next.lag)
		r.sc.at(r.now)
		r.asked++
		taken := limitertest.Take(r.sc.t, next.l, throttle.MaxTake, next.queues...)
		for _, ticket := range taken.Tickets {
			next.got[ticket.Queue]++
		}
		if next.asksAt = r.now + max(taken.Next, time.Millisecond); taken.Next < 0 {
			next.asksAt = r.now + s
		}
	}
	r.now = until
	r.sc.at(until)
	var got []map[string]int
	for _, d := range r.desks {
		got = append(got, maps.Clone(d.got))
		clear(d.got)
	}
	return got
}

func TestQueuesWithoutACommonServerTakeTurns(t *testing.T) {
	t.Parallel()
	own := throttle.Window{Name: "own", Limit: 1000, Period: s}
	slots := throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 4, Lease: time.Minute, Scope: throttle.ScopeShared}
	plays(t, map[string]play{
		"evenly, and one that stops leaves all to the other": {limitertest.Policy(own, limitertest.SharedWindow(20, s)), func(sc *scene) {
			r := newRota(sc, []string{"one"}, []string{"two"})
			r.backlog("one", "a", 300)
			r.backlog("two", "b", 300)
			got := r.run(3 * s)
			if got[0]["one"] != 30 || got[1]["two"] != 30 {
				sc.t.Errorf("within 3 s %v", got)
			}
			r.desks[1].asksAt = -1
			r.run(4 * s)
			if got := r.run(7 * s)[0]["one"]; got != 60 {
				sc.t.Errorf("within 3 s, alone, %d", got)
			}
			r.desks[1].asksAt = r.now
			got = r.run(10 * s)
			if got[0]["one"] != 30 || got[1]["two"] != 30 {
				sc.t.Errorf("within 3 s, again, %v", got)
			}
		}},
		"also if the other asks late": {limitertest.Policy(limitertest.SharedWindow(20, s)), func(sc *scene) {
			r := newRota(sc, []string{"one"}, []string{"two"})
			r.desks[1].lag = 3 * time.Millisecond
			r.backlog("one", "a", 300)
			r.backlog("two", "b", 300)
			if got := r.run(3 * s); got[0]["one"] != 30 || got[1]["two"] != 30 {
				sc.t.Errorf("within 3 s %v", got)
			}
		}},
		"one by one": {limitertest.Policy(throttle.Window{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: 20, Burst: 1, Period: s, Scope: throttle.ScopeShared}), func(sc *scene) {
			r := newRota(sc, []string{"one"}, []string{"two"}, []string{"three"})
			r.backlog("one", "a", 300)
			r.backlog("two", "b", 300)
			r.backlog("three", "c", 300)
			got := r.run(3 * s)
			if got[0]["one"] != 20 || got[1]["two"] != 20 || got[2]["three"] != 20 {
				sc.t.Errorf("within 3 s %v", got)
			}
			if r.asked > 60*(3+1) { // each server for each ticket, and again where room was left to another
				sc.t.Errorf("60 tickets took %d takes", r.asked)
			}
		}},
		"by the weights of the tenants that wait": {throttle.Policy{
			Name: "p", Windows: []throttle.Window{own, limitertest.SharedWindow(40, s)}, Tenants: map[string]throttle.Tenant{"c": {Weight: 2}},
		}, func(sc *scene) {
			r := newRota(sc, []string{"one"}, []string{"two"})
			r.backlog("one", "a", 300)
			r.backlog("two", "b", 300)
			r.backlog("two", "c", 300)
			if got := r.run(3 * s); got[0]["one"] != 30 || got[1]["two"] != 90 {
				sc.t.Errorf("within 3 s %v", got)
			}
		}},
		"at a tenant's own window": {limitertest.Policy(throttle.Window{Name: "own", Limit: 20, Period: s}), func(sc *scene) {
			r := newRota(sc, []string{"one"}, []string{"two"})
			r.backlog("one", "a", 300)
			r.backlog("two", "a", 300)
			if got := r.run(3 * s); got[0]["one"] != 30 || got[1]["two"] != 30 {
				sc.t.Errorf("within 3 s %v", got)
			}
		}},
		"of their server's queues together": {limitertest.Policy(own, limitertest.SharedWindow(20, s)), func(sc *scene) {
			r := newRota(sc, []string{"high", "low"}, []string{"low"}, []string{"other"})
			r.backlog("high", "a", 300)
			r.backlog("low", "b", 300)
			r.backlog("other", "c", 300)
			got := r.run(6 * s)
			if got[2]["other"] != 40 {
				sc.t.Errorf("within 6 s %v", got)
			}
		}},
		"a larger cost is not passed over": {limitertest.Policy(limitertest.SharedWindow(20, s)), func(sc *scene) {
			r := newRota(sc, []string{"one"}, []string{"two"})
			r.backlog("one", "a", 300)
			sc.cost = 10
			r.backlog("two", "b", 30)
			if got := r.run(6 * s); got[1]["two"] != 6 || got[0]["one"] != 60 {
				sc.t.Errorf("within 6 s %v", got)
			}
		}},
		"for slots": {limitertest.Policy(slots), func(sc *scene) {
			r := newRota(sc, []string{"one"}, []string{"two"})
			r.backlog("one", "a", 30)
			r.backlog("two", "b", 30)
			if got := r.run(30 * s); got[0]["one"] != 2 || got[1]["two"] != 2 {
				sc.t.Errorf("of the first four slots %v", got)
			}
			if got := r.run(62 * s); got[0]["one"] != 2 || got[1]["two"] != 2 { // as their leases have run out
				sc.t.Errorf("of the next four slots %v", got)
			}
		}},
	})
}

// A small ticket does not pass a larger one of the same server that goes first and has no room: both
// queues get as much of a tenant's window, and of a shared one.
func TestNoTicketPassesALargerOneOfTheSameServer(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		for name, w := range map[string]throttle.Window{"own": {Name: "own", Limit: 4, Period: s}, "shared": limitertest.SharedWindow(4, s)} {
			sc := newScene(t, client, limitertest.Policy(w))
			r := newRota(sc, []string{"one", "two"})
			r.backlog("one", "a", 100)
			sc.cost = 3
			r.backlog("two", "a", 30)
			got := r.run(20 * s)[0]
			if units := got["two"] * 3; units < got["one"]-6 || units > got["one"]+6 { // two large tickets
				t.Errorf("%s: of 80 units the queues got %d and %d, want the same", name, got["one"], units)
			}
			limitertest.Agrees(t, client)
		}
	})
}

// While three queues of a server wait, each gets its part of every window by its priority.
func TestPrioritiesHoldInEveryWindow(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		for _, c := range []struct {
			scope   throttle.Scope
			tenants int
		}{{throttle.ScopeShared, 1}, {throttle.ScopeShared, 10}, {throttle.Scope{}, 1}} {
			sc := newScene(t, client, limitertest.Policy(
				throttle.Window{Name: "burst", Limit: 20, Period: 3 * s, Scope: c.scope},
				throttle.Window{Name: "minute", Limit: 20, Period: m, Scope: c.scope}))
			queues := map[string]int{"critical": 6, "default": 3, "low": 1}
			r := newRota(sc)
			for queue := range queues {
				for i := range c.tenants {
					r.backlog(queue, string(rune('a'+i)), 200/c.tenants)
				}
			}
			for window, got := range windowsOf(sc, queues, 12) {
				t.Logf("%2d  %-14s %-8s %s", window+1, strings.Repeat("c", got["critical"]), strings.Repeat("d", got["default"]), strings.Repeat("l", got["low"]))
				for queue, priority := range queues {
					if n := got[queue]; n < 2*priority-1 || n > 2*priority+1 {
						t.Errorf("%d tenants, window %d: %v, want 12, 6 and 2, each within one", c.tenants, window, got)
					}
				}
			}
			limitertest.Agrees(t, client)
		}
	})
}

// windowsOf takes at the times that the line names, and returns how many of each 20 tickets were of
// which queue.
func windowsOf(sc *scene, queues map[string]int, windows int) (got []map[string]int) {
	sc.t.Helper()
	taken, now := 0, time.Duration(0)
	for taken < 20*windows {
		reply, err := sc.at(now).l.Line("p").Take(sc.t.Context(), throttle.TakeOptions{Queues: queues, Max: 16})
		if err != nil || reply.Next < 0 {
			sc.t.Fatalf("%+v, %v", reply, err)
		}
		for _, ticket := range reply.Tickets {
			if taken%20 == 0 {
				got = append(got, map[string]int{})
			}
			taken++
			got[len(got)-1][ticket.Queue]++
		}
		now += max(ms, reply.Next)
	}
	return got
}
