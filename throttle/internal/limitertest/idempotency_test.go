package limitertest

import (
	"context"
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A key is its tenant's own: one tenant's call is never taken for another's, nor given back by it.
func TestKeyOfOneTenantIsNotAnothers(t *testing.T) {
	client := Redis(t)
	l, _ := NewWithClock(t, client, Policy(SharedWindow(10, 10*s)))
	of := func(tenant, key string) throttle.Reservation {
		t.Helper()
		r := Acme(1)
		r.Tenant, r.IdempotencyKey = tenant, key
		d := Reserve(t, l, r)
		expect.Require(t, d.Granted, tenant, key, "denied")
		return d.Reservation
	}
	ids := map[string]bool{}
	var all []throttle.Reservation
	for _, pair := range [][2]string{{"acme", "n"}, {"beta", "n"}, {"acme:n", "n"}, {"acme", "n:n"}, {"", "acme:n"}} {
		r := of(pair[0], pair[1])
		ids[r.ID], all = true, append(all, r)
	}
	wantUsed := func(want int64) {
		t.Helper()
		WantUsed(t, l, Acme(1), want)
	}
	wantUsed(5)
	expect.Equal(t, len(ids), 5, ids)
	Cancel(t, l, all[1])
	wantUsed(4)
	expect.Equal(t, of("acme", "n").ID, all[0].ID)
	wantUsed(4)
}

// A repeat of another cost, or counted elsewhere, is another request: it gets neither the grant of
// the first nor a charge of its own.
func TestAKeyStandsForOneRequest(t *testing.T) {
	p := Policy(
		SharedWindow(100, 10*s),
		throttle.Window{Name: "tokens", Unit: "tokens", Limit: 100, Period: 10 * s, Scope: throttle.Per("tenant", "user")},
	)
	p.Tenants = map[string]throttle.Tenant{"exempt": {Exempt: true}}
	observing := p
	observing.Name, observing.Mode = "observing", throttle.ModeObserve
	first := throttle.Request{
		Attributes: map[string]string{"user": "bob"}, Cost: map[string]int64{"tokens": 5}, IdempotencyKey: "n", Policy: "p", Tenant: "acme",
	}
	for name, change := range map[string]func(*throttle.Request){
		"single":    func(r *throttle.Request) {},
		"exempt":    func(r *throttle.Request) { r.Tenant = "exempt" },
		"observing": func(r *throttle.Request) { r.Policy = "observing" },
	} {
		first := first
		change(&first)
		t.Run(name, func(t *testing.T) {
			throttletest.Each(t, func(t *testing.T, client *redis.Client) {
				l, c := NewWithClock(t, client, p, observing)
				made := Reserve(t, l, first).Reservation
				c.Set(1 * ms)
				before := Dump(t, client)
				other := func(change func(*throttle.Request)) throttle.Request {
					r := first
					r.Attributes, r.Cost = maps.Clone(r.Attributes), maps.Clone(r.Cost)
					change(&r)
					return r
				}
				for name, r := range map[string]throttle.Request{
					"more":         other(func(r *throttle.Request) { r.Cost["tokens"] = 6 }),
					"less":         other(func(r *throttle.Request) { r.Cost["tokens"] = 0 }),
					"another unit": other(func(r *throttle.Request) { r.Cost["requests"] = 0 }),
					"another user": other(func(r *throttle.Request) { r.Attributes["user"] = "eve" }),
					"would wait":   other(func(r *throttle.Request) { r.Cost["tokens"] = 100 }),
				} {
					wantOtherRequest(t, name, l, r)
				}
				expect.Equal(t, Dump(t, client), before)
				same := other(func(r *throttle.Request) {
					r.Attributes["trace"], r.Cost["requests"], r.MaxHold, r.Class = "x", 1, m, throttle.ClassBatch
				})
				wantGrant := func(when string) {
					t.Helper()
					d := Reserve(t, l, same)
					expect.That(t, d.Granted && d.Reservation.ID == made.ID && d.At.Equal(made.At),
						when, d, "want the grant of the first")
				}
				wantGrant("a repeat")
				settled, err := made.Settle(t.Context(), map[string]int64{"tokens": 9})
				expect.Must(t, err)
				wantGrant("after Settle")
				wantOtherRequest(t, "the settled cost", l, settled.Request)
				expect.Equal(t, Used(Reserve(t, l, other(func(r *throttle.Request) { r.IdempotencyKey = "another" }))), []int64{2, 14})
				Cancel(t, l, made)
				expect.Equal(t, Used(Reserve(t, l, other(func(r *throttle.Request) { r.Cost["tokens"] = 7 }))), []int64{2, 12})
			})
		})
	}
}

func wantOtherRequest(t *testing.T, name string, l *throttle.Limiter, r throttle.Request) {
	t.Helper()
	const hint = "stands for another cost or other attributes: use another key for another request"
	want := throttle.RequestError{Policy: r.Policy, Field: "idempotency key", Value: "n", Hint: hint}
	_, reserved := l.Reserve(t.Context(), r)
	_, waited := l.Wait(t.Context(), r)
	for _, err := range []error{reserved, waited} {
		var got *throttle.RequestError
		expect.That(t, errors.As(err, &got) && *got == want, name, err)
	}
	expect.Must(t, expect.ErrOf(l.Peek(t.Context(), r)))
}

// In one call to Redis too, and also if that is repeated. Tickets of a line go by the same rule.
func TestAKeyStandsForOneRequestOfABatch(t *testing.T) {
	client := Redis(t)
	repeating := redis.NewClient(client.Options())
	defer repeating.Close()
	repeating.AddHook(repeatAt(0, 1*s, 2*s))
	p := Policy(SharedWindow(100, 10*s))
	hooked := NewEdited(t, repeating, NewClock(), []func(string) string{WithoutExpiry}, p)
	first, other, plain := Acme(2), Acme(3), Acme(4)
	first.IdempotencyKey, other.IdempotencyKey = "n", "n"
	decisions, errs := hooked.TryTogether(t, Call{Request: first}, Call{Request: other}, Call{Request: plain}, Call{Request: first})
	expect.That(t, errors.As(errs[1], new(*throttle.RequestError)) &&
		errors.Join(errs[0], errs[2], errs[3]) == nil, errs)
	for i, want := range []bool{true, false, true, true} {
		expect.Equal(t, decisions[i].Granted, want, i)
	}
	WantUsed(t, hooked.Limiter, Acme(1), 6)
	first.Ticket, other.Ticket = throttle.Ticket{Queue: "q", ID: "1"}, throttle.Ticket{Queue: "q", ID: "2"}
	tickets, err := hooked.Line("p").Reserve(t.Context(), []throttle.Request{other, first})
	expect.That(t, err == nil && !tickets[0].Decision.Granted && !tickets[0].Decision.Queued &&
		tickets[1].Decision.Granted, tickets, err)
}

// A cancel that comes after the key was granted again leaves the later grant its key.
func TestALateCancelKeepsTheKeyOfALaterGrant(t *testing.T) {
	client := Redis(t)
	l, c := NewWithClock(t, client, Policy(SharedWindow(100, 10*s)))
	r := Acme(1)
	r.IdempotencyKey = "n"
	first := Reserve(t, l, r)
	keys := client.Keys(t.Context(), "sluice:{p}:n:*").Val()
	expect.Require(t, len(keys) == 1, keys)
	client.Del(t.Context(), keys...) // a minute has passed
	c.Set(61 * s)
	expect.Equal(t, Used(Reserve(t, l, r)), []int64{1})
	Cancel(t, l, first.Reservation)
	expect.Equal(t, Used(Reserve(t, l, r)), []int64{1})
}

// go-redis repeats a call whose connection broke.
func TestLostReplyIsChargedOnce(t *testing.T) {
	client := Redis(t)
	p := NewProxy(t, client.Options().Addr)
	l := New(t, throttletest.Client(t, p.Addr), Policy(throttle.Window{Name: "w", Limit: 10, Period: 24 * h}))
	Peek(t, l, Acme(1)) // loads the script

	p.Lose.Store(2)
	d := Reserve(t, l, Acme(3))
	expect.Equal(t, p.Lost.Load(), 2, "replies are lost")
	WantGranted(t, d, 3)
	other := Reserve(t, l, Acme(2))
	again := other.Reservation
	expect.Equal(t, other.Windows[0].Used, 5)

	p.Lose.Store(2)
	expect.Equal(t, Used(Cancel(t, l, again)), []int64{3})
	expect.Equal(t, p.Lost.Load(), 4, "replies are lost")
	expect.Equal(t, Cancel(t, l, d.Reservation).Windows[0].Used, 0)
}

// repeatAt sends every script call at each of the times: all replies but the last are lost.
func repeatAt(times ...time.Duration) hooktest.Hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) (err error) {
		if !hooktest.IsScript(cmd) {
			return next(ctx, cmd)
		}
		for _, time := range times {
			cmd.Args()[4] = Midnight + time.Microseconds()
			if err = next(ctx, cmd); err != nil {
				return err
			}
		}
		return nil
	}
}

