package linetest

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A rotation is servers that ask for their own queues at their appointments, by a handed clock.
type rotation struct {
	st      *story
	now     time.Duration
	servers []*queueServer
	asked   int
	most    int // that a take asks for
}

type queueServer struct {
	l      *throttle.Limiter
	queues []string
	asksAt time.Duration // below 0: it never asks
	lag    time.Duration // it asks so much later than it was to
	got    map[string]int
}

func newRotation(st *story, queues ...[]string) *rotation {
	r := &rotation{st: st, most: throttle.MaxTake}
	for _, names := range queues {
		r.servers = append(r.servers, &queueServer{l: st.server().l, queues: names, got: map[string]int{}})
	}
	return r
}

// run goes on to a time, and returns what each server took since, by queue.
func (r *rotation) run(until time.Duration) []map[string]int {
	r.st.Helper()
	for {
		var next *queueServer
		for _, server := range r.servers {
			if server.asksAt >= 0 && (next == nil || server.asksAt+server.lag < next.asksAt+next.lag) {
				next = server
			}
		}
		if next == nil || next.asksAt+next.lag >= until {
			break
		}
		r.now = max(r.now, next.asksAt+next.lag)
		r.st.at(r.now)
		r.asked++
		taken := limitertest.Take(r.st, next.l, r.most, next.queues...)
		for _, ticket := range taken.Tickets {
			next.got[ticket.Queue]++
		}
		if next.asksAt = r.now + max(taken.Next, time.Millisecond); taken.Next < 0 {
			next.asksAt = r.now + s
		}
	}
	r.now = until
	r.st.at(until)
	var got []map[string]int
	for _, server := range r.servers {
		got = append(got, maps.Clone(server.got))
		clear(server.got)
	}
	return got
}

func TestQueuesWithoutACommonServerTakeTurns(t *testing.T) {
	t.Parallel()
	type backlog struct {
		queue, tenant string
		n             int
		cost          int64
	}
	slots := throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 4, Lease: m, Shared: true}
	tenantWindow, twenty := throttle.Window{Name: "own", Limit: 1000, Period: s}, limitertest.SharedWindow(20, s)
	spaced := throttle.Window{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: 20, Burst: 1, Period: s, Shared: true}
	one, two := backlog{"one", "a", 300, 1}, backlog{"two", "b", 300, 1}
	alone := [][]string{{"one"}, {"two"}}
	region := throttle.Window{Name: "region", Limit: 3, Period: s, Per: []string{"region"}}
	type row struct {
		p        throttle.Policy
		servers  [][]string
		lag      time.Duration // of the second server
		backlogs []backlog
		until    time.Duration
		want     []map[string]int // by server and queue
	}
	limitertest.EachCase(t, map[string]row{
		"also if the other asks late": {
			limitertest.Policy(twenty), alone, 3 * ms, []backlog{one, two}, 3 * s, []map[string]int{{"one": 30}, {"two": 30}},
		},
		"one by one": {
			limitertest.Policy(spaced), [][]string{{"one"}, {"two"}, {"three"}}, 0, []backlog{one, two, {"three", "c", 300, 1}},
			3 * s, []map[string]int{{"one": 20}, {"two": 20}, {"three": 20}},
		},
		"by the weights of the tenants that wait": {
			weighted(map[string]float64{"c": 2}, tenantWindow, limitertest.SharedWindow(40, s)), alone, 0, []backlog{one, two, {"two", "c", 300, 1}},
			3 * s, []map[string]int{{"one": 30}, {"two": 90}},
		},
		"at a tenant's own window": {
			limitertest.Policy(throttle.Window{Name: "own", Limit: 20, Period: s}), alone, 0, []backlog{one, {"two", "a", 300, 1}},
			3 * s, []map[string]int{{"one": 30}, {"two": 30}},
		},
		"of their server's queues together": {
			limitertest.Policy(tenantWindow, twenty), [][]string{{"high", "low"}, {"other"}}, 0,
			[]backlog{{"high", "a", 300, 1}, {"low", "b", 300, 1}, {"other", "c", 300, 1}}, 6 * s, []map[string]int{nil, {"other": 40}},
		},
		"a larger cost is not passed over": {
			limitertest.Policy(twenty), alone, 0, []backlog{one, {"two", "b", 30, 10}}, 6 * s, []map[string]int{{"one": 60}, {"two": 6}},
		},
	}, func(t *testing.T, client *redis.Client, row row) {
		st := newStory(t, client, row.p)
		r := newRotation(st, row.servers...)
		r.servers[1].lag = row.lag
		for _, b := range row.backlogs {
			st.costs(b.cost).joinMany(b.queue, b.tenant, b.n)
		}
		tickets := 0
		for i, got := range r.run(row.until) {
			for queue, want := range row.want[i] {
				tickets += want
				expect.Equal(t, got[queue], want, "within", row.until, "server", i, queue)
			}
		}
		// A server asks for each ticket, and again where room was left to another one.
		most := tickets * (len(row.servers) + 1)
		expect.That(t, row.p.Windows[0].Name != spaced.Name || r.asked <= most,
			tickets, "tickets took", r.asked, "takes, want at most", most)
	})
	tell(t, map[string]lineCase{
		"evenly, and one that stops leaves all to the other": {limitertest.Policy(tenantWindow, twenty), func(st *story) {
			r := newRotation(st, alone...)
			st.joinMany("one", "a", 300)
			st.joinMany("two", "b", 300)
			evenly := func(until time.Duration) {
				st.Helper()
				got := r.run(until)
				expect.That(st, got[0]["one"] == 30 && got[1]["two"] == 30, "within 3 s", got)
			}
			evenly(3 * s)
			r.servers[1].asksAt = -1
			r.run(4 * s)
			expect.Equal(st, r.run(7 * s)[0]["one"], 60)
			r.servers[1].asksAt = r.now
			evenly(10 * s)
		}},
		"behind a larger ticket, until its server is gone": {limitertest.Policy(limitertest.SharedWindow(3, h)), func(st *story) {
			st.granted("x1")
			st.costs(3).joinIn("one", "a1")
			st.costs(1).joinIn("two", "b1", "b2")
			st.from("one", "two").takes("b1").asks(s)
			expect.That(st, !st.at(500*ms).joinIn("one", "a2").Nudge, "its server asks at 1 s")
			st.from("two").takes().at(1021 * ms).from("two").takes("b2") // the server of both was to ask at 1 s
			st.at(h + 2*s).from("one").takes("a1").asks(s)
		}},
		"what a queue leaves of its region is the next one's": {limitertest.Policy(region, limitertest.SharedWindow(9, s)), func(st *story) {
			st.attributes = map[string]string{"region": "north"}
			st.granted("x1", "x2", "x3")
			st.joinIn("one", "c1")
			st.joinIn("two", "a1", "a2")
			st.at(s).from("one", "two").takes("c1", "a1", "a2")
			st.joinIn("one", "c2", "d2", "e2", "f2")
			st.joinIn("two", "a3")
			st.at(2*s).from("one", "two").takes("c2", "d2").asks(0) // and it is the turn of two
			st.from("one", "two").takes("a3")
			st.at(3*s).from("one", "two").takes("e2", "f2").asks(-1)
		}},
		"behind a larger ticket of the region that a take has looked at": {limitertest.Policy(region), func(st *story) {
			st.attributes = map[string]string{"region": "north"}
			st.granted("x1", "x2")
			st.costs(3).joinIn("one", "a1")
			st.costs(1).joinIn("two", "b1", "b2", "b3")
			wider := region
			wider.Limit = 4
			st.set(limitertest.Policy(wider)) // it makes nodes due, and is too narrow for a1
			st.from("one", "two").takes("b1").asks(0)
			st.from("one", "two").takes().asks(s)
			st.at(s).from("one", "two").takes("a1", "b2")
		}},
		"for slots": {limitertest.Policy(slots), func(st *story) {
			r := newRotation(st, alone...)
			st.joinMany("one", "a", 30)
			st.joinMany("two", "b", 30)
			for _, until := range []time.Duration{30 * s, 62 * s} { // the first leases have run out
				got := r.run(until)
				expect.That(st, got[0]["one"] == 2 && got[1]["two"] == 2, "of the four slots before", until, got)
			}
		}},
	})
}

