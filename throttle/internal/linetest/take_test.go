package linetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// The reply of a take is lost, again and again: its tickets come with the next one, and are charged once.
func TestATakeWhoseReplyIsLost(t *testing.T) {
	client := limitertest.RedisClient(t)
	p := limitertest.NewLossyProxy(t, client.Options().Addr)
	through := redis.NewClient(&redis.Options{Addr: p.Addr, MaxRetries: -1})
	defer through.Close()
	l := limitertest.New(t, through, limitertest.Policy(limitertest.SharedWindow(4, h)))
	limitertest.Take(t, l, 0, "q") // loads the script
	var requests []throttle.Request
	for i, queue := range []string{"q", "q", "other", "q"} {
		r := limitertest.Acme(1)
		r.Ticket = throttle.Ticket{Queue: queue, ID: fmt.Sprint(i)}
		requests = append(requests, r)
	}
	limitertest.Join(t, l, requests...)
	for range 2 {
		p.Lose.Store(1)
		taken, err := l.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"other": 2, "q": 1}, Strict: true, Max: 4})
		expect.Require(t, errors.Is(err, throttle.ErrUnavailable), taken, err)
		expect.Must(t, l.Line("p").Acknowledge(t.Context())) // nobody knows of what
	}
	// The next one asks for a queue less.
	taken := limitertest.Take(t, l, 64, "q")
	expect.Equal(t, fmt.Sprint(ids(taken.Tickets), ids(taken.Others), taken.Next), "[0 1 3] [2] 0s")
	expect.Must(t, l.Line("p").PutBack(t.Context(), taken.Others))
	plain := limitertest.New(t, client, l.Policies()...)
	limitertest.WantUsed(t, plain, limitertest.Acme(1), 3)
	wantTaken(t, l, 64, "2", "other", "q")
	limitertest.WantUsed(t, plain, limitertest.Acme(1), 4)
}

func TestATakeThatNobodyAcknowledges(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(2, 10*s)))
	other := limitertest.NewByClock(t, st.client, st.c, limitertest.Policy(limitertest.SharedWindow(2, 10*s)))
	st.joins("a1", "a2", "a3", "a4", "a5", "a6")
	st.takes("a1", "a2") // and the process is gone
	// After 5 s the take counts as lost, and its units still count.
	for _, at := range []time.Duration{0, 5 * s} {
		st.at(at)
		wantTaken(t, other, 64, "", "q")
	}
	st.at(10 * s)
	wantTaken(t, other, 64, "a1 a2", "q")
	st.at(14 * s)
	expect.Must(t, other.Line("p").Acknowledge(t.Context()))
	st.at(20*s).takes("a3", "a4")
}

// A copy of a take comes late, as from a proxy: after its own reply, with tickets or without, after an
// acknowledgement, and after a later take. It takes nothing.
func TestALateCopyOfATakeTakesNothing(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(100, h)))
	through := throttletest.Client(t, st.client.Options().Addr)
	var last []any
	through.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if hooktest.IsScript(cmd) {
			last = slices.Clone(cmd.Args())
		}
		return next(ctx, cmd)
	}))
	l := limitertest.NewByClock(t, through, st.c, st.l.Policies()...)
	st.joins("a1") // loads the scripts
	limitertest.Take(t, l, 1, "q")
	for _, call := range []func(){
		func() { st.joins("x"); limitertest.Take(t, l, 1, "q") },
		func() { limitertest.Take(t, l, 1, "q") }, // it gets nothing
		func() { _ = l.Line("p").Acknowledge(t.Context()) },
		func() { limitertest.Take(t, l, 1, "other") },
	} {
		call()
		copied := last
		for range 2 { // at once, and after the next call
			st.joins("a2")
			expect.Must(t, through.Do(t.Context(), copied...).Err())
			wantTaken(t, l, 1, "a2", "q")
		}
	}
}

// What was taken and not acknowledged is remembered as long as the line: see TestATakeThatNobodyAcknowledges.
func TestATakeIsRememberedWhileItHoldsTickets(t *testing.T) {
	client := limitertest.RedisClient(t)
	l := limitertest.New(t, client, limitertest.Policy(limitertest.SharedWindow(2, 10*s)))
	for _, ticket := range []string{"1", "2", "3"} {
		r := limitertest.Acme(1)
		r.Ticket = limitertest.Ticket(ticket)
		limitertest.Join(t, l, r)
	}
	kept := func() time.Duration {
		return client.PTTL(t.Context(), client.Keys(t.Context(), "sluice:{p}:k:*").Val()[0]).Val()
	}
	limitertest.Take(t, l, 2, "q")
	expect.That(t, kept() >= 23*h, "the record of a take with tickets is kept for", kept())
	limitertest.Take(t, l, 2, "q")
	expect.That(t, kept() <= m, "the record of a take without tickets is kept for", kept())
}

