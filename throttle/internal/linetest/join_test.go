package linetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestJoinAnswersForEachTicket(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 2, Period: 10 * s}, limitertest.SharedWindow(5, 10*s))
	p.Tenants = map[string]throttle.Tenant{"x": {Exempt: true}, "b": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}
	st := newStory(t, limitertest.RedisClient(t), p)
	st.granted("a0", "a1")
	request := func(id string, change func(*throttle.Request)) throttle.Request {
		r := st.request(id)
		r.Key = "key of " + id
		if change != nil {
			change(&r)
		}
		return r
	}
	cost := func(n int64) func(*throttle.Request) {
		return func(r *throttle.Request) { r.Cost = map[string]int64{"requests": n} }
	}
	now := time.Now()
	soon := now.Add(20*s - us)
	requests := []throttle.Request{
		request("a2", nil),
		request("a9", func(r *throttle.Request) { r.Ticket.ID = "" }),
		request("a3", cost(3)),
		request("x1", nil),
		request("b1", cost(2)),
		request("a4", func(r *throttle.Request) { r.MaxWait = 10*s - us }),
		request("a4", func(r *throttle.Request) { r.MaxWait = 10 * s }),
		request("a5", func(r *throttle.Request) { r.Backlog = 2 }),
		request("a5", func(r *throttle.Request) { r.Backlog = 3 }),
		request("a6", func(r *throttle.Request) { r.Deadline = soon }),
		request("a6", func(r *throttle.Request) { r.Deadline = now }),
		request("a2", nil),
		request("a7", func(r *throttle.Request) { r.Key = strings.Repeat("k", 65) }),
		request("c1", func(r *throttle.Request) { r.Attributes = map[string]string{"unused": "x"} }),
		request("c2", func(r *throttle.Request) { r.Ticket = throttle.Ticket{} }),
		request("c3", func(r *throttle.Request) { r.Policy = "other" }),
	}
	decisions, err := st.line().Join(t.Context(), requests)
	expect.Require(t, err == nil && len(decisions) == len(requests), len(decisions), "decisions", err)
	for i, want := range []string{
		"10s", `throttle: policy "p": ticket "": must have an ID`,
		`throttle: policy "p", window "own": cost requests 3: never fits: the window grants 2 at most`, "exempt",
		`throttle: policy "p", window "own": cost requests 2: never fits: the window grants 1 at most`,
		`throttled: p/own, tenant a, 10s: may wait for 10s, longer than 9.999999s: context deadline exceeded`, "10s",
		`throttled: p/own, tenant a, 20s: 2 wait already`, "20s",
		`throttled: p/own, tenant a, 20s: too late for ` + soon.String(),
		`throttled: p/own, tenant a, 20s: too late for ` + now.String(), "10s again",
		`throttle: policy "p": key "` + strings.Repeat("k", 64) + `...": must be at most 64 bytes`, "0s",
		`throttle: policy "p": ticket "": must have an ID`,
		`throttle: policy "p": policy "other": must be that of the line, or empty`,
	} {
		got := decisions[i].RetryIn.String()
		var late *throttle.DeniedError
		switch p := decisions[i]; {
		case errors.As(p.Err, &late) && !late.StartsAt.IsZero():
			got = late.Decision.Reason() + ": too late for " + late.Request.Deadline.String()
			wait := late.StartsAt.Sub(now)
			expect.That(t, wait >= 20*s && wait <= 1*m, "ticket", i, "would start in", wait)
		case p.Err != nil:
			got = p.Err.Error()
		case p.Exempt:
			got = "exempt"
		case p.AlreadyQueued:
			got += " again"
		}
		expect.Equal(t, got, want, i)
		expect.That(t, decisions[i].Latest >= decisions[i].RetryIn,
			"ticket", i, "starts in", decisions[i].RetryIn, "at least and", decisions[i].Latest, "at most")
	}
	var refused *throttle.DeniedError
	expect.That(t, errors.As(decisions[5].Err, &refused) && refused.Request.MaxWait == 10*s-us &&
		errors.Is(refused, context.DeadlineExceeded) && refused.Decision.Latest == 10*s, refused)
	expect.That(t, !errors.Is(decisions[7].Err, context.DeadlineExceeded), decisions[7].Err)
	st.takes("c1")
	st.at(10*s).takes("a2", "a4")
	st.at(20 * s).takes("a5")
	expect.Equal(t, st.took["a5"].Key, "key of a5", "key")
	expect.Err(t, expect.ErrOf(st.l.Line("q").Join(t.Context(), requests)), throttle.ErrUnknownPolicy)
}

// A ticket that joins again with another tenant, and is refused, keeps its place.
func TestARefusedMoveKeepsThePlace(t *testing.T) {
	client := limitertest.RedisClient(t)
	for name, limit := range map[string]func(*throttle.Request){
		"max wait": func(r *throttle.Request) { r.MaxWait = s },
		"deadline": func(r *throttle.Request) { r.Deadline = time.Now().Add(s) },
		"backlog":  func(r *throttle.Request) { r.Backlog = 1 },
	} {
		st := newStory(t, client, limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 10 * s}))
		st.granted("a0", "b0")
		st.waits("a1", "b1")
		r := st.request("b1")
		r.Ticket = limitertest.Ticket("a1")
		limit(&r)
		expect.That(t, st.joining(r).Err != nil, name)
		st.at(10*s).takes("a1", "b1").asks(-1)
		st.waits("a2", "b2")
		r = st.request("b2")
		r.Ticket = limitertest.Ticket("a2")
		expect.Equal(t, st.joining(r).RetryIn, 20*s, name)
		st.at(20 * s).takes("b2").at(30 * s).takes("a2").asks(-1)
	}
}

