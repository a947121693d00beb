package linetest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// What operators put in force holds for what waits, and for what comes.
func TestInterventionsHoldForTheLine(t *testing.T) {
	t.Parallel()
	tenantWindow := throttle.Window{Name: "own", Limit: 1, Period: 10 * s}
	users := throttle.Window{Name: "users", Limit: 1, Period: 10 * s, Per: []string{"tenant", "user"}}
	pauseOne := func(st *story) {
		st.attributes = map[string]string{"user": "u"}
		st.granted("a0")
		st.joins("a1", "a2", "b1", "c1")
		st.pauses("a")
		st.at(s).joins("a3")
		d := limitertest.Reserve(st, st.l, st.request("a4"))
		expect.That(st, !d.Granted && d.Queued && d.Binds == throttle.ByPause && d.RetryIn >= h-m, d)
		e := st.explain("a2")
		expect.That(st, e.Position > 0 && e.Binds == throttle.ByPause && e.Pause.Author == "anna" &&
			e.Expected.Sub(e.At) >= h-m, "a2 is explained by", e)
		for k := range 12 {
			taken := limitertest.Take(st, st.at(time.Duration(10+10*k)*s).l, 64, "q")
			for _, ticket := range taken.Tickets {
				expect.That(st, ticket.Decision.Tenant != "a", "took", ticket.ID, "of a tenant that is paused")
				st.took[ticket.ID] = ticket
			}
		}
		expect.Equal(st, len(st.took), 2)
		st.at(m * 5).joins("b2")
		st.takes("b2")
		st.pauses()
		st.at(6 * m).takes("a1").at(7 * m).takes("a2").at(8 * m).takes("a3").at(9 * m).takes("a4").asks(-1)
	}
	withExempt := limitertest.Policy(limitertest.SharedWindow(2, 10*s))
	withExempt.Tenants = map[string]throttle.Tenant{"e": {Exempt: true}}
	tell(t, map[string]lineCase{
		"a policy is paused": {withExempt, func(st *story) {
			st.pauses("")
			d := limitertest.Reserve(st, st.l, st.without("a"))
			expect.That(st, !d.Granted && !d.Queued && d.RetryIn >= h-m, d, "although there is room")
			st.pauses()
			st.granted("a0", "b0")
			st.waits("a1", "b1")
			st.pauses("")
			st.at(20 * s).takes().asks(s)
			p := st.joins("c1") // the windows have room long before
			expect.That(st, p.RetryIn >= h-m && p.RetryIn <= h && p.Latest >= p.RetryIn && p.Binds == throttle.ByPause && !p.Nudge, p)
			for _, change := range []func(*throttle.Request){
				func(r *throttle.Request) { r.MaxWait = h / 2 },
				func(r *throttle.Request) { r.Deadline = time.Now().Add(h / 2) },
			} {
				r := st.request("d9")
				change(&r)
				expect.Err(st, st.joining(r).Err, new(*throttle.DeniedError), "it cannot start before the pause ends")
			}
			for _, r := range []throttle.Request{st.request("d1"), st.without("d"), {Policy: "p", Tenant: "e"}} {
				d := limitertest.Reserve(st, st.l, r)
				expect.That(st, !d.Granted && d.RetryIn >= h-m && d.Binds == throttle.ByPause && d.Queued == (r.Ticket.ID != ""), d)
				expect.Contains(st, d.Reason(), ": paused until 01:00:00 UTC by hand: it is down, set by anna")
			}
			peeked := limitertest.Peek(st, st.l, st.without("d"))
			expect.That(st, !peeked.Granted && peeked.Windows[0].Used == 0, peeked)
			st.pauses()
			st.at(21*s).takes("a1", "b1").at(31*s).takes("c1", "d1").asks(-1)
			st.pauses("")
			expect.That(st, expect.Got(st.line().ReserveAgain(st.Context(), st.took["c1"], st.request("c1")))(st).Granted, "it was granted before")
			st.at(2*h).granted("e1", "e2", "e3") // the pause has ended by the clock of Redis alone
		}},
		"windows free up during a pause, and the line goes on behind it": {limitertest.Policy(limitertest.SharedWindow(1, 10*s)), func(st *story) {
			st.granted("a0")
			st.pauses("")
			for k, ticket := range []string{"a1", "a2", "a3"} {
				at := h + time.Duration(k)*10*s
				p := st.joins(ticket)
				expect.That(st, p.RetryIn == at && p.Latest == at,
					ticket, "in", p.RetryIn, "to", p.Latest, "want exactly", at)
			}
			d := limitertest.Peek(st, st.l, st.without("a"))
			expect.That(st, d.RetryIn == h+30*s && d.Latest == h+30*s, "in", d.RetryIn, "to", d.Latest, "want", h+30*s)
			e := st.explain("a3")
			expect.That(st, e.Expected.Sub(e.At) == h+20*s && e.Binds == throttle.ByPause, "a3 is explained by", e)
			st.at(h).pauses()
			st.takes("a1").at(h + 10*s).takes("a2").at(h + 20*s).takes("a3").asks(-1)
		}},
		"one of many tenants is paused":                           {limitertest.Policy(tenantWindow, limitertest.SharedWindow(3, 10*s)), pauseOne},
		"a tenant is paused where all windows are shared":         {limitertest.Policy(limitertest.SharedWindow(1, 10*s)), pauseOne},
		"a tenant is paused where windows count by its users":     {limitertest.Policy(users, limitertest.SharedWindow(9, 10*s)), pauseOne},
		"a tenant is paused where windows count by it and others": {limitertest.Policy(tenantWindow, users), pauseOne},
		"a limit is raised, and lowered again": {limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: h}), func(st *story) {
			st.granted("a0")
			st.waits("a1", "a2", "a3")
			st.at(s).takes()
			st.intervene(throttle.Interventions{Overrides: []throttle.TenantOverride{{Tenant: "a", Windows: map[string]throttle.Override{"own": {Limit: 3}}}}})
			st.at(2*s).takes("a1", "a2")
			st.intervene(throttle.Interventions{})
			st.at(h + s).takes().at(h + 2*s).takes("a3").asks(-1)
		}},
		"a limit is cut, and the cut ends while tickets wait": {limitertest.Policy(throttle.Window{Name: "own", Limit: 4, Period: 10 * s}), func(st *story) {
			st.granted("a0")
			st.intervene(throttle.Interventions{Overrides: []throttle.TenantOverride{{Tenant: "a", Windows: map[string]throttle.Override{"own": {Limit: 1}}}}})
			st.waits("a1", "a2", "a3")
			st.at(s).takes()
			st.intervene(throttle.Interventions{})
			st.at(2*s).takes("a1", "a2", "a3").asks(-1)
		}},
		"a tenant becomes exempt while its tickets wait": {limitertest.Policy(tenantWindow, limitertest.SharedWindow(1, h)), func(st *story) {
			st.granted("a0")
			st.waits("a1", "a2", "b1")
			st.at(s).takes()
			st.intervene(throttle.Interventions{Overrides: []throttle.TenantOverride{{Tenant: "a", Exempt: new(true)}}})
			st.at(2*s).takes("a1", "a2")
			for _, ticket := range []string{"a1", "a2"} {
				d, err := st.line().ReserveAgain(st.Context(), st.took[ticket], st.request(ticket))
				expect.That(st, err == nil && d.Granted && d.Exempt, ticket, d, err)
			}
			st.leave("b1").at(3 * s).takes().asks(-1)
		}},
		"a tenant that is exempt waits for the end of a pause alone": {limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 24 * h}, throttle.Window{Name: "slot", Algorithm: throttle.AlgorithmConcurrency, Limit: 1}), func(st *story) {
			st.granted("a0")
			st.intervene(throttle.Interventions{
				Overrides: []throttle.TenantOverride{{Tenant: "a", Exempt: new(true)}}, Pauses: []throttle.Pause{{Tenant: "a"}},
			})
			r := st.request("a1")
			st.pause(st.l.Attach(throttle.Reservation{Request: r}), h) // which stops others until then, too
			r.Deadline = time.Now().Add(2 * h)
			for _, r.Ticket = range []throttle.Ticket{{}, r.Ticket} {
				d := limitertest.Reserve(st, st.l, r)
				expect.That(st, d.RetryIn == h && d.Latest == h && d.Binds == throttle.ByPause, d)
			}
			st.at(h + s).takes("a1").asks(-1)
		}},
		"a weight changes": {limitertest.Policy(limitertest.SharedWindow(1, s)), func(st *story) {
			st.granted("x0")
			st.waits("a1", "b1", "a2", "b2", "a3", "b3")
			st.intervene(throttle.Interventions{Overrides: []throttle.TenantOverride{{Tenant: "b", Weight: 1e6}}})
			var got string
			for k := range 6 {
				for _, ticket := range limitertest.Take(st, st.at(time.Duration(k+1)*s).l, 64, "q").Tickets {
					got += ticket.ID + " "
				}
			}
			expect.That(st, got == "a1 b1 b2 b3 a2 a3 " || got == "b1 b2 b3 a1 a2 a3 " || got == "b1 a1 b2 b3 a2 a3 ",
				"took", got)
		}},
	})
}

