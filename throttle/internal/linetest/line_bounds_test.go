package linetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// anyCrossing is one to four windows of scopes that may cross, and tenants of any weights.
func anyCrossing(random *rand.Rand) throttle.Policy {
	scopes := []throttle.Scope{throttle.ScopeShared, {}, throttle.Per("tenant", "user"), throttle.Per("region"), throttle.Per("tenant", "region")}
	if random.IntN(2) == 0 {
		scopes = scopes[:2]
	}
	var windows []throttle.Window
	for i := range 1 + random.IntN(4) {
		w := throttle.Window{
			Name: fmt.Sprint("w", i), Limit: 3 + random.Int64N(9), Period: time.Duration(1+random.IntN(20)) * s,
			Algorithm: []throttle.Algorithm{throttle.AlgorithmSliding, throttle.AlgorithmSliding, throttle.AlgorithmFixed, throttle.AlgorithmGCRA}[random.IntN(4)],
			Scope:     scopes[random.IntN(len(scopes))],
			Unit:      []string{"requests", "requests", "tokens"}[random.IntN(3)],
		}
		switch {
		case w.Algorithm == throttle.AlgorithmGCRA:
			w.Burst = 3 + random.Int64N(5)
		case w.Algorithm == throttle.AlgorithmFixed && random.IntN(2) == 0:
			w.Anchor = throttle.AnchorFirstUse
		}
		windows = append(windows, w)
	}
	p := limitertest.Policy(windows...)
	p.Tenants = map[string]throttle.Tenant{
		"b": {Weight: []float64{0.01, 0.5, 1, 4}[random.IntN(4)]}, "c": {Weight: []float64{0.1, 1, 9}[random.IntN(3)]},
	}
	return p
}

// Whatever the scopes, the costs and the weights of tenants are: if nobody else comes, nobody starts
// after the latest start that it was told.
func TestExpectedStartsOfManyTenantsAreBounds(t *testing.T) {
	client := limitertest.Redis(t)
	var real, most time.Duration
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 77))
		p := anyCrossing(random)
		st := newStory(t, client, p)
		equal := random.IntN(2) == 0
		st.with = map[string]string{}
		tokens := false
		for _, w := range p.Windows {
			tokens = tokens || w.Unit == "tokens"
		}
		anyRequest := func(i int) throttle.Request {
			if !equal || i <= 0 {
				st.cost, st.tokens = 1+random.Int64N(3), 0
				if tokens {
					st.tokens = 1 + random.Int64N(3)
				}
			}
			st.with = map[string]string{"user": []string{"u", "v"}[random.IntN(2)], "region": []string{"n", "s"}[random.IntN(2)]}
			return st.of(fmt.Sprintf("%c%03d", "aabc"[random.IntN(4)], i))
		}
		now := time.Duration(random.IntN(60_000)) * ms
		for range random.IntN(6) {
			st.at(now)
			r := anyRequest(-1)
			r.Ticket = throttle.Ticket{}
			limitertest.Reserve(t, st.l, r)
			now += time.Duration(random.IntN(3_000_000)) * us
		}
		starts, requests := map[string]time.Duration{}, map[string]throttle.Request{}
		for i := range 30 {
			st.at(now)
			r := anyRequest(i)
			requests[r.Ticket.ID] = r
			limitertest.Join(t, st.l, r)
			if random.IntN(4) == 0 {
				now = st.takesUntil(now+time.Duration(random.IntN(3_000_000))*us, starts)
			}
		}
		st.at(now)
		told := map[string]throttle.Place{}
		for id, r := range requests {
			if _, gone := starts[id]; gone {
				continue
			}
			places, err := st.line().Join(t.Context(), []throttle.Request{r})
			if err != nil || !places[0].AlreadyQueued {
				t.Fatalf("%+v, %v", places, err)
			}
			told[id] = places[0]
		}
		for id, start := range st.starts() {
			starts[id] = start
		}
		for id, place := range told {
			start, ok := starts[id]
			start -= now
			real, most = real+start, most+place.Latest
			if !ok || start > place.Latest {
				t.Errorf("seed %d: %s starts after %v (%v), it was told %v to %v: %+v", seed, id, start, ok, place.Expected, place.Latest, p.Windows)
			}
		}
	}
	// Measured by these seeds: bounds may come closer, and not go farther.
	const measured = 3.26
	t.Logf("latest starts are %.2f times the real ones", most.Seconds()/real.Seconds())
	if float64(most) > measured*float64(real) {
		t.Errorf("the upper bounds are %v in all, the starts %v", most, real)
	}
}

