package linetest

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A story is a line, step by step: each verb makes a call by a clock in the test's hand, and fails the
// test if the answer is another one. A ticket's tenant is its first letter.
type story struct {
	*testing.T
	client *redis.Client
	l      *throttle.Limiter
	hooked *limitertest.Hooked // the same limiter
	c      *limitertest.Clock
	next   time.Duration                   // of the last take, if nobody joined since
	took   map[string]throttle.TakenTicket // by ticket
	queues []string                        // of the next take

	// Of the requests that follow:
	class      throttle.Class
	cost       int64
	front      bool
	tokens     int64             // cost, if the policy counts them
	attributes map[string]string // attributes
}

// A lineCase is what happens to the line of a policy.
type lineCase struct {
	p    throttle.Policy
	tell func(st *story)
}

// tell tells each case on a real Redis. If its last take found nobody, and nobody came since, nothing is left.
func tell(t *testing.T, cases map[string]lineCase) {
	t.Helper()
	limitertest.EachCase(t, cases, func(t *testing.T, client *redis.Client, sc lineCase) {
		st := newStory(t, client, sc.p)
		sc.tell(st)
		if st.next < 0 {
			limitertest.IsGone(t, client)
		}
	})
}

// newStory begins a story on an empty Redis. At its end, and before the next one begins, the keys of the line agree.
func newStory(t *testing.T, client *redis.Client, p throttle.Policy) *story {
	t.Helper()
	limitertest.Agrees(t, client)
	expect.Must(t, client.FlushDB(t.Context()).Err())
	t.Cleanup(func() { limitertest.Agrees(ended{t}, client) })
	st := &story{T: t, client: client, c: limitertest.NewClock(), cost: 1, took: map[string]throttle.TakenTicket{}}
	st.edit(limitertest.WithoutExpiry, p)
	return st
}

// An ended test has a context that has not.
type ended struct{ *testing.T }

func (ended) Context() context.Context { return context.Background() }

// edit replaces the story's limiter by one whose scripts are edited.
func (st *story) edit(edit func(string) string, policies ...throttle.Policy) {
	st.Helper()
	st.hooked = limitertest.NewEdited(st, st.client, st.c, []func(string) string{edit}, policies...)
	st.l = st.hooked.Limiter
}

// server is another process by the same clock.
func (st *story) server() *story {
	st.Helper()
	other := *st
	other.l, other.took = limitertest.NewByClock(st, st.client, st.c, st.l.Policies()...), map[string]throttle.TakenTicket{}
	return &other
}

func (st *story) line() *throttle.Line         { return st.l.Line("p") }
func (st *story) at(d time.Duration) *story    { st.c.Set(d); return st }
func (st *story) from(queues ...string) *story { st.queues = queues; return st }
func (st *story) costs(cost int64) *story      { st.cost = cost; return st }
func (st *story) batch() *story                { st.class = throttle.ClassBatch; return st }
func (st *story) live() *story                 { st.class = throttle.ClassLive; return st }
func (st *story) now() time.Duration           { return time.Duration(st.c.US.Load()-limitertest.Midnight) * us }
func (st *story) pass(d time.Duration)         { st.c.US.Add(d.Microseconds()) }

// request is the request of a ticket.
func (st *story) request(ticket string) throttle.Request {
	r := throttle.Request{
		Attributes: st.attributes, Class: st.class, Cost: map[string]int64{"requests": st.cost}, Front: st.front, Policy: "p",
		Tenant: ticket[:1], Ticket: limitertest.Ticket(ticket),
	}
	if st.tokens > 0 {
		r.Cost["tokens"] = st.tokens
	}
	return r
}

// without is the request of a tenant that does not wait.
func (st *story) without(tenant string) throttle.Request {
	r := st.request(tenant)
	r.Ticket = throttle.Ticket{}
	return r
}

// granted reserves for the tickets and fails if one is denied.
func (st *story) granted(tickets ...string) (last throttle.Decision) {
	st.Helper()
	for _, ticket := range tickets {
		last = limitertest.Reserve(st, st.l, st.request(ticket))
		expect.Require(st, last.Granted, ticket, "is denied for", last.RetryIn)
	}
	return last
}