// A small ticket does not pass a larger one of the same server that goes first and has no room: both
// queues get as much of a tenant's window, and of a shared one.
func TestNoTicketPassesALargerOneOfTheSameServer(t *testing.T) {
	client := limitertest.RedisClient(t)
	for name, w := range map[string]throttle.Window{"own": {Name: "own", Limit: 4, Period: s}, "shared": limitertest.SharedWindow(4, s)} {
		st := newStory(t, client, limitertest.Policy(w))
		st.joinMany("one", "a", 100)
		st.costs(3).joinMany("two", "a", 30)
		got := newRotation(st, []string{"one", "two"}).run(20 * s)[0]
		if units := got["two"] * 3; units < got["one"]-6 || units > got["one"]+6 { // two large tickets
			t.Errorf("%s: of 80 units the queues got %d and %d, want the same", name, got["one"], units)
		}
	}
}

// While three queues of a server wait, each gets its part of every window by its priority.
func TestPrioritiesHoldInEveryWindow(t *testing.T) {
	client := limitertest.RedisClient(t)
	for _, c := range []struct {
		shared  bool
		tenants int
	}{{true, 1}, {true, 10}, {false, 1}} {
		st := newStory(t, client, limitertest.Policy(
			throttle.Window{Name: "burst", Limit: 20, Period: 3 * s, Shared: c.shared},
			throttle.Window{Name: "minute", Limit: 20, Period: m, Shared: c.shared}))
		queues := map[string]int{"critical": 6, "default": 3, "low": 1}
		for queue := range queues {
			for i := range c.tenants {
				st.joinMany(queue, string(rune('a'+i)), 100/c.tenants)
			}
		}
		for window, got := range windowsOf(st, queues, 6) {
			t.Logf("%2d  %-14s %-8s %s", window+1, strings.Repeat("c", got["critical"]), strings.Repeat("d", got["default"]), strings.Repeat("l", got["low"]))
			for queue, priority := range queues {
				n := got[queue]
				expect.That(t, n >= 2*priority-1 && n <= 2*priority+1,
					c.tenants, "tenants, window", window, got, "want 12, 6 and 2, each within one")
			}
		}
	}
}

// windowsOf takes at the times that the line names, and returns how many of each 20 tickets were of which queue.
func windowsOf(st *story, queues map[string]int, windows int) (got []map[string]int) {
	st.Helper()
	taken, now := 0, time.Duration(0)
	for taken < 20*windows {
		reply, err := st.at(now).l.Line("p").Take(st.Context(), throttle.TakeOptions{Queues: queues, Max: 16})
		expect.Require(st, err == nil && reply.Next >= 0, reply, err)
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
