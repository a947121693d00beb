package linetest

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// What is removed goes on being taken from until its line is empty.
func TestRemovedPolicies(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		keep := throttle.Policy{Name: "keep", Windows: []throttle.Window{{Name: "w", Limit: 1, Period: s}}}
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
		d := sc.granted("a1")
		sc.waits("a2", "a3")
		check := func(want ...string) {
			t.Helper()
			if got := sc.l.Lines(); !slices.Equal(got, want) {
				t.Errorf("take from %q, want %q", got, want)
			}
		}
		check("p")
		sc.set(keep)
		check("keep", "p")
		if _, err := sc.l.Reserve(t.Context(), sc.of("a4")); !errors.Is(err, throttle.ErrUnknownPolicy) {
			t.Error(err)
		}
		if d := limitertest.Cancel(t, sc.l, d.Reservation); !d.Granted {
			t.Errorf("%+v", d)
		}
		sc.takes("a2")
		sc.putBack("a2")
		sc.takes("a2")
		sc.at(5 * s).takes()
		check("keep", "p")
		if next := limitertest.Take(t, sc.l, 1, "another").Next; next >= 0 {
			t.Errorf("next %v", next)
		}
		check("keep", "p") // somebody waits elsewhere
		sc.at(10 * s).takes("a3").takes()
		check("keep")
		sc.set(limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
		check("p", "keep")
		sc.at(20 * s).granted("a5")
	})
}

// A changed weight or limit of a tenant holds for its waiting tickets.
func TestTenantsChangeWhileTheirTicketsWait(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(throttle.Window{Name: "own", Limit: 5, Period: 10 * s}, limitertest.SharedWindow(100, 10*s))
		p.Tenants = map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}
		sc := newScene(t, client, p)
		sc.granted("a0")
		sc.waits("a1", "a2", "a3", "a4")
		sc.takes()
		p.Tenants = map[string]throttle.Tenant{"a": {Weight: 7, Windows: map[string]throttle.Override{"own": {Limit: 3}}}}
		sc.set(p)
		var got []string
		for end := time.Now().Add(m); len(got) < 2 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			sc.c.US.Add(1) // the refresh is in the background, and what it changes is due at its time
			for _, ticket := range limitertest.Take(t, sc.l, 64, "q").Tickets {
				got = append(got, ticket.ID)
				if w := ticket.Decision.Windows[0]; w.Limit != 3 {
					t.Errorf("%+v", w)
				}
			}
		}
		if !slices.Equal(got, []string{"a1", "a2"}) {
			t.Errorf("took %q", got)
		}
		if record := client.HGet(t.Context(), "sluice:{p}:f", "q|a").Val(); !strings.Contains(record, " 7000 ") {
			t.Errorf("the weight is not written: %q", record)
		}
	})
}

// All that a limiter hands out is the caller's to change.
func TestNothingThatIsHandedOutIsLive(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		p := throttle.Policy{
			Name: "p", Match: []string{"http:*"}, Windows: []throttle.Window{{Name: "w", Limit: 5, Period: m, Scope: throttle.Per("tenant", "user")}},
			Tenants: map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"w": {Limit: 2}}}},
		}
		l := limitertest.New(t, client, p)
		want := l.Policies()
		for _, got := range []throttle.Policy{l.Policies()[0], p} {
			got.Match[0], got.Windows[0].Limit, got.Windows[0].Scope.Attributes()[0] = "other", 1, "other"
			got.Tenants["a"].Windows["w"] = throttle.Override{Limit: 1}
			got.Tenants["b"] = throttle.Tenant{}
		}
		r := throttle.Request{Policy: "p", Tenant: "a", Attributes: map[string]string{"user": "bob"}}
		d := limitertest.Reserve(t, l, r)
		d.Windows[0].Scope.Attributes[0], d.Windows[0].Scope.Values[0] = "other", "other"
		_ = append(d.Windows[0].Scope.Attributes, "more")
		if d := limitertest.Reserve(t, l, r); d.Windows[0].Scope.String() != "tenant=a,user=bob" || d.Windows[0].Limit != 2 {
			t.Errorf("%+v", d.Windows)
		}
		if got := l.Policies(); !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
		if info, ok := l.Match("http:get"); !ok || info != (throttle.PolicyInfo{MaxPause: h, Name: "p", Fail: throttle.FailClosed, Requeue: throttle.RequeueWhenFits}) {
			t.Errorf("%+v", info)
		}
		if _, ok := l.Match("smtp"); ok {
			t.Error("matched")
		}
		if _, ok := l.Lookup("q"); ok {
			t.Error("found")
		}
	})
}

