package linetest

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A fleet is servers with handler slots, and their queue, on a made-up clock: jobs join the line,
// servers ask when the line says so or when they are nudged, and handlers take their time. Nothing
// here takes real time but the calls to Redis.
type fleet struct {
	t       *testing.T
	st      *story
	p       throttle.Policy
	servers []*fleetServer
	request func(job string) throttle.Request
	takes   int // how long a job takes (ms); 0 is none

	now     time.Duration
	moments moments
	seq     int
	random  *rand.Rand
	joined  map[string]time.Duration
	granted map[string]time.Duration
	order   []string
	logs    map[string][]limitertest.Grant
	asked   int
	asleep  []*fleetServer // waiting for a nudge, the longest first
}

type fleetServer struct {
	l      *throttle.Limiter
	free   int
	asksAt time.Duration // below 0: never
}

// A moment is something that happens at its time.
type moment struct {
	at  time.Duration
	seq int
	do  func()
}

type moments []moment

func (m moments) Len() int { return len(m) }
func (m moments) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(m[i].at, m[j].at), m[i].seq-m[j].seq) < 0
}
func (m moments) Swap(i, j int) { m[i], m[j] = m[j], m[i] }
func (m *moments) Push(x any)   { *m = append(*m, x.(moment)) }
func (m *moments) Pop() any     { all := *m; last := all[len(all)-1]; *m = all[:len(all)-1]; return last }

// newFleet has so many servers of 8 slots. Jobs are named "TENANT NUMBER".
func newFleet(t *testing.T, client *redis.Client, servers int, p throttle.Policy) *fleet {
	t.Helper()
	f := &fleet{
		t: t, st: newStory(t, client, p), p: p.WithDefaults(), random: rand.New(rand.NewPCG(1, 2)),
		request: func(job string) throttle.Request { return throttle.Request{Tenant: strings.Fields(job)[0]} },
		joined:  map[string]time.Duration{}, granted: map[string]time.Duration{}, logs: map[string][]limitertest.Grant{},
	}
	for range servers {
		server := &fleetServer{l: f.st.server().l, free: 8}
		f.servers = append(f.servers, server)
		f.asleep = append(f.asleep, server)
	}
	return f
}

func (f *fleet) at(at time.Duration, do func()) {
	f.seq++
	heap.Push(&f.moments, moment{max(at, f.now), f.seq, do})
}

const loop = 600 * us // that a network and a loop cost at most

// after is a while from now, and what a network and a loop cost.
func (f *fleet) after(d time.Duration, do func()) {
	f.at(f.now+d+loop/3+time.Duration(f.random.IntN(400))*us, do)
}

func (f *fleet) ask(server *fleetServer) {
	f.asleep = slices.DeleteFunc(f.asleep, func(other *fleetServer) bool { return other == server })
	if server.free == 0 {
		server.asksAt = -1
		return
	}
	f.asked++
	taken := limitertest.Take(f.t, server.l, server.free, "q")
	for _, ticket := range taken.Tickets {
		f.grant(ticket)
		server.free--
		f.after(time.Duration(f.takes)*ms, func() {
			if server.free++; server.asksAt < 0 || f.takes > 0 {
				f.ask(server)
			}
		})
	}
	if server.asksAt = -1; taken.Next >= 0 && server.free > 0 {
		f.appointment(server, taken.Next)
	} else if taken.Next < 0 {
		f.asleep = append(f.asleep, server)
	}
}

func (f *fleet) appointment(server *fleetServer, in time.Duration) {
	at := f.now + in
	server.asksAt = at
	f.asleep = append(f.asleep, server)
	f.after(in, func() {
		if server.asksAt == at {
			f.ask(server)
		}
	})
}

func (f *fleet) grant(ticket throttle.TakenTicket) {
	job := ticket.ID
	if _, ok := f.granted[job]; ok {
		f.t.Fatalf("%s is taken twice", job)
	}
	f.granted[job] = f.now
	f.order = append(f.order, job)
	for _, w := range ticket.Decision.Windows {
		i := slices.IndexFunc(f.p.Windows, func(window throttle.Window) bool { return window.Name == w.Name })
		name := w.Name + "/" + w.Scope.String()
		f.logs[name] = append(f.logs[name], limitertest.Grant{At: ticket.Decision.At.UnixMicro(), Units: limitertest.CostOf(f.p.Windows[i], ticket.Decision.Reservation.Request)})
	}
}

func (f *fleet) join(job string) {
	r := f.request(job)
	r.Ticket = limitertest.Ticket(job)
	place := limitertest.Join(f.t, f.st.l, r)
	f.joined[job] = f.now
	if place.Nudge && len(f.asleep) > 0 {
		server := f.asleep[0]
		f.after(0, func() { f.ask(server) })
	}
}