// A batch whose reply was lost may be decided differently when it is repeated: a denied request may
// fit by then. Repeated once more, it is not charged again.
func TestWhatARepeatedBatchGrantsIsChargedOnce(t *testing.T) {
	p := Policy(throttle.Window{Name: "w", Limit: 2, Period: 10 * s})
	client := Redis(t)
	l, c := NewWithClock(t, client, p)
	Reserve(t, l, Acme(1))
	repeating := redis.NewClient(client.Options())
	defer repeating.Close()
	repeating.AddHook(repeatAt(1*s, 10*s+500*ms, 10*s+600*ms))
	other := NewEdited(t, repeating, NewClock(), []func(string) string{WithoutExpiry}, p)
	decisions := other.Together(t, Call{Request: Acme(1)}, Call{Request: Acme(1)})
	expect.Require(t, decisions[0].Granted && decisions[0].At.Equal(At(1*s)) && decisions[1].Granted &&
		decisions[1].At.Equal(At(10*s+500*ms)), decisions)
	c.Set(10*s + 700*ms)
	WantUsed(t, l, Acme(1), 2)
	Cancel(t, l, decisions[1].Reservation)
	WantUsed(t, l, Acme(1), 1)
}

// A call whose reply is lost for good may have been granted: its caller gets an error, and the next
// call of the process gives back what it took. One that never arrived takes nothing, also if a copy
// of it arrives late.
func TestWhatAnErrorHidesIsGivenBack(t *testing.T) {
	direct := Redis(t)
	proxy := NewProxy(t, direct.Options().Addr)
	client := redis.NewClient(&redis.Options{Addr: proxy.Addr, MaxRetries: -1})
	defer client.Close()
	p := Policy(
		throttle.Window{Name: "w", Limit: 100, Period: h},
		throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 10},
	)
	l := New(t, client, p)
	Reserve(t, l, Acme(1)) // the script is known by now
	for range 3 {
		proxy.Lose.Store(1)
		expect.Err(t, expect.ErrOf(l.Reserve(t.Context(), Acme(2))), throttle.ErrUnavailable)
	}
	expect.Equal(t, Reserve(t, New(t, direct, p), Acme(1)).Windows[0].Used, 4)
	expect.Equal(t, Used(Reserve(t, l, Acme(1))), []int64{3, 3})
}
