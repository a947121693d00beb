package linetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// An observer is told of each call and each decision, once.
func TestWhatALimiterDoesIsObserved(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		var told []string
		tell := func(format string, args ...any) { told = append(told, fmt.Sprintf(format, args...)) }
		clock := limitertest.NewClock()
		hooks := &testhook.Client{UniversalClient: client, Now: clock.US.Load}
		l := limitertest.NewFrom(t, throttle.Config{
			Client:   hooks,
			Policies: []throttle.Policy{limitertest.Policy(limitertest.SharedWindow(1, 10*s))},
			Observer: func(event any) {
				switch e := event.(type) {
				case throttle.Call:
					expect.That(t, e.Took > 0 && e.Err == nil, e)
					tell("call %s %s %d", e.Policy, e.Script, e.N)
				case throttle.Correction:
					tell("corrected %s %v %v", e.Reservation.Tenant, e.Cost, e.Cancelled)
				case throttle.Decision:
					tell("decided %s %s %v %v %v", e.Policy, e.Tenant, e.Granted, e.Queued, e.RetryIn)
				case throttle.LineDecision:
					tell("join %s %s %v %v", e.Policy, e.Tenant, e.RetryIn, e.Err != nil)
				case throttle.TakenTicket:
					tell("taken %s %s %v", e.Decision.Policy, e.ID, e.Waited)
				}
			},
		})
		wants := func(what string, want ...string) {
			t.Helper()
			expect.Equal(t, told, want, what)
			told = nil
		}
		expect.Must(t, hooks.Refresh(t.Context(), "p")) // else the first take does it in the background
		told = nil
		st := &story{T: t, client: client, l: l, c: clock, cost: 1, took: map[string]throttle.TakenTicket{}}
		line := l.Line("p")

		grant := st.granted("a1").Reservation
		wants("a grant", "call p decide 1", "decided p a true false 0s")
		for range 2 { // the second changes nothing
			settled := expect.Got(grant.Settle(t.Context(), map[string]int64{"requests": 2}))(t)
			grant = settled
		}
		wants("it is settled", "call p decide 1", "corrected a map[requests:2] false", "call p decide 1")
		for range 2 {
			expect.Must(t, expect.ErrOf(grant.Cancel(t.Context())))
		}
		wants("it is cancelled", "call p decide 1", "corrected a map[] true", "call p decide 1")
		st.granted("a1")
		told = nil
		st.denied("b1", 10*s)
		wants("a denial", "call p decide 1", "decided p b false true 10s")
		full := st.request("b2")
		full.Backlog = 1
		decisions := expect.Got(line.Join(t.Context(), []throttle.Request{st.request("a2"), full, {Tenant: "c"}}))(t)
		wants("a join", "call p decide 2", fmt.Sprintf("join p a %v false", decisions[0].RetryIn), "join p b 30s true", "join p c 0s true")
		st.takes()
		wants("a take of nothing", "call p take 0")
		st.at(10 * s).takes("b1")
		wants("a take", "call p take 1", "taken p b1 10s")
		expect.Must(t, line.PutBack(t.Context(), []throttle.TakenTicket{st.took["b1"]}))
		wants("a ticket that is put back", "call p decide 1", "corrected b map[] true")
		st.at(12 * s).takes("b1")
		wants("its second take", "call p take 1", "taken p b1 12s")
		expect.Must(t, expect.ErrOf(l.Peek(t.Context(), st.without("a"))))
		wants("a peek", "call p decide 1")
		expect.That(t, st.again("b1", st.request("b1")).Granted, "b1 is denied")
		wants("a grant instead of another", "call p decide 1")
		expect.That(t, st.pauseOf("a", 20*s).again("b1", st.request("b1")).Queued, "b1 is not denied")
		wants("a denial in its place", "call p decide 1", "call p decide 1", "decided p b false true 30s", "corrected b map[] true")
		tickets, err := line.Reserve(t.Context(), []throttle.Request{st.request("c1"), st.request("c2")})
		expect.Require(t, err == nil && len(tickets) == 2, tickets, err)
		expect.That(t, len(told) == 3 && told[0] == "call p decide 2", "two requests in one call: told", told)
	})
}