// arrive enqueues n jobs of a tenant, 300 us apart.
func (f *fleet) arrive(at time.Duration, tenant string, n int) {
	for i := range n {
		f.at(at+time.Duration(i)*300*us, func() { f.join(fmt.Sprintf("%s %05d", tenant, i)) })
	}
}

// run lets time go by until n jobs are granted. It fails if that takes longer than the time given.
func (f *fleet) run(n int, most time.Duration) {
	f.t.Helper()
	for len(f.granted) < n {
		if len(f.moments) == 0 || f.now > most {
			f.t.Fatalf("after %v %d of %d jobs are through", f.now, len(f.granted), n)
		}
		next := heap.Pop(&f.moments).(moment)
		f.now = next.at
		f.st.at(f.now)
		next.do()
	}
	for name, log := range f.logs {
		window, _, _ := strings.Cut(name, "/")
		i := slices.IndexFunc(f.p.Windows, func(w throttle.Window) bool { return w.Name == window })
		if over := limitertest.MostOver(f.p.Windows[i], log); over > 0 {
			f.t.Errorf("%s: %d units over", name, over)
		}
	}
	last := map[string]int{}
	for _, job := range f.order {
		fields := strings.Fields(job)
		n, _ := strconv.Atoi(fields[1])
		if before, ok := last[fields[0]]; ok && before > n {
			f.t.Errorf("%s was taken after %d", job, before)
		}
		last[fields[0]] = n
	}
}

// latest returns when n jobs are through at the latest, of which a period lets `limit` start. Each
// starts a period after another one, and is late by an appointment, and what merged grants are late.
func (f *fleet) latest(n, limit int, period time.Duration) time.Duration {
	late := spacing + loop
	if limit > 192 {
		late += period / 96
	}
	periods := (n - 1) / limit
	return f.granted[f.order[n-1-periods*limit]] + steps(periods)*(period+late)
}

// keepsPace fails the test if jobs took longer than the limit of a period allows, or if servers ask
// more often than at all appointments, for each join, and when each job ends.
func (f *fleet) keepsPace(limit int, period time.Duration) {
	f.t.Helper()
	n := len(f.order)
	last := f.granted[f.order[n-1]]
	if most := f.latest(n, limit, period); last > most {
		f.t.Errorf("done at %v, want %v", last, most)
	}
	if most := int(last/spacing) + 2*n + len(f.servers); f.asked > most {
		f.t.Errorf("asked %d times for %d jobs, want at most %d", f.asked, n, most)
	}
}

func TestAFleetUsesWhatTheWindowsAllow(t *testing.T) {
	own := func(limit int64, period time.Duration) throttle.Window {
		return throttle.Window{Name: "own", Limit: limit, Period: period}
	}
	for name, tc := range map[string]struct {
		windows []throttle.Window
		jobs    int
		limit   int
		period  time.Duration
	}{
		"20 a second":           {[]throttle.Window{own(20, s)}, 200, 20, s},
		"20 a second, shared":   {[]throttle.Window{limitertest.SharedWindow(20, s)}, 200, 20, s},
		"100 in 5 seconds":      {[]throttle.Window{own(100, 5*s)}, 200, 100, 5 * s},
		"20 a minute, 5 in 3 s": {[]throttle.Window{own(20, m), {Name: "burst", Limit: 5, Period: 3 * s}}, 100, 20, m},
		"5 in 100 ms":           {[]throttle.Window{own(5, 100*ms)}, 100, 5, 100 * ms},
		"fixed":                 {[]throttle.Window{{Name: "own", Algorithm: throttle.AlgorithmFixed, Limit: 20, Period: s}}, 200, 20, s},
		"gcra":                  {[]throttle.Window{{Name: "own", Algorithm: throttle.AlgorithmGCRA, Limit: 20, Burst: 5, Period: s}}, 100, 5, 250 * ms},
		"three algorithms": {[]throttle.Window{
			limitertest.SharedWindow(30, s),
			{Name: "fixed", Algorithm: throttle.AlgorithmFixed, Limit: 45, Period: 3 * s},
			{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 20, Burst: 20, Period: s},
		}, 300, 45, 3 * s},
		"300 in 10 seconds, merged": {[]throttle.Window{own(300, 10*s)}, 600, 300, 10 * s},
	} {
		t.Run(name, func(t *testing.T) {
			client := limitertest.Redis(t)
			f := newFleet(t, client, 5, limitertest.Policy(tc.windows...))
			f.arrive(0, "acme", tc.jobs)
			f.run(tc.jobs, h)
			f.keepsPace(tc.limit, tc.period)
			limitertest.IsGone(t, client)
		})
	}
}