// A ticket that joined when the policy had other scopes is granted nothing in line, though its
// attributes may be the same: a window that was added since would not count it.
func TestTicketsThatJoinedByOtherScopes(t *testing.T) {
	t.Parallel()
	all := limitertest.SharedWindow(4, h)
	own := throttle.Window{Name: "own", Limit: 2, Period: h}
	region := throttle.Window{Name: "region", Limit: 2, Period: h, Scope: throttle.Per("region")}
	both := throttle.Window{Name: "both", Limit: 2, Period: h, Scope: throttle.Per("tenant", "region")}
	type row struct{ before, after []throttle.Window }
	limitertest.EachOf(t, map[string]row{
		"a tenant's own window comes":   {[]throttle.Window{all}, []throttle.Window{own, all}},
		"a window is counted otherwise": {[]throttle.Window{both, all}, []throttle.Window{own, region, all}},
		"a narrower window comes":       {[]throttle.Window{both}, []throttle.Window{own, both}},
	}, func(t *testing.T, client *redis.Client, change row) {
		l, _ := limitertest.NewHanded(t, client, limitertest.Policy(change.before...))
		r := limitertest.Acme(1)
		r.Attributes = map[string]string{"region": "north"}
		full := r
		full.Cost = map[string]int64{throttle.Requests: change.before[0].Limit}
		taken := limitertest.Reserve(t, l, full).Reservation
		var requests []throttle.Request
		for i := range 4 {
			r.Ticket = limitertest.Ticket(fmt.Sprint("t", i))
			requests = append(requests, r)
		}
		limitertest.Join(t, l, requests...)
		limitertest.Cancel(t, l, taken)
		limitertest.SetPolicy(t, l, change.after...)
		granted := 0
		for _, ticket := range limitertest.Take(t, l, 64, "q").Tickets {
			r.Ticket = ticket.Ticket
			if l.Line("p").Matches(ticket, r) {
				granted++
				continue
			}
			d, err := l.Line("p").ReserveAgain(t.Context(), ticket, r)
			limitertest.Must(t, err)
			if d.Granted {
				granted++
			}
		}
		if granted != 2 {
			t.Errorf("%d are granted of 2", granted)
		}
		r.Ticket = throttle.Ticket{}
		for _, w := range limitertest.Peek(t, l, r).Windows {
			if w.Used != 2 {
				t.Errorf("%s: %d are used of 2", w.Name, w.Used)
			}
		}
		limitertest.Agrees(t, client)
	})
}

// The clock is set back by 100 s while tickets wait. None is granted until the clock has caught up,
// and then each has its turn.
func TestClockThatStepsBackBesideALine(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(2, 10*s)))
		sc.at(200*s).granted("a1", "a2")
		sc.waits("a3", "a4", "a5", "b1")
		sc.at(210*s).takes("a3", "b1")

		sc.at(110 * s)
		sc.waits("c1")
		for _, back := range []time.Duration{111 * s, 150 * s, 209 * s, 220*s - us} {
			sc.at(back).takes()
			sc.waits("a4", "a5", "c1", "c2")
		}
		sc.at(220*s).takes("c1", "a4") // a had its two already
		sc.at(230*s).takes("c2", "a5")
	})
}

// While the clock is behind, each ticket of a take is granted at the time of the windows, and given
// back from there.
func TestRefundOfWhatWasTakenWhileTheClockIsBehind(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(5, 10*s)))
		sc.at(20 * s).granted("a0")
		sc.at(15*s).joins("a1", "a2", "a3")
		sc.takes("a1", "a2", "a3")
		var give []throttle.TakenTicket
		for _, id := range []string{"a1", "a2", "a3"} {
			if at := sc.took[id].Decision.At; !at.Equal(limitertest.At(20 * s)) {
				t.Errorf("%s was granted at %v, want %v", id, at, limitertest.At(20*s))
			}
			give = append(give, sc.took[id])
		}
		limitertest.Must(t, sc.l.Line("p").Refund(t.Context(), give))
		if d := limitertest.Peek(t, sc.l, limitertest.Acme(1)); !slices.Equal(limitertest.Used(d), []int64{1}) {
			t.Errorf("used %v, want 1", limitertest.Used(d))
		}
	})
}

// A ticket that waits for several resets learns the right one, by the calendar and not by the
// length of today. Beyond the ticks that are sent, the pace is the same.
func TestCalendarPromises(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.Quota(1, "0 0 1 * *", "UTC")))
		sc.at(limitertest.Day(t, "2027-01-31T00:00:00Z")).granted("a0")
		for i, want := range []string{"2027-02-01T00:00:00Z", "2027-03-01T00:00:00Z", "2027-04-01T00:00:00Z", "2027-05-01T00:00:00Z"} {
			ticket := []string{"a1", "a2", "a3", "a4"}[i]
			sc.denied(ticket, limitertest.Day(t, want)-limitertest.Day(t, "2027-01-31T00:00:00Z"))
		}
		sc.at(limitertest.Day(t, "2027-02-01T00:00:00Z") - us).takes()
		sc.at(limitertest.Day(t, "2027-02-01T00:00:00Z")).takes("a1")
		sc.at(limitertest.Day(t, "2027-03-01T00:00:00Z")).takes("a2")
	})
}