// A call that waits in place is told as what it is: a denial, a ticket that was taken, and a start.
func TestAWaitIsObserved(t *testing.T) {
	t.Parallel()
	p := limitertest.Policy(limitertest.SharedWindow(1, 10*s))
	limitertest.Bubble(t, p, func(t *testing.T, _ *throttle.Limiter, server throttletest.Memory) {
		client := server.Client(t)
		var told []string
		tell := func(format string, args ...any) { told = append(told, fmt.Sprintf(format, args...)) }
		l := limitertest.NewFrom(t, throttle.Config{
			Client: client, Policies: []throttle.Policy{p},
			Observer: func(event any) {
				switch e := event.(type) {
				case throttle.Decision:
					tell("decided %v", e.Granted)
				case throttle.Start:
					tell("started %s %s %v %v", e.Policy, e.Tenant, e.Late, e.Waited.Round(s))
				case throttle.TakenTicket:
					tell("taken %s", e.Decision.Tenant)
				}
			},
		})
		for _, want := range [][]string{
			{"decided true", "started p a -1ns 0s"},
			{"decided false", "taken a", "started p a -1ns 10s"},
		} {
			expect.Must(t, expect.ErrOf(l.Wait(t.Context(), throttle.Request{Policy: "p", Tenant: "a"})))
			expect.Equal(t, told, want)
			told = nil
		}
	})
}

// Without Redis the calls fail, and what fails open is a decision all the same.
func TestAnOutageIsObserved(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{
		Dialer: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no route") }, DialerRetries: 1, MaxRetries: -1,
	})
	t.Cleanup(func() { client.Close() })
	p := limitertest.Policy(limitertest.SharedWindow(1, s))
	p.FailOpen = true
	var told []any
	l := limitertest.NewFrom(t, throttle.Config{Client: client, Policies: []throttle.Policy{p}, Observer: func(event any) {
		told = append(told, event)
	}})
	expect.Must(t, expect.ErrOf(l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "a"})))
	expect.Require(t, len(told) == 2, told)
	call, d := told[0].(throttle.Call), told[1].(throttle.Decision)
	expect.That(t, errors.Is(call.Err, throttle.ErrUnavailable) && d.FailedOpen != nil, told)
}

