package linetest

import (
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A scene is a line by hand: every step is one call, by a handed clock.
type scene struct {
	t      *testing.T
	client *redis.Client
	l      *throttle.Limiter
	hooked *limitertest.Hooked // the same limiter
	c      *limitertest.Clock
	class  throttle.Class
	cost   int64
	front  bool
	next   time.Duration                   // of the last take, if nobody joined since
	tokens int64                           // cost, if the policy counts them
	took   map[string]throttle.TakenTicket // by ticket
	with   map[string]string               // attributes
}

// A play is what happens to the line of a policy.
type play struct {
	p    throttle.Policy
	play func(sc *scene)
}

// plays plays each scene on a real Redis. Then the keys of its line agree. If the last take
// said that nobody waits, and nobody came since, nothing is left.
func plays(t *testing.T, scenes map[string]play) {
	t.Helper()
	limitertest.EachOf(t, scenes, func(t *testing.T, client *redis.Client, p play) {
		sc := newScene(t, client, p.p)
		p.play(sc)
		limitertest.Agrees(t, client)
		if sc.next < 0 {
			limitertest.IsGone(t, client)
		}
	})
}

// newScene begins a scene on an empty Redis.
func newScene(t *testing.T, client *redis.Client, p throttle.Policy) *scene {
	t.Helper()
	sc := &scene{t: t, client: client, cost: 1, took: map[string]throttle.TakenTicket{}}
	limitertest.Must(t, client.FlushDB(t.Context()).Err())
	sc.c = limitertest.NewClock()
	sc.edit(limitertest.WithoutExpiry, p)
	return sc
}

// edit replaces the scene's limiter by one whose scripts are edited.
func (sc *scene) edit(edit func(string) string, policies ...throttle.Policy) {
	sc.t.Helper()
	sc.hooked = limitertest.NewEdited(sc.t, sc.client, sc.c, []func(string) string{edit}, policies...)
	sc.l = sc.hooked.Limiter
}

func (sc *scene) at(d time.Duration) *scene { sc.c.Set(d); return sc }

// of is the request of a ticket, whose tenant is its first letter.
func (sc *scene) of(ticket string) throttle.Request {
	r := throttle.Request{
		Class: sc.class, Policy: "p", Tenant: ticket[:1], Ticket: limitertest.Ticket(ticket), Cost: map[string]int64{"requests": sc.cost}, Front: sc.front, Attributes: sc.with,
	}
	if sc.tokens > 0 {
		r.Cost["tokens"] = sc.tokens
	}
	return r
}

// granted reserves for the tickets and fails if one is denied.
func (sc *scene) granted(tickets ...string) (last throttle.Decision) {
	sc.t.Helper()
	for _, ticket := range tickets {
		if last = limitertest.Reserve(sc.t, sc.l, sc.of(ticket)); !last.Granted {
			sc.t.Fatalf("%s is denied for %v, want granted", ticket, last.RetryIn)
		}
	}
	return last
}

// denied reserves, which joins the line, and fails if the ticket is granted, or denied for another
// time.
func (sc *scene) denied(ticket string, retryIn time.Duration) {
	sc.t.Helper()
	sc.next = 0
	if d := limitertest.Reserve(sc.t, sc.l, sc.of(ticket)); d.Granted || !d.Queued || d.RetryIn != retryIn {
		sc.t.Fatalf("%s: granted %v, queued %v, denied for %v, want denied for %v", ticket, d.Granted, d.Queued, d.RetryIn, retryIn)
	}
}

func (sc *scene) waits(tickets ...string) {
	sc.t.Helper()
	for _, ticket := range tickets {
		sc.next = 0
		if d := limitertest.Reserve(sc.t, sc.l, sc.of(ticket)); d.Granted || !d.Queued {
			sc.t.Fatalf("%s: granted %v, queued %v, want denied and queued", ticket, d.Granted, d.Queued)
		}
	}
}

// joins puts tickets in line, whether or not they fit.
func (sc *scene) joins(tickets ...string) (last throttle.Place) {
	sc.t.Helper()
	for _, ticket := range tickets {
		sc.next = 0
		last = limitertest.Join(sc.t, sc.l, sc.of(ticket))
	}
	return last
}

// expects joins, and fails if the ticket is expected to start after another time.
func (sc *scene) expects(ticket string, in time.Duration) {
	sc.t.Helper()
	if p := sc.joins(ticket); p.Expected != in {
		sc.t.Fatalf("%s: starts in %v, want %v", ticket, p.Expected, in)
	}
}

// takes takes all that fit, and fails unless they are exactly these, in this order.
func (sc *scene) takes(tickets ...string) *scene {
	sc.t.Helper()
	taken, err := sc.l.Line("p").Take(sc.t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: throttle.MaxTake})
	limitertest.Must(sc.t, err)
	var ids []string
	for _, ticket := range taken.Tickets {
		ids = append(ids, ticket.ID)
		sc.took[ticket.ID] = ticket
	}
	if sc.next = taken.Next; !slices.Equal(ids, tickets) {
		sc.t.Fatalf("at %v took %q, want %q", time.Duration(sc.c.US.Load()-limitertest.Midnight)*us, ids, tickets)
	}
	return sc
}

// asks fails unless the last take said to ask again after that time; below 0 is never.
func (sc *scene) asks(next time.Duration) {
	sc.t.Helper()
	if sc.next != next && (sc.next >= 0 || next >= 0) {
		sc.t.Fatalf("ask again in %v, want %v", sc.next, next)
	}
}

// without is the request of a tenant that does not wait.
func (sc *scene) without(tenant string) throttle.Request {
	r := sc.of(tenant)
	r.Ticket = throttle.Ticket{}
	return r
}

func steps(n int) time.Duration { return time.Duration(n) }

// putBack returns tickets that were taken.
func (sc *scene) putBack(tickets ...string) *scene {
	sc.t.Helper()
	var back []throttle.TakenTicket
	for _, ticket := range tickets {
		back = append(back, sc.took[ticket])
	}
	limitertest.Must(sc.t, sc.l.Line("p").PutBack(sc.t.Context(), back))
	return sc
}

func (sc *scene) leave(tickets ...string) *scene {
	sc.t.Helper()
	for _, ticket := range tickets {
		limitertest.Must(sc.t, sc.l.Line("p").Leave(sc.t.Context(), limitertest.Ticket(ticket)))
	}
	return sc
}

func (sc *scene) set(p throttle.Policy) {
	sc.t.Helper()
	limitertest.Must(sc.t, sc.l.SetPolicies([]throttle.Policy{p}))
}