// again reserves for a ticket that was taken.
func (st *story) again(ticket string, r throttle.Request) throttle.Decision {
	st.Helper()
	st.next = 0
	return expect.Got(st.line().ReserveAgain(st.Context(), st.took[ticket], r))(st)
}

// What was taken is used, put back, refunded or reserved again: once, however often a lost call is repeated.
func TestWhatWasTaken(t *testing.T) {
	t.Parallel()
	two, three := limitertest.SharedWindow(2, 10*s), limitertest.SharedWindow(3, 10*s)
	site := throttle.Window{Name: "site", Limit: 1, Period: s, Per: []string{"site"}}
	user := throttle.Window{Name: "user", Limit: 9, Period: s, Per: []string{"tenant", "user"}}
	both := limitertest.Policy(limitertest.SharedWindow(9, 10*s), limitertest.Slots(9))
	tell(t, map[string]lineCase{
		"a take acknowledges the one before, also if it gets nothing": {limitertest.Policy(limitertest.SharedWindow(1, 10*s)), func(st *story) {
			st.joins("a1", "a2")
			st.takes("a1").takes()
			expect.Equal(st, st.client.ZCard(st.Context(), "sluice:{p}:k").Val(), 0)
		}},
		"a late put-back is ignored": {limitertest.Policy(three), func(st *story) {
			st.joins("a1", "a2", "a3")
			first := st.takes("a1", "a2", "a3").took["a1"]
			second := st.at(s).putBack("a1").takes("a1").took["a1"]
			st.took["a1"] = first
			st.putBack("a1").used(3).takes()
			st.took["a1"] = second
			st.refunds("a1").used(2)
			st.putBack("a1").used(2).takes()
		}},
		// The ticket has a new position, and stays there.
		"a ticket that joined again is put back": {limitertest.Policy(three, limitertest.Slots(3)), func(st *story) {
			st.joins("a1", "a2")
			st.takes("a1", "a2").at(s).joins("a3", "a1")
			st.putBack("a1").used(1, 1).putBack("a1").used(1, 1)
			st.takes("a3", "a1").asks(-1)
		}},
		"joined by a scope that is no more": {limitertest.Policy(user, site), func(st *story) {
			st.attributes = map[string]string{"site": "x,y", "user": "u"}
			st.joins("a1")
			st.set(limitertest.Policy(site))
			st.takes("a1")
			expect.That(st, st.line().Matches(st.took["a1"], st.request("a1")), st.took["a1"])
		}},
		"reserved again, although others wait": {limitertest.Policy(two, limitertest.Slots(9)), func(st *story) {
			st.joins("a1", "a2", "a3")
			st.takes("a1", "a2").at(s)
			d := st.again("a1", st.request("a1"))
			limitertest.WantGranted(st, d, 2, 2)
			expect.Equal(st, d.At, limitertest.At(s))
			st.cost = 2 // above what was taken
			d = st.again("a2", st.request("a2"))
			expect.That(st, !d.Granted && d.Queued && slices.Equal(limitertest.Used(d), []int64{1, 1}), d)
			st.costs(1).takes("a3") // the unit that a2 gave back
			other := st.request("a3")
			other.Policy = "other"
			for _, r := range []throttle.Request{st.request("a3"), st.request("b3"), limitertest.Acme(1), other} {
				want := r.Ticket.ID == "a3" && r.Policy == "p"
				expect.Equal(st, st.line().Matches(st.took["a3"], r), want, r)
			}
		}},
		"reserved again, and refunded": {limitertest.Policy(two), func(st *story) {
			st.joins("a1", "a2")
			st.takes("a1", "a2").at(s)
			d := st.again("a1", st.request("a1"))
			limitertest.WantGranted(st, d, 2)
			st.refunds("a1").refunds("a1").used(2)
			limitertest.Cancel(st, st.l, d.Reservation)
			st.used(1)
		}},
		"denied again, and refunded": {limitertest.Policy(two), func(st *story) {
			st.joins("a1", "a2")
			st.takes("a1", "a2").at(s).set(limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
			expect.Equal(st, st.again("a1", st.request("a1")).Granted, false)
			st.refunds("a1").refunds("a1").used(1)
		}},
		"reserved again, after a window came": {limitertest.Policy(two), func(st *story) {
			st.joins("a1", "a2")
			day := limitertest.Quota(2, "@daily", "UTC")
			day.Shared = true
			st.takes("a1", "a2").at(s).set(limitertest.Policy(two, day))
			limitertest.WantGranted(st, st.again("a1", st.request("a1")), 2, 1)
			limitertest.WantGranted(st, st.again("a2", st.request("a2")), 2, 2)
		}},
		// Those of another ticket of the same take stay.
		"reserved again twice, its units are given back once": {both, func(st *story) {
			st.joins("a1", "a2")
			st.takes("a1", "a2").at(s)
			limitertest.WantGranted(st, st.again("a1", st.request("a1")), 2, 2)
			limitertest.WantGranted(st, st.again("a1", st.request("a1")), 3, 3)
		}},
	})
}

// Tickets lists all that wait, whatever their names, without calls that wait in place.
func TestTicketsOfALine(t *testing.T) {
	l := limitertest.New(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(1, h)))
	line, waiting := l.Line("p"), map[throttle.Ticket]bool{}
	var requests []throttle.Request
	for i := range 700 {
		id := throttle.Ticket{Queue: "a/b c", ID: fmt.Sprintf("%08x-0000-4000-8000-000000000000", i)}
		if i%2 == 0 {
			id = throttle.Ticket{Queue: "!q", ID: fmt.Sprint("!é/", i)}
		}
		requests = append(requests, throttle.Request{Tenant: "acme", Ticket: id})
		waiting[id] = true
	}
	expect.Must(t, expect.ErrOf(line.Join(t.Context(), requests)))
	expect.Must(t, line.Leave(t.Context(), requests[0].Ticket))
	delete(waiting, requests[0].Ticket)
	listed := map[throttle.Ticket]bool{}
	expect.Must(t, line.Tickets(t.Context(), "", func(page []throttle.Ticket) error {
		for _, id := range page {
			listed[id] = true
			expect.That(t, waiting[id], id, "is listed")
		}
		return nil
	}))
	expect.Equal(t, len(listed), len(waiting))
	expect.Equal(t, expect.Got(line.Len(t.Context()))(t), int64(len(waiting)), "are counted")
	enough := errors.New("enough")
	expect.Equal(t, line.Tickets(t.Context(), "", func([]throttle.Ticket) error { return enough }), enough)
	expect.Err(t, l.Line("other").Tickets(t.Context(), "", nil), throttle.ErrUnknownPolicy)
	// Of one tenant it leaves out what joined by other scopes: the user of some is called as the tenant of others.
	policyPer := func(a ...string) []throttle.Policy {
		return []throttle.Policy{limitertest.Policy(throttle.Window{Name: "w", Limit: 1, Per: a, Period: h})}
	}
	expect.Must(t, l.SetPolicies(policyPer("tenant", "user")))
	bob := throttle.Request{Tenant: "acme", Attributes: map[string]string{"user": "bob"}, Ticket: limitertest.Ticket("b")}
	expect.Must(t, expect.ErrOf(line.Join(t.Context(), []throttle.Request{bob})))
	expect.Must(t, l.SetPolicies(policyPer("region", "tenant")))
	expect.Must(t, line.Tickets(t.Context(), "bob", func(page []throttle.Ticket) error { expect.Equal(t, page, nil); return nil }))
}