// denied reserves, which joins the line, and fails if the ticket is granted, or denied for another time.
func (st *story) denied(ticket string, retryIn time.Duration) {
	st.Helper()
	st.next = 0
	d := limitertest.Reserve(st, st.l, st.request(ticket))
	expect.Require(st, !d.Granted && d.Queued && d.RetryIn == retryIn,
		ticket, "granted", d.Granted, "queued", d.Queued, "denied for", d.RetryIn, "want", retryIn)
}

// waits reserves, and fails if a ticket is granted.
func (st *story) waits(tickets ...string) {
	st.Helper()
	for _, ticket := range tickets {
		st.next = 0
		d := limitertest.Reserve(st, st.l, st.request(ticket))
		expect.Require(st, !d.Granted && d.Queued,
			ticket, "granted", d.Granted, "queued", d.Queued, "want denied and queued")
	}
}

// newcomer reserves for a tenant that does not wait.
func (st *story) newcomer(tenant string, granted bool) {
	st.Helper()
	expect.Equal(st, limitertest.Reserve(st, st.l, st.without(tenant)).Granted, granted, tenant, "is granted")
}

// joins puts tickets in line, whether or not they fit.
func (st *story) joins(tickets ...string) (last throttle.LineDecision) {
	st.Helper()
	return st.joinIn("q", tickets...)
}

func (st *story) joinIn(queue string, tickets ...string) (last throttle.LineDecision) {
	st.Helper()
	for _, ticket := range tickets {
		st.next = 0
		r := st.request(ticket)
		r.Ticket.Queue = queue
		last = limitertest.Join(st, st.l, r)
	}
	return last
}

// joinMany puts n tickets of a tenant in the line of a queue: "TENANT0", "TENANT1", ...
func (st *story) joinMany(queue, tenant string, n int) {
	st.Helper()
	var requests []throttle.Request
	for i := range n {
		r := st.request(tenant)
		r.Tenant, r.Ticket = tenant, throttle.Ticket{Queue: queue, ID: fmt.Sprint(tenant, i)}
		requests = append(requests, r)
	}
	limitertest.Join(st, st.l, requests...)
}

// joining returns the answer to one request.
func (st *story) joining(r throttle.Request) throttle.LineDecision {
	st.Helper()
	decisions := expect.Got(st.line().Join(st.Context(), []throttle.Request{r}))(st)
	return decisions[0]
}

// told makes tickets join one by one, and returns when each is expected to start.
func (st *story) told(tickets ...string) map[string]throttle.LineDecision {
	st.Helper()
	told := map[string]throttle.LineDecision{}
	for _, ticket := range tickets {
		told[ticket] = st.joins(ticket)
	}
	return told
}

// expects joins, and fails if the ticket is expected to start after another time.
func (st *story) expects(ticket string, in time.Duration) {
	st.Helper()
	expect.Equal(st, st.joins(ticket).RetryIn, in, ticket)
}

// take takes up to so many tickets.
func (st *story) take(most int) []throttle.TakenTicket {
	st.Helper()
	queues := st.queues
	if st.queues = nil; queues == nil {
		queues = []string{"q"}
	}
	taken := limitertest.Take(st, st.l, most, queues...)
	for _, ticket := range taken.Tickets {
		st.took[ticket.ID] = ticket
	}
	st.next = taken.Next
	return taken.Tickets
}

// takes takes all that fit, and fails unless they are exactly these, in this order.
func (st *story) takes(tickets ...string) *story {
	st.Helper()
	got := ids(st.take(throttle.MaxTake))
	expect.Require(st, slices.Equal(got, tickets), "at", st.now(), "took", got, "want", tickets)
	return st
}

func ids(taken []throttle.TakenTicket) (ids []string) {
	for _, ticket := range taken {
		ids = append(ids, ticket.ID)
	}
	return ids
}