// An observer that panics disturbs no call. Of each type of event one panic a minute is logged.
func TestAnObserverThatPanicsDisturbsNothing(t *testing.T) {
	t.Parallel()
	p := limitertest.Policy(limitertest.SharedWindow(1, 10*s))
	limitertest.Bubble(t, p, func(t *testing.T, _ *throttle.Limiter, server throttletest.Memory) {
		var log bytes.Buffer
		l := limitertest.NewFrom(t, throttle.Config{
			Client: server.Client(t), Observer: func(any) { panic("on purpose") }, Policies: []throttle.Policy{p},
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		events := []any{
			throttle.Call{}, throttle.Correction{}, throttle.Decision{}, &throttle.DeniedError{}, throttle.LineDecision{},
			throttle.Publication{}, throttle.Refusal{}, throttle.Start{}, throttle.TakenTicket{},
		}
		for _, event := range append(events, events...) {
			l.Config().Observer(event)
		}
		expect.Contains(t, log.String(), "observe_test.go", "the stack is missing", &log)
		ctx, cancel := context.WithTimeout(t.Context(), m)
		defer cancel()
		for range 3 { // the later two wait in place, and are taken
			d, err := l.Wait(ctx, throttle.Request{Policy: "p", Tenant: "a"})
			expect.Require(t, err == nil && d.Granted, d, err)
		}
		for range 2 {
			decisions, err := l.Line("p").Join(ctx, []throttle.Request{{Tenant: "a", Ticket: limitertest.Ticket("1")}})
			expect.Require(t, err == nil && decisions[0].Err == nil, decisions, err)
		}
		taken := limitertest.Take(t, l, 1, "q")
		expect.That(t, len(taken.Tickets) == 0 && taken.Next >= 0, taken)
		for _, event := range events {
			about := fmt.Sprintf(`function=Observer(%T) panic="on purpose" stack=`, event)
			expect.Equal(t, strings.Count(log.String(), about), 1, about)
		}
	})
}

// A policy that observes grants everything, and tells what a queue at its rate would do.
func TestAPolicyThatObservesDeniesNothing(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(
			throttle.Window{Name: "own", Limit: 2, Period: 10 * s},
			throttle.Window{Name: "all", Limit: 4, Period: 4 * s, Shared: true, Algorithm: throttle.AlgorithmFixed},
			throttle.Window{Name: "month", Limit: 100, Algorithm: throttle.AlgorithmCalendar, Resets: "@monthly", Shared: true, Unit: "tokens"},
		)
		p.Observe = true
		st := newStory(t, client, p)
		for _, step := range []struct {
			at     time.Duration
			ticket string
			cost   int64
			would  string
		}{
			{0, "a1", 1, ""},
			{0, "a2", 1, ""},
			{0, "a3", 1, "own 5s"}, // one each 5 s, behind what came before
			{0, "a4", 1, "own 10s"},
			{0, "b1", 1, "all 1s"}, // what ran is what all share: one each second
			{0, "b2", 1, "all 2s"},
			{0, "c1", 3, "own never"},
			{5 * s, "c2", 1, "own 5s"},
			{10 * s, "a5", 1, "own 5s"}, // due at 15 s
			{40 * s, "a6", 2, ""},
		} {
			st.cost = step.cost
			d := limitertest.Reserve(t, st.at(step.at).l, st.request(step.ticket))
			would := ""
			if o := d.Observed; o != nil && o.NeverFits {
				would = o.Binds + " never"
			} else if o != nil {
				would = fmt.Sprint(o.Binds, " ", o.Wait)
			}
			expect.That(t, d.Granted && !d.Queued && !d.Exempt && would == step.would,
				step.ticket, "at", step.at, "would be denied by", would, "want", step.would, d)
		}
		st.cost = 1
		expect.That(t, st.joins("a7").Exempt, "a ticket has joined")
		got := st.l.Policies()[0]
		expect.That(t, got.Windows[0].Algorithm == throttle.AlgorithmSliding && got.Observe, "the policy is", got)
		st.takes().asks(-1)
		// A reservation can be given back.
		d := limitertest.Reserve(t, st.at(h).l, st.request("a8"))
		expect.Equal(t, limitertest.Cancel(t, st.l, d.Reservation).Windows[0].Used, 0)
		st.pause(d.Reservation, s)
		expect.Equal(t, limitertest.Reserve(t, st.l, st.request("a9")).Observed.Binds, throttle.ByUpstream)
	})
}

// What waits when a policy begins to observe starts at once, and what comes when it ends is denied.
func TestAPolicyBeginsToObserve(t *testing.T) {
	enforces := limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: h}, limitertest.Slots(2))
	observes := enforces
	observes.Observe = true
	st := newStory(t, limitertest.RedisClient(t), enforces)
	st.granted("a0", "b0")
	st.waits("a1", "a2", "b1")
	st.at(s).takes()
	st.set(observes)
	st.refresh()
	st.at(2*s).takes("a1", "a2", "b1").asks(-1)
	for _, ticket := range []string{"a1", "a2", "b1"} {
		d, err := st.line().ReserveAgain(t.Context(), st.took[ticket], st.request(ticket))
		expect.That(t, err == nil && d.Granted, ticket, d, err)
	}
	observed := limitertest.Reserve(t, st.l, st.request("a3"))
	expect.That(t, observed.Granted && observed.Observed != nil, observed)
	st.set(enforces)
	st.at(m).granted("c0")
	st.waits("c1")
}
