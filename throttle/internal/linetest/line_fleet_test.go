package linetest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

const spacing = 7 * ms // of appointments

// Up to 285 idle servers together ask the line every 7 ms, and again after a take that got all that it asked for. A
// ticket that is due is taken at the next of these times. Each asks within two seconds.
func TestAppointments(t *testing.T) {
	client := limitertest.RedisClient(t)
	const tickets, again = 20, 500 * us
	for _, servers := range []int{1, 7, 300} {
		st := newStory(t, client, limitertest.Policy(limitertest.SharedWindow(1, 100*ms)))
		st.joinMany("q", "a", tickets)
		e, asked := &limitertest.Events{Clock: st.c}, 0
		perSecond, late := map[int]int{}, []time.Duration{}
		var ask func(l *throttle.Limiter)
		ask = func(l *throttle.Limiter) {
			taken := limitertest.Take(t, l, 1, "q")
			asked++
			perSecond[int(e.Now/s)]++
			for range taken.Tickets {
				late = append(late, e.Now-steps(len(late))*100*ms)
			}
			expect.That(t, taken.Next <= 2*s, servers, "servers: one asks again in", taken.Next)
			if taken.Next >= 0 {
				// Each is late by what a network and a loop cost.
				e.At(e.Now+taken.Next+time.Duration(asked%5)*again/5, func() { ask(l) })
			}
		}
		for i := range servers {
			l := st.server().l
			e.At(time.Duration(i)*s/time.Duration(servers), func() { ask(l) })
		}
		for len(late) < tickets && e.Next(h) {
		}
		for second, n := range perSecond {
			most := max(int(s/spacing), servers/2) + 10 // and after each of ten tickets
			expect.That(t, second == 0 || n <= most, servers, "servers ask", n, "times in second", second)
		}
		// Each start is late by what those before it were, too.
		for i := len(late) - 1; i > 0; i-- {
			late[i] -= late[i-1]
		}
		expect.That(t, len(late) >= tickets && slices.Max(late[1:]) <= spacing+again,
			servers, "servers", len(late), "taken, late by", late)
	}
}

// A fleet is servers of 8 handler slots, that ask when the line says so or a nudge comes. Their jobs take no time.
type fleet struct {
	limitertest.Events
	st      *story
	random  *rand.Rand
	granted []time.Duration
	asked   int
	asleep  []*fleetServer // waiting for a nudge, the longest first
}

type fleetServer struct {
	st     *story
	free   int
	asksAt time.Duration // below 0: never
}

const loop = 600 * us // that a network and a loop cost at most

// after is a while from now, and what a network and a loop cost.
func (f *fleet) after(d time.Duration, do func()) {
	f.At(f.Now+d+loop/3+time.Duration(f.random.IntN(400))*us, do)
}

func (f *fleet) join(job int) {
	if f.st.joins(fmt.Sprint("a", job)).Nudge && len(f.asleep) > 0 {
		server := f.asleep[0]
		f.after(0, func() { f.ask(server) })
	}
}

func (f *fleet) ask(server *fleetServer) {
	f.asleep = slices.DeleteFunc(f.asleep, func(other *fleetServer) bool { return other == server })
	if server.asksAt = -1; server.free == 0 {
		return
	}
	f.asked++
	for _, ticket := range server.st.take(server.free) {
		expect.Equal(f.st, ticket.ID, fmt.Sprint("a", len(f.granted)), "is the next")
		f.granted = append(f.granted, f.Now)
		server.free--
		f.after(0, func() {
			if server.free++; server.asksAt < 0 {
				f.ask(server)
			}
		})
	}
	next := server.st.next
	if next < 0 || server.free > 0 {
		f.asleep = append(f.asleep, server)
	}
	if at := f.Now + next; next >= 0 && server.free > 0 {
		server.asksAt = at
		f.after(next, func() {
			if server.asksAt == at {
				f.ask(server)
			}
		})
	}
}