// wantTaken takes, and fails the test unless it gets these tickets.
func wantTaken(t limitertest.TB, l *throttle.Limiter, most int, want string, queues ...string) {
	t.Helper()
	expect.Equal(t, strings.Join(ids(limitertest.Take(t, l, most, queues...).Tickets), " "), want, "took")
}

// asks fails unless the last take said to ask again after that time; below 0 is never.
func (st *story) asks(next time.Duration) {
	st.Helper()
	expect.Equal(st, max(-1, st.next), next, "ask again in")
}

// takesUntil takes all that fits until a time, whenever the line says so, and notes when. It returns that time.
func (st *story) takesUntil(end time.Duration, starts map[string]time.Duration) time.Duration {
	st.Helper()
	for n := 0; ; n++ {
		for _, ticket := range st.take(throttle.MaxTake) {
			starts[ticket.ID] = st.now()
		}
		if st.next < 0 || st.now()+st.next > end {
			return end
		} else if n > 5000 {
			st.Fatal("takes without end")
		}
		st.pass(st.next)
	}
}

// starts takes what fits, only when the line says so, until no ticket waits. It returns when each was taken.
func (st *story) starts() map[string]time.Duration {
	st.Helper()
	starts := map[string]time.Duration{}
	st.takesUntil(math.MaxInt64, starts)
	return starts
}

// shares takes n tickets, never more than `most` at once, and returns how many units each tenant got:
// "TENANT" and "TENANT, batch". Time goes on as the line says.
func (st *story) shares(n, most int, queues ...string) map[string]int64 {
	st.Helper()
	got := map[string]int64{}
	for n > 0 {
		for _, ticket := range st.from(queues...).take(min(n, most)) {
			r := ticket.Decision.Reservation
			if r.Class == throttle.ClassBatch {
				r.Tenant += ", batch"
			}
			got[r.Tenant] += r.Cost["requests"]
			n--
		}
		expect.Require(st, st.next >= 0, n, "more were to be taken")
		st.pass(st.next)
	}
	return got
}

// inShares fails unless got are the units of tenants that had a backlog all the while, and had no ticket of a larger
// cost. None is ahead of another by more than a ticket of each: the bound of start-time fair queueing.
func (st *story) inShares(got map[string]int64, weights map[string]float64, cost int64) {
	st.Helper()
	for one, w := range weights {
		for other, v := range weights { // multiplied by both weights, which have exact products
			ahead := float64(got[one])*v - float64(got[other])*w
			expect.Require(st, ahead <= float64(cost)*(v+w), one, "got", got[one], "units and", other, got[other], "by", weights)
		}
	}
}

// putBack returns tickets that were taken.
func (st *story) putBack(tickets ...string) *story {
	st.Helper()
	expect.Must(st, st.line().PutBack(st.Context(), st.taken(tickets...)))
	return st
}

// refunds gives the units of taken tickets back.
func (st *story) refunds(tickets ...string) *story {
	st.Helper()
	expect.Must(st, st.line().Refund(st.Context(), st.taken(tickets...)))
	return st
}

func (st *story) taken(tickets ...string) (taken []throttle.TakenTicket) {
	for _, ticket := range tickets {
		taken = append(taken, st.took[ticket])
	}
	return taken
}

func (st *story) leave(tickets ...string) *story {
	st.Helper()
	for _, ticket := range tickets {
		expect.Must(st, st.line().Leave(st.Context(), limitertest.Ticket(ticket)))
	}
	return st
}

// used fails unless the windows of tenant a have used so many units.
func (st *story) used(want ...int64) *story {
	st.Helper()
	limitertest.WantUsed(st, st.l, st.without("a"), want...)
	return st
}

func (st *story) neverFits(tickets ...string) {
	st.Helper()
	for _, ticket := range tickets {
		took := st.took[ticket]
		expect.That(st, took.NeverFits && !took.Decision.Granted, ticket, "never fits", took)
	}
}

func (st *story) settle(r throttle.Reservation, tokens int64) throttle.Reservation {
	st.Helper()
	return limitertest.Settle(st, st.l, r, tokens)
}