// The end of a pause of a tenant is in the line: it ends also if no server writes it there.
func TestAPauseOfATenantEndsByItself(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
	st.pauses("a")
	st.joins("a1", "b1")
	st.takes("b1").takes()
	other := limitertest.NewByClock(t, st.client, st.c, limitertest.Policy(limitertest.SharedWindow(1, 10*s)))
	st.at(h - s)
	wantTaken(t, other, 64, "", "q")
	st.at(h)
	wantTaken(t, other, 64, "a1", "q")
}

// Calls that wait in place wait for the end of a pause, or know at once that it is too long.
func TestWaitIsPaused(t *testing.T) {
	limitertest.Bubble(t, limitertest.Policy(limitertest.SharedWindow(5, s)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		for _, tenant := range []string{"", "acme"} {
			now := time.Now()
			l.SetInterventions(throttle.Interventions{At: now, Pauses: []throttle.Pause{
				{Author: "anna", Cause: "it is down", Policy: "p", Tenant: tenant, Until: now.Add(m)},
			}})
			ctx, stop := context.WithTimeout(t.Context(), 10*s)
			_, err := l.Wait(ctx, limitertest.Acme(1))
			stop()
			var denied *throttle.DeniedError
			expect.That(t, errors.As(err, &denied) && time.Since(now) <= s && denied.Decision.Pause != nil,
				"after", time.Since(now), err)
			d, err := l.Wait(t.Context(), limitertest.Acme(1))
			took := time.Since(now)
			expect.That(t, err == nil && d.Granted && took == m, "granted after", took, d, err)
			in := l.Interventions()
			expect.That(t, len(in.Pauses) == 0, "in force after its end", in)
		}
	})
}

// A request heeds a pause of its policy that begins while it waits for the call that carries it.
func TestAPauseBeginsBeforeTheCall(t *testing.T) {
	client, until := limitertest.RedisClient(t), time.Now().Add(h).Truncate(us)
	l := limitertest.NewEdited(t, client, nil, nil, limitertest.Policy(limitertest.SharedWindow(5, s)))
	client.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		l.SetInterventions(throttle.Interventions{At: time.Now(), Pauses: []throttle.Pause{{Policy: "p", Until: until}}})
		return next(ctx, cmd)
	}))
	d := l.Together(t, limitertest.Call{Request: limitertest.Acme(1)})[0]
	want := throttle.Pause{ByHand: true, Policy: "p", Until: until}
	expect.That(t, !d.Granted && d.Binds == throttle.ByPause && d.RetryIn > h-m && *d.Pause == want, d, d.Pause)
}