// Jobs go in their order, none above a limit, and no later than the limits make them. Servers ask no more
// often than at all appointments, for each join, and when each job ends.
func TestAFleetUsesWhatTheWindowsAllow(t *testing.T) {
	tenantWindow := func(limit int64, period time.Duration) throttle.Window {
		return throttle.Window{Name: "own", Limit: limit, Period: period}
	}
	for name, tc := range map[string]struct {
		windows []throttle.Window
		jobs    int
		limit   int
		period  time.Duration
	}{
		"20 a second":           {[]throttle.Window{tenantWindow(20, s)}, 100, 20, s},
		"20 a second, shared":   {[]throttle.Window{limitertest.SharedWindow(20, s)}, 100, 20, s},
		"100 in 5 seconds":      {[]throttle.Window{tenantWindow(100, 5*s)}, 200, 100, 5 * s},
		"20 a minute, 5 in 3 s": {[]throttle.Window{tenantWindow(20, m), {Name: "burst", Limit: 5, Period: 3 * s}}, 100, 20, m},
		"5 in 100 ms":           {[]throttle.Window{tenantWindow(5, 100*ms)}, 100, 5, 100 * ms},
		"fixed":                 {[]throttle.Window{{Name: "own", Algorithm: throttle.AlgorithmFixed, Limit: 20, Period: s}}, 100, 20, s},
		"gcra":                  {[]throttle.Window{{Name: "own", Algorithm: throttle.AlgorithmGCRA, Limit: 20, Burst: 5, Period: s}}, 100, 5, 250 * ms},
		"three algorithms": {[]throttle.Window{
			limitertest.SharedWindow(30, s),
			{Name: "fixed", Algorithm: throttle.AlgorithmFixed, Limit: 45, Period: 3 * s},
			{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 20, Burst: 20, Period: s},
		}, 180, 45, 3 * s},
		"300 in 10 seconds, merged": {[]throttle.Window{tenantWindow(300, 10*s)}, 400, 300, 10 * s},
	} {
		t.Run(name, func(t *testing.T) {
			p := limitertest.Policy(tc.windows...)
			f := &fleet{random: rand.New(rand.NewPCG(1, 2))}
			f.st = newStory(t, limitertest.RedisClient(t), p)
			f.Clock = f.st.c
			for range 5 {
				f.asleep = append(f.asleep, &fleetServer{st: f.st.server(), free: 8, asksAt: -1})
			}
			for i := range tc.jobs {
				f.At(time.Duration(i)*300*us, func() { f.join(i) })
			}
			for len(f.granted) < tc.jobs && f.Next(h) {
			}
			expect.Equal(t, len(f.granted), tc.jobs, "jobs are through")
			var log []limitertest.LoggedGrant
			for _, at := range f.granted {
				log = append(log, limitertest.LoggedGrant{At: limitertest.At(at).UnixMicro(), Units: 1})
			}
			for _, w := range p.WithDefaults().Windows {
				expect.Equal(t, max(0, limitertest.MostOver(w, log)), 0, "over", w.Name)
			}
			// Each starts a period after another one, and is late by an appointment, and what merged grants are.
			late := spacing + loop
			if tc.limit > 192 {
				late += tc.period / 96
			}
			periods, last := (tc.jobs-1)/tc.limit, f.granted[tc.jobs-1]
			most := f.granted[tc.jobs-1-periods*tc.limit] + steps(periods)*(tc.period+late)
			expect.That(t, last <= most, "done at", last, "want", most)
			expect.That(t, f.asked <= int(last/spacing)+2*tc.jobs+5, "asked", f.asked, "times for", tc.jobs)
			limitertest.IsGone(t, f.st.client)
		})
	}
}

// After a limit has changed, a take looks at as many tenants as ever, however many wait at their nodes, and further
// ones at the rest.
func TestATakeLooksAtSoManyWhateverHasChanged(t *testing.T) {
	client := limitertest.RedisClient(t)
	tenantWindow := throttle.Window{Name: "own", Limit: 1, Period: h}
	tenants := []int{200, 1200}
	if os.Getenv("SLUICE_LONG") != "" {
		tenants[1] = 20_000
	}
	var commands, due [2]int // of a take, at most; and the nodes that the first take has made due
	for k, n := range tenants {
		client.FlushAll(t.Context())
		l := limitertest.New(t, client, limitertest.Policy(tenantWindow))
		var requests []throttle.Request
		for i := range 2 * n {
			r := throttle.Request{Policy: "p", Tenant: fmt.Sprint(i / 2), Ticket: limitertest.Ticket(fmt.Sprint(i))}
			requests = append(requests, r)
		}
		expect.Must(t, expect.ErrOf(l.Line("p").Reserve(t.Context(), requests)))
		limitertest.Take(t, l, throttle.MaxTake, "q")
		changed := tenantWindow
		changed.Limit = 2
		expect.Must(t, l.SetPolicies([]throttle.Policy{limitertest.Policy(changed)}))
		left := n - len(limitertest.Take(t, l, 1, "q").Tickets)
		due[k] = int(client.ZCount(t.Context(), "sluice:{p}:d:q", "-inf", fmt.Sprint(time.Now().UnixMicro())).Val())
		for left > 0 {
			before := calls(t, client)
			taken := limitertest.Take(t, l, throttle.MaxTake, "q")
			commands[k] = max(commands[k], calls(t, client)-before)
			if left -= len(taken.Tickets); len(taken.Tickets) == 0 && taken.Next != 0 {
				t.Fatalf("%d of %d tenants still wait", left, n)
			}
		}
	}
	// SCAN returns some more or fewer; without a bound it is six times.
	expect.That(t, commands[1] <= 2*commands[0] && due[1] <= 2*due[0],
		"of", tenants, "tenants a take made", commands, "commands at most, and the first made", due, "nodes due")
}