// A request without a ticket may start as soon as the windows let it, if all who wait leave. Only a
// deadline before that refuses it.
func TestDeadlinesRefuseRequestsWithoutATicket(t *testing.T) {
	client := limitertest.Redis(t)
	st := newStory(t, client, limitertest.Policy(limitertest.SharedWindow(1, s)))
	st.granted("a0")
	st.joins("a1", "b1", "c1")
	r := st.without("d")
	r.Deadline = time.Now().Add(60 * s)
	limitertest.WantDenied(t, limitertest.Reserve(t, st.l, r), 4*s)
	r.Deadline = time.Now().Add(s / 2)
	var late *throttle.TooLateError
	if _, err := st.l.Reserve(t.Context(), r); !errors.As(err, &late) || !late.Deadline.Equal(r.Deadline) {
		t.Errorf("with a deadline before the window has room: %v", err)
	}
}

// Tenants that are delayed by windows of their own make others expect to wait. But a deadline is
// not missed by that: the others may start at once.
func TestDeadlineOfTicketsBehindThoseHeldUpNarrower(t *testing.T) {
	client := limitertest.Redis(t)
	l, c := limitertest.NewHanded(t, client, limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: time.Hour}, limitertest.SharedWindow(10, s)))
	join := func(tenant, id string, deadline time.Duration) throttle.Place {
		t.Helper()
		r := throttle.Request{Tenant: tenant, Ticket: limitertest.Ticket(id)}
		if deadline > 0 {
			r.Deadline = time.Now().Add(deadline)
		}
		places, err := l.Line("p").Join(t.Context(), []throttle.Request{r})
		limitertest.Must(t, err)
		return places[0]
	}
	now := time.Duration(0)
	for i := range 40 {
		tenant := fmt.Sprint("t", i)
		join(tenant, tenant+" first", 0)
		join(tenant, tenant+" second", 0)
	}
	for n := 0; n < 40; now += s {
		c.Set(now)
		n += len(limitertest.Take(t, l, 64, "q").Tickets)
	}
	c.Set(now)
	for i := range 10 {
		join(fmt.Sprint("full", i), fmt.Sprint("full", i), 0)
	}
	if n := len(limitertest.Take(t, l, 64, "q").Tickets); n != 10 {
		t.Fatalf("took %d, want the 10 that fill the shared window", n)
	}
	if place := join("new", "too late", 500*ms); place.Err == nil {
		t.Error("it joined, and the shared window is full for longer than it has time")
	}
	place := join("new", "in time", 1900*ms)
	if place.Err != nil {
		t.Fatalf("refused, and it starts in a second: %v", place.Err)
	}
	c.Set(now + s)
	wantTaken(t, l, 64, "in time", "q")
}

// Where slots hold tickets up, and not limits, they are expected at the rate of the takes.
func TestExpectedStartsWhereSlotsBind(t *testing.T) {
	client := limitertest.Redis(t)
	st := newStory(t, client, limitertest.Policy(limitertest.SharedWindow(1_000_000, s)))
	requests := make([]throttle.Request, 200)
	for i := range requests {
		requests[i] = throttle.Request{Tenant: "a", Ticket: limitertest.Ticket(fmt.Sprint("a", i))}
	}
	limitertest.Join(t, st.l, requests...)
	for now := time.Duration(0); now <= 2*s; now += 100 * ms {
		if n := len(limitertest.Take(t, st.at(now).l, 5, "q").Tickets); n != 5 {
			t.Fatalf("took %d at %v", n, now)
		}
	}
	// 95 wait, and 50 go a second.
	if p := st.joins("a900"); p.Binds != throttle.BySlots || p.Expected != 1900*ms || p.Latest != 0 {
		t.Errorf("behind 95: %+v, want 1.9s, as slots bind", p)
	}
	if p := st.joins("a900"); !p.AlreadyQueued || p.Binds != throttle.BySlots || p.Expected != 1900*ms {
		t.Errorf("again: %+v, want 1.9s, as slots bind", p)
	}
	if p := st.joins("b900"); p.Binds == throttle.BySlots || p.Expected != 0 {
		t.Errorf("first of another tenant: %+v, want 0", p)
	}
	// Half of what goes is the other tenant's.
	st.joins("b901", "b902", "b903", "b904", "b905", "b906", "b907", "b908")
	if p := st.joins("b909"); p.Binds != throttle.BySlots || p.Expected != 360*ms {
		t.Errorf("behind 9 of its own: %+v, want 360ms, as slots bind", p)
	}
	for range 2 {
		limitertest.Take(t, st.l, throttle.MaxTake, "q")
	}
	if p := st.joins("a901"); p.Binds == throttle.BySlots || p.Expected != 0 {
		t.Errorf("while slots are free: %+v, want 0", p)
	}
}
