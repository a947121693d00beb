package linetest

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// What is removed goes on being taken from until its line is empty.
func TestRemovedPolicies(t *testing.T) {
	keep := throttle.Policy{Name: "keep", Windows: []throttle.Window{{Name: "w", Limit: 1, Period: s}}}
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
	d := st.granted("a1")
	st.waits("a2", "a3")
	check := func(want ...string) {
		t.Helper()
		expect.Equal(t, st.l.Lines(), want)
	}
	check("p")
	st.set(keep)
	check("keep", "p")
	expect.Err(t, expect.ErrOf(st.l.Reserve(t.Context(), st.request("a4"))), throttle.ErrUnknownPolicy)
	expect.Equal(t, limitertest.Cancel(t, st.l, d.Reservation).Granted, true)
	st.takes("a2").putBack("a2")
	st.takes("a2")
	st.at(5 * s).takes()
	check("keep", "p")
	next := limitertest.Take(t, st.l, 1, "another").Next
	expect.That(t, next < 0, "next", next)
	check("keep", "p") // somebody waits elsewhere
	st.at(10 * s).takes("a3").takes()
	limitertest.Until(t, "the empty line has been left", func() bool { return len(st.l.Lines()) == 1 })
	st.set(limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
	check("p", "keep")
	st.at(20 * s).granted("a5")
}

// A changed weight or limit of a tenant holds for its waiting tickets.
func TestTenantsChangeWhileTheirTicketsWait(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 10 * s}, limitertest.SharedWindow(100, 10*s))
	p.Tenants = map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}
	st := newStory(t, limitertest.RedisClient(t), p)
	st.granted("a0")
	st.waits("a1", "a2", "a3", "a4")
	p.Windows[0].Limit = 5 // a has its own limit, though it was the same
	st.set(p)
	st.takes()
	p.Tenants = map[string]throttle.Tenant{"a": {Weight: 7, Windows: map[string]throttle.Override{"own": {Limit: 3}}}}
	st.set(p)
	var got []string
	for end := time.Now().Add(m); len(got) < 2 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		st.c.US.Add(1) // the refresh is in the background, and what it changes is due at its time
		for _, ticket := range limitertest.Take(t, st.l, 64, "q").Tickets {
			got = append(got, ticket.ID)
			expect.Equal(t, ticket.Decision.Windows[0].Limit, 3)
		}
	}
	expect.Equal(t, got, []string{"a1", "a2"})
	record := st.client.HGet(t.Context(), "sluice:{p}:f", "q|a").Val()
	expect.That(t, strings.Contains(record, " 7000 "), "the weight is not written", record)
}

// All that a limiter hands out is the caller's to change.
func TestNothingThatIsHandedOutIsLive(t *testing.T) {
	client := limitertest.RedisClient(t)
	p := throttle.Policy{
		Name: "p", Match: []string{"http:*"}, Windows: []throttle.Window{{Name: "w", Limit: 5, Period: m, Per: []string{"tenant", "user"}}},
		Tenants: map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"w": {Limit: 2}}}},
	}
	l := limitertest.New(t, client, p)
	want := l.Policies()
	for _, got := range []throttle.Policy{l.Policies()[0], p} {
		got.Match[0], got.Windows[0].Limit, got.Windows[0].Per[0] = "other", 1, "other"
		got.Tenants["a"].Windows["w"] = throttle.Override{Limit: 1}
		got.Tenants["b"] = throttle.Tenant{}
	}
	r := throttle.Request{Policy: "p", Tenant: "a", Attributes: map[string]string{"user": "bob"}}
	d := limitertest.Reserve(t, l, r)
	d.Windows[0].Scope.Attributes[0], d.Windows[0].Scope.Values[0] = "other", "other"
	_ = append(d.Windows[0].Scope.Attributes, "more")
	w := limitertest.Reserve(t, l, r).Windows[0]
	expect.That(t, w.Scope.String() == "tenant=a,user=bob" && w.Limit == 2, w)
	expect.Equal(t, l.Policies(), want)
	matched := want[0]
	matched.Match, matched.Tenants, matched.Windows = nil, nil, nil
	got, _ := l.Match("http:get", false)
	expect.Equal(t, got, matched)
	_, ok := l.Match("smtp", false)
	expect.Equal(t, ok, false, "matched")
	_, ok = l.Lookup("q")
	expect.Equal(t, ok, false, "found")
}

// While the clock is behind, each ticket of a take is granted at the time of the windows, and given back from there.
func TestRefundOfWhatWasTakenWhileTheClockIsBehind(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(5, 10*s)))
	st.at(20 * s).granted("a0")
	st.at(15*s).joins("a1", "a2", "a3")
	st.takes("a1", "a2", "a3")
	var give []throttle.TakenTicket
	for _, id := range []string{"a1", "a2", "a3"} {
		expect.Equal(t, st.took[id].Decision.At, limitertest.At(20*s), id)
		give = append(give, st.took[id])
	}
	expect.Must(t, st.line().Refund(t.Context(), give))
	limitertest.WantUsed(t, st.l, limitertest.Acme(1), 1)
}

// A reset empties what it is asked for, and what waits behind it starts.
func TestAResetLetsGoWhatWaits(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(
		throttle.Window{Name: "own", Limit: 1, Period: h},
		throttle.Window{Name: "users", Limit: 2, Period: h, Per: []string{"tenant", "user"}},
		throttle.Window{Name: "all", Limit: 5, Period: h, Shared: true},
	))
	reset := func(tenant string, want int) {
		t.Helper()
		n, err := st.l.Reset(t.Context(), "p", tenant)
		expect.That(t, err == nil && n == want, "emptied", n, "counts, want", want, err)
	}
	used := func(tenant string, want ...int64) {
		t.Helper()
		for i, w := range limitertest.Peek(t, st.l, st.without(tenant)).Windows {
			expect.Equal(t, w.Used, want[i], tenant, w.Name)
		}
	}
	st.attributes = map[string]string{"user": "u,:%"}
	st.granted("a1", "b1", "c1", "\n1")
	st.waits("a2", "b2")
	st.at(s).takes()
	reset("\n", 2)
	reset("a", 2)
	used("a", 0, 0, 4)
	used("b", 1, 1, 4)
	st.at(3 * s).takes("a2")
	st.at(4 * s).waits("a3")
	st.takes()
	reset("", 7)
	used("a", 0, 0, 0)
	st.at(6*s).takes("b2", "a3").asks(-1)
	st.granted("c9")
	expect.Must(t, st.l.SetPolicies(nil)) // what waits for a removed policy starts, too
	reset("c", 2)
	expect.Err(t, expect.ErrOf(st.l.Reset(t.Context(), "q", "")), throttle.ErrUnknownPolicy)
	expect.Err(t, expect.ErrOf(st.l.Reset(t.Context(), "q", "a")), throttle.ErrUnknownPolicy)
}