// Only the line that a ticket was taken from has its position and its units.
func TestATicketGoesBackToItsOwnLine(t *testing.T) {
	client := limitertest.RedisClient(t)
	p := limitertest.Policy(limitertest.SharedWindow(4, h))
	other := p.WithDefaults()
	other.Name = "other"
	l := limitertest.New(t, client, p, other)
	r := limitertest.Acme(1)
	r.Ticket = limitertest.Ticket("a")
	limitertest.Join(t, l, r)
	expect.Must(t, l.Line("other").PutBack(t.Context(), limitertest.Take(t, l, 1, "q").Tickets))
	wantTaken(t, l, 2, "a", "q")
	n, err := l.Line("other").Len(t.Context())
	expect.That(t, n == 0 && err == nil, n, "wait in the other line", err)
}

// Work that was refused, and joined again, has waited since it joined first, also after it is put back.
func TestAPutBackTicketHasWaitedSinceItJoinedFirst(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(1, s)))
	r := st.at(10 * s).request("a1")
	r.Since = limitertest.At(4 * s)
	limitertest.Join(t, st.l, r)
	st.takes("a1")
	st.putBack("a1").at(12 * s).takes("a1")
	expect.Equal(t, st.took["a1"].Since.UTC(), r.Since.UTC())
}

// What many takes of many scopes change is more than one command may hold.
func TestManyLostTakesArePutBack(t *testing.T) {
	var windows []throttle.Window
	for i := range 22 {
		name := fmt.Sprint("x", i)
		windows = append(windows, throttle.Window{Name: name, Limit: 1000, Period: m, Per: []string{name}})
	}
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(windows...))
	for n := range 256 {
		st.attributes = map[string]string{}
		for _, w := range windows {
			st.attributes[w.Name] = fmt.Sprint(n)
		}
		r := st.request(fmt.Sprint("a", n))
		r.Tenant = fmt.Sprint(n)
		st.joining(r)
		if n%64 == 63 {
			st.server().take(64)
		}
	}
	expect.Equal(t, len(st.at(20*s).starts()), 256)
}