// A deadline that is over refuses a ticket that fits now, too.
func TestJoinRefusesByADeadlineThatIsOver(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(5, 10*s)))
	late, now := st.request("a1"), st.request("a2")
	late.Deadline, now.Deadline = time.Now(), time.Now().Add(h)
	expect.Err(t, st.joining(late).Err, new(*throttle.DeniedError))
	expect.Must(t, st.joining(now).Err)
}

// Tickets that reserve together are granted or wait, each for its own, and one that is wrong changes nothing. A small
// one does not pass one that has just begun to wait. What was granted can be handled as if it was taken.
func TestTicketsReserveTogether(t *testing.T) {
	l := limitertest.New(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(4, h)))
	var requests []throttle.Request
	for i, cost := range []int64{1, 5, 1, 3, 1} { // 5 never fits
		r := limitertest.Acme(cost)
		r.Ticket = throttle.Ticket{Queue: "q", ID: string(rune('a' + i))}
		requests = append(requests, r)
	}
	decisions, err := l.Line("p").Reserve(t.Context(), requests)
	expect.Require(t, err == nil && errors.As(decisions[1].Err, new(*throttle.RequestError)), decisions, err)
	var tickets []throttle.TakenTicket
	for i, want := range []struct{ granted, queued bool }{{true, false}, {}, {true, false}, {false, true}, {false, true}} {
		tickets = append(tickets, throttle.TakenTicket{Decision: decisions[i].Decision})
		expect.Equal(t, [2]bool{decisions[i].Granted, decisions[i].Queued}, [2]bool{want.granted, want.queued}, requests[i].Ticket.ID)
		expect.Equal(t, l.Line("p").Matches(tickets[i], requests[i]), want.granted, requests[i].Ticket.ID)
	}
	limitertest.WantUsed(t, l, limitertest.Acme(1), 2)
	expect.Must(t, l.Line("p").Refund(t.Context(), tickets))
	wantTaken(t, l, 64, "d e", "q")
	limitertest.WantUsed(t, l, limitertest.Acme(1), 4)
}

// A tenant's only ticket is granted, and its next one joins in the same call. A flow that has left delays nobody there.
func TestAFlowIsLeftAndJoinedInOneCall(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: s}))
	st.granted("a1")
	st.waits("a2")
	decisions := expect.Got(st.at(s).l.Line("p").Reserve(t.Context(), []throttle.Request{st.request("a2"), st.request("a3")}))(t)
	expect.Require(t, decisions[0].Decision.Granted && decisions[1].Decision.Queued, decisions)
	st.at(2 * s).takes("a3")
	st = newStory(t, st.client, limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: m}, limitertest.SharedWindow(2, s)))
	st.granted("b1", "c1")
	st.waits("b2", "d1") // b2 goes on waiting
	decisions = expect.Got(st.at(s).line().Reserve(t.Context(), []throttle.Request{st.request("d1"), st.request("e1")}))(t)
	expect.That(t, decisions[0].Granted && decisions[1].Granted, "d has left:", decisions)
}

// A reservation joins, and its answer is lost. A server takes the ticket before the call is repeated: it costs once.
func TestATicketThatWasTakenIsNotChargedByARepeat(t *testing.T) {
	client := limitertest.RedisClient(t)
	for _, exempt := range []bool{false, true} { // an exempt one joins because of a pause, which then ends
		lossyClient := redis.NewClient(client.Options())
		defer lossyClient.Close()
		p := limitertest.Policy(throttle.Window{Name: "own", Limit: 2, Period: s})
		p.Tenants = map[string]throttle.Tenant{"a": {Exempt: exempt}}
		st := newStory(t, client, p)
		st.granted("a1", "a2")
		lost := limitertest.NewByClock(t, lossyClient, st.c, p)
		if exempt {
			paused := []throttle.Pause{{Policy: "p", Until: limitertest.At(s)}}
			lost.SetInterventions(throttle.Interventions{At: limitertest.At(0), Pauses: paused})
		}
		lossyClient.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if err := next(ctx, cmd); !hooktest.IsScript(cmd) || err != nil || st.now() > 0 {
				return err
			}
			st.at(s).takes("a3")
			cmd.Args()[4] = limitertest.Midnight + s.Microseconds()
			return next(ctx, cmd)
		}))
		d := limitertest.Reserve(t, lost, st.request("a3"))
		expect.That(t, d.Queued && !d.Granted && (exempt || d.Windows[0].Used == 1), d)
	}
}

// Many requests reserve by several calls to Redis. If one of them fails, the grants of the others are known.
func TestAGrantIsKnownIfAnotherCallFails(t *testing.T) {
	failing := redis.NewClient(limitertest.RedisClient(t).Options())
	defer failing.Close()
	var windows []throttle.Window
	for i := range 16 { // so that a call has 32 requests
		windows = append(windows, throttle.Window{Name: fmt.Sprint("w", i), Limit: 40, Period: h, Shared: true})
	}
	l := limitertest.New(t, failing, limitertest.Policy(windows...))
	limitertest.Reserve(t, l, limitertest.Acme(0)) // loads the script
	calls := 0
	failing.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if calls++; calls == 2 {
			return io.EOF
		}
		return next(ctx, cmd)
	}))
	decisions, err := l.Line("p").Reserve(t.Context(), slices.Repeat([]throttle.Request{limitertest.Acme(1)}, 40))
	expect.Err(t, err, throttle.ErrUnavailable)
	expect.Require(t, len(decisions) == 40, decisions)
	for i, decision := range decisions {
		expect.Equal(t, decision.Granted, i < 32, i)
		expect.Equal(t, errors.Is(decision.Err, throttle.ErrUnavailable), i >= 32, i)
	}
}