func (st *story) set(p throttle.Policy) {
	st.Helper()
	expect.Must(st, st.l.SetPolicies([]throttle.Policy{p}))
}

// refresh applies tenants' weights and limits to the waiting tickets, which takes do in the background.
func (st *story) refresh() {
	st.Helper()
	expect.Must(st, st.hooked.Refresh(st.Context(), "p"))
}

func weighted(weights map[string]float64, windows ...throttle.Window) throttle.Policy {
	p := limitertest.Policy(windows...)
	p.Tenants = map[string]throttle.Tenant{}
	for tenant, weight := range weights {
		p.Tenants[tenant] = throttle.Tenant{Weight: weight}
	}
	return p
}

// intervene puts something in force for an hour, or nothing, and has the line know it.
func (st *story) intervene(i throttle.Interventions) {
	st.Helper()
	i.At = time.UnixMicro(st.c.US.Load())
	for k := range i.Overrides {
		i.Overrides[k].Policy, i.Overrides[k].Until = "p", i.At.Add(h)
	}
	for k := range i.Pauses {
		i.Pauses[k].Policy, i.Pauses[k].Until = "p", i.At.Add(h)
		i.Pauses[k].Author, i.Pauses[k].Cause = "anna", "it is down"
	}
	st.l.SetInterventions(i)
	st.refresh()
}

// pauses has operators pause tenants, and "" the policy.
func (st *story) pauses(tenants ...string) {
	st.Helper()
	var i throttle.Interventions
	for _, tenant := range tenants {
		i.Pauses = append(i.Pauses, throttle.Pause{Tenant: tenant})
	}
	st.intervene(i)
}

// pause has the upstream refuse a call: for that time or, if it is 0, for an unknown one.
func (st *story) pause(r throttle.Reservation, d time.Duration) *story {
	st.Helper()
	expect.Must(st, expect.ErrOf(r.Pause(st.Context(), d, "")))
	return st
}

// pauseOf is a refusal of a call of a tenant that was granted long ago.
func (st *story) pauseOf(tenant string, d time.Duration) *story {
	st.Helper()
	return st.pause(st.l.Attach(throttle.Reservation{Request: requestOf(tenant)}), d)
}

// remaining has the upstream say what it has left.
func (st *story) remaining(r throttle.Reservation, units int64, reset time.Duration) *story {
	st.Helper()
	expect.Must(st, r.ReportRemaining(st.Context(), throttle.Requests, units, reset))
	return st
}

// explain returns why a ticket waits.
func (st *story) explain(ticket string) inspect.State {
	st.Helper()
	return expect.Got(inspect.Of(st.l).Explain(st.Context(), limitertest.Ticket(ticket)))(st)
}

func (st *story) plan(o inspect.PlanOptions, demands ...inspect.Demand) inspect.Plan {
	st.Helper()
	snapshot := expect.Got(inspect.Of(st.l).Snapshot(st.Context(), demands))(st)
	return expect.Got(snapshot.Plan(st.Context(), o))(st)
}

func steps(n int) time.Duration { return time.Duration(n) }

// requestOf is a request that names a tenant, and no more.
func requestOf(tenant string) throttle.Request { return throttle.Request{Policy: "p", Tenant: tenant} }

// lineText is a text of the line and its windows, without what processes and reservations are remembered by.
func lineText(t limitertest.TB, client *redis.Client) string {
	t.Helper()
	var lines []string
	for key, value := range limitertest.Dump(t, client) {
		kind := strings.TrimPrefix(key, "sluice:{p}:")
		process := strings.HasPrefix(kind, "r:") || strings.HasPrefix(kind, "k")
		if !process && !strings.HasPrefix(kind, "n:") || strings.Contains(kind, "|") {
			lines = append(lines, fmt.Sprintf("%s = %q", key, value))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

const (
	us = time.Microsecond
	ms = time.Millisecond
	s  = time.Second
	m  = time.Minute
	h  = time.Hour
)
