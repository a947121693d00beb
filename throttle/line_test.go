package throttle_test

import (
	"container/heap"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// sim runs a whole fleet of workers on a made-up clock: tickets arrive, are granted or told to wait,
// are called, and come after a latency.
type sim struct {
	t       *testing.T
	l       *throttle.Limiter
	now     int64
	events  events
	seq     int
	latency int64
	request func(ticket string) throttle.Request
	gone    map[string]bool
	wakes   map[string]int
	granted map[string]int64
	order   []string
	coming  map[string]bool // called, on its way
	nextDue map[string]int64
}

type simEvent struct {
	at  int64
	seq int
	do  func()
}
type events []simEvent

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(simEvent)) }
func (e *events) Pop() any     { o := *e; x := o[len(o)-1]; *e = o[:len(o)-1]; return x }

func (s *sim) after(d int64, do func()) {
	s.seq++
	heap.Push(&s.events, simEvent{s.now + d, s.seq, do})
}

func newSim(t *testing.T, client redis.UniversalClient, p throttle.Policy) *sim {
	l, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}})
	if err != nil {
		t.Fatal(err)
	}
	// The clock is made up, and Redis would let keys expire by its own.
	if err := l.EditScripts(throttle.WithoutExpiry); err != nil {
		t.Fatal(err)
	}
	s := &sim{t: t, l: l, now: 1_800_000_000_000_000, latency: 15_000, gone: map[string]bool{}, wakes: map[string]int{},
		granted: map[string]int64{}, coming: map[string]bool{}, nextDue: map[string]int64{}}
	l.SetNow(func() int64 { return s.now })
	l.OnLine(func(line throttle.Line) {
		for _, ticket := range line.Calls {
			if s.gone[ticket] {
				s.after(2000, func() {
					if err := l.Leave(t.Context(), p.Name, s.request(ticket).Tenant, ticket); err != nil {
						t.Fatal(err)
					}
				})
				continue
			}
			s.after(s.latency, func() { s.wake(ticket) })
		}
		if line.Due >= 0 {
			at := s.now + line.Due.Microseconds()
			if known, ok := s.nextDue[line.Tenant]; !ok || at < known || known < s.now {
				s.nextDue[line.Tenant] = at
				s.after(max(1, line.Due.Microseconds()), func() {
					if s.nextDue[line.Tenant] != at {
						return
					}
					delete(s.nextDue, line.Tenant)
					if err := l.Pump(t.Context(), p.Name, line.Tenant); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	})
	return s
}

func (s *sim) wake(ticket string) {
	if _, ok := s.granted[ticket]; ok {
		s.t.Fatalf("%s woken after its grant", ticket)
	}
	s.wakes[ticket]++
	r := s.request(ticket)
	r.Ticket = ticket
	d, err := s.l.Reserve(s.t.Context(), r)
	if err != nil {
		s.t.Fatal(err)
	}
	if d.Granted {
		s.granted[ticket] = s.now
		s.order = append(s.order, ticket)
	}
}

func (s *sim) run(until func() bool) {
	for len(s.events) > 0 && !until() {
		e := heap.Pop(&s.events).(simEvent)
		s.now = e.at
		e.do()
	}
}

// want checks what a backlog must show: how often its tickets came, and how much of the ideal rate
// was used from the first to the last grant.
func (s *sim) want(n int, wakes float64, ideal time.Duration, utilization float64) {
	s.t.Helper()
	if len(s.order) != n {
		s.t.Fatalf("%d granted, want %d", len(s.order), n)
	}
	came, most := 0, 0
	for ticket := range s.granted {
		came += s.wakes[ticket]
		most = max(most, s.wakes[ticket])
	}
	if got := float64(came) / float64(n); got > wakes || most > 4 {
		s.t.Errorf("%.3f wakes a ticket, at most %d; want %.2f and 4", got, most, wakes)
	}
	span := time.Duration(s.granted[s.order[n-1]]-s.granted[s.order[0]]) * time.Microsecond
	if got := float64(ideal) / float64(span); got < utilization {
		s.t.Errorf("utilization %.3f, want %.2f: %v for what takes %v", got, utilization, span, ideal)
	}
}

// wantNeverOver recounts the grants of the tickets chosen in every span of the period.
func (s *sim) wantNeverOver(limit int, period time.Duration, chosen func(ticket string) bool) {
	s.t.Helper()
	var times []int64
	for _, ticket := range s.order {
		if chosen == nil || chosen(ticket) {
			times = append(times, s.granted[ticket])
		}
	}
	for i := range times {
		if j := i + limit; j < len(times) && times[j]-times[i] < period.Microseconds() {
			s.t.Fatalf("more than %d in %v from %d on", limit, period, times[i])
		}
	}
}

// wantNoLine checks that nothing of the line is left: only windows and nonces are.
func (s *sim) wantNoLine(client *redis.Client) {
	s.t.Helper()
	for _, key := range client.Keys(s.t.Context(), "*").Val() {
		if !strings.Contains(key, "}:w:") && !strings.Contains(key, "}:n:") {
			s.t.Errorf("%s is left", key)
		}
	}
}

// ofTenant makes the request of a ticket such as "acme 0017".
func ofTenant(ticket string) throttle.Request {
	tenant, _, _ := strings.Cut(ticket, " ")
	return throttle.Request{Policy: "p", Tenant: tenant}
}

func (s *sim) arrive(at time.Duration, tenant string, n int) {
	for i := range n {
		s.after(at.Microseconds()+int64(i*300), func() { s.wake(fmt.Sprintf("%s %04d", tenant, i)) })
	}
}

func fromShared(limit int64) throttle.Window {
	return throttle.Window{Name: "shared", Limit: limit, Period: time.Second, Per: []string{}}
}

// simulate runs the simulation on a real Redis until nothing happens any more.
func simulate(t *testing.T, p throttle.Policy, request func(string) throttle.Request, script func(*sim)) *sim {
	t.Helper()
	p.Name = "p"
	client := throttletest.Client(t, throttletest.Redis(t))
	s := newSim(t, client, p)
	s.request = request
	script(s)
	s.run(func() bool { return false })
	s.wantNoLine(client)
	return s
}

func TestLineOfOneTenant(t *testing.T) {
	t.Parallel()
	s := simulate(t, throttle.Policy{Windows: []throttle.Window{fromShared(20)}}, ofTenant, func(s *sim) { s.arrive(0, "acme", 1000) })
	s.want(1000, 2, 49*time.Second, 0.95)
	s.wantNeverOver(20, time.Second, nil)
	for i, ticket := range s.order {
		if want := fmt.Sprintf("acme %04d", i); ticket != want {
			t.Fatalf("%s is granted as number %d, want %s", ticket, i, want)
		}
	}
}

func TestLineOfShortPeriods(t *testing.T) {
	t.Parallel()
	s := simulate(t, throttle.Policy{Windows: []throttle.Window{{Name: "w", Limit: 5, Period: 100 * time.Millisecond}}}, ofTenant,
		func(s *sim) { s.arrive(0, "acme", 500) })
	s.want(500, 2, 9900*time.Millisecond, 0.85)
	s.wantNeverOver(5, 100*time.Millisecond, nil)
}

func TestLineSharesByWeight(t *testing.T) {
	t.Parallel()
	var from int64
	s := simulate(t, throttle.Policy{Windows: []throttle.Window{fromShared(50)}, Tenants: map[string]throttle.Tenant{"d": {Weight: 2}}}, ofTenant,
		func(s *sim) {
			from = s.now
			s.arrive(0, "a", 1500)
			s.arrive(5*time.Second, "b", 250)
			s.arrive(5*time.Second, "d", 500)
			s.arrive(10*time.Second, "c", 250)
		})
	s.want(2500, 2, 49*time.Second, 0.95)
	s.wantNeverOver(50, time.Second, nil)
	shares := map[string]int{}
	for ticket, at := range s.granted {
		if at -= from; at > 11e6 && at < 21e6 { // while all four wait
			shares[ticket[:1]]++
		}
	}
	if fmt.Sprint(shares) != "map[a:100 b:100 c:100 d:200]" {
		t.Errorf("shares of 500 units by the weights 1, 1, 1 and 2: %v", shares)
	}
}

// A tenant over its own limit holds up nobody at the shared window.
func TestLineOfManyTenants(t *testing.T) {
	t.Parallel()
	own := throttle.Window{Name: "own", Limit: 5, Period: 3 * time.Second}
	s := simulate(t, throttle.Policy{Windows: []throttle.Window{own, fromShared(50)}}, ofTenant, func(s *sim) {
		for i := range 200 {
			s.arrive(time.Duration(i)*time.Millisecond, fmt.Sprint("t", i), 8)
		}
	})
	s.want(1600, 2, 31*time.Second, 0.95)
	s.wantNeverOver(50, time.Second, nil)
	s.wantNeverOver(5, 3*time.Second, func(ticket string) bool { return strings.HasPrefix(ticket, "t7 ") })
}

func TestLineOfManyScopes(t *testing.T) {
	t.Parallel()
	windows := []throttle.Window{
		{Name: "user", Limit: 1, Period: time.Second, Per: []string{"tenant", "user"}},
		{Name: "own", Limit: 5, Period: time.Second},
		{Name: "region", Limit: 12, Period: time.Second, Per: []string{"region"}},
		fromShared(20),
	}
	s := simulate(t, throttle.Policy{Windows: windows}, func(ticket string) throttle.Request {
		var tenant, user, region, n int
		fmt.Sscanf(ticket, "%d %d %d %d", &tenant, &user, &region, &n)
		return throttle.Request{Policy: "p", Tenant: fmt.Sprint(tenant), Attributes: map[string]string{"user": fmt.Sprint(user), "region": fmt.Sprint(region)}}
	}, func(s *sim) {
		for i := range 1000 {
			s.after(int64(i*300), func() { s.wake(fmt.Sprintf("%d %d %d %04d", i%8, i/8%10, i%3, i)) })
		}
	})
	s.want(1000, 2, 49*time.Second, 0.9)
	s.wantNeverOver(20, time.Second, nil)
	s.wantNeverOver(12, time.Second, func(ticket string) bool { return strings.Split(ticket, " ")[2] == "1" })
	s.wantNeverOver(5, time.Second, func(ticket string) bool { return strings.HasPrefix(ticket, "3 ") })
	s.wantNeverOver(1, time.Second, func(ticket string) bool { return strings.HasPrefix(ticket, "3 4 ") })
}

// What was held for tickets that are gone goes to the next at once.
func TestLineOfWhichHalfIsGone(t *testing.T) {
	t.Parallel()
	s := simulate(t, throttle.Policy{Windows: []throttle.Window{fromShared(20)}}, ofTenant, func(s *sim) {
		s.arrive(0, "acme", 1000)
		s.after(1e6, func() {
			for i := 0; i < 1000; i += 2 {
				s.gone[fmt.Sprintf("acme %04d", i)] = true
			}
		})
	})
	n := len(s.order)
	if n < 500 || n > 520 {
		t.Fatalf("%d granted", n)
	}
	s.want(n, 2, time.Duration(n-20)*time.Second/20, 0.9)
	s.wantNeverOver(20, time.Second, nil)
}
