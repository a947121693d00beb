package limitertest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// methods calls every method of a reservation that may fail, and returns the errors by name.
func methods(ctx context.Context, r throttle.Reservation) map[string]error {
	_, cancelled := r.Cancel(ctx)
	_, settled := r.Settle(ctx, map[string]int64{throttle.Requests: 2})
	_, renewed := r.Renew(ctx)
	_, paused := r.Pause(ctx, time.Second, "")
	return map[string]error{
		"Cancel": cancelled, "Settle": settled, "Renew": renewed, "Release": r.Release(ctx), "Pause": paused,
		"ReportRemaining": r.ReportRemaining(ctx, throttle.Requests, 1, time.Second),
	}
}

// A reservation that was decoded, such as from JSON, does not know what it holds.
func TestAReservationOfNoLimiterIsRefused(t *testing.T) {
	l := New(t, NoRedis(t), Policy(Slots(1)))
	decoded := throttle.Reservation{Request: Acme(1), ID: "0123456789abcdef"}
	for method, err := range methods(t.Context(), l.Attach(decoded)) {
		var invalid *throttle.RequestError
		expect.That(t, method == "Pause" || errors.As(err, &invalid) && invalid.Field == "id" &&
			invalid.Value == decoded.ID, method, err)
	}
	for method, err := range methods(t.Context(), throttle.Reservation{}) {
		expect.That(t, err == nil || method == "Pause" && errors.Is(err, throttle.ErrUnknownPolicy), method, err)
	}
	expect.That(t, decoded.Hold(t.Context()) == t.Context(), "it is held")
}

func TestAnUnknownPolicyIsTheSameErrorEverywhere(t *testing.T) {
	l := New(t, RedisClient(t), Policy(Slots(1)))
	never := Policy(Slots(1))
	never.Name = "never"
	r := Acme(1)
	r.Policy = "never"
	for method, err := range methods(t.Context(), l.Attach(Elsewhere(t, never, r))) {
		expect.Err(t, err, throttle.ErrUnknownPolicy, method)
	}
	// One that was removed is still known.
	held := Reserve(t, l, Acme(1)).Reservation
	expect.Must(t, l.SetPolicies(nil))
	for method, err := range methods(t.Context(), held) {
		expect.That(t, err == nil, method, "by a policy that was removed", err)
	}
	again, err := held.Renew(t.Context())
	expect.That(t, !again && err == nil, "released, and held", again, err)
}

func TestWhatFailedOpenHasNothingToCorrect(t *testing.T) {
	p := Policy(Slots(1))
	p.FailOpen = true
	l := New(t, NoRedis(t), p)
	d := Reserve(t, l, Acme(1))
	expect.Require(t, d.FailedOpen != nil && d.Reservation.Tenant == "acme" && d.Reservation.ID == "", d)
	for method, err := range methods(t.Context(), d.Reservation) {
		want := method == "Pause"
		expect.That(t, errors.Is(err, throttle.ErrUnavailable) == want && (err != nil) == want, method, err)
	}
	expect.That(t, d.Reservation.Hold(t.Context()) == t.Context(), "what failed open is held")
}

// A lookup of tenants that fails while work goes on takes neither its lease nor what it corrects.
func TestWhatIsHeldOutlastsTheLookupOfItsTenant(t *testing.T) {
	client := RedisClient(t)
	var away atomic.Bool
	l := NewFrom(t, throttle.Config{
		Client: client, Policies: []throttle.Policy{Policy(Slots(1), throttle.Window{Name: "w", Limit: 9, Period: h})},
		Tenants: func(context.Context, string, string) (throttle.Tenant, bool, error) {
			if away.Load() {
				return throttle.Tenant{}, false, errors.New("the database is away")
			}
			return throttle.Tenant{}, false, nil
		},
	})
	r := Reserve(t, l, Acme(1)).Reservation
	away.Store(true)
	held, err := r.Renew(t.Context())
	expect.That(t, held && err == nil, "held", held, err)
	expect.Must(t, expect.ErrOf(r.Settle(t.Context(), map[string]int64{throttle.Requests: 3})))
	expect.Must(t, r.Release(t.Context()))
	away.Store(false)
	WantUsed(t, l, Acme(1), 0, 3)
	away.Store(true)
	for method, err := range methods(t.Context(), r) {
		expect.That(t, err == nil, method, err)
	}
}

// Work that began before its policy got a scope of another attribute goes on to its end.
func TestWhatIsHeldOutlastsAnAttributeThatItLacks(t *testing.T) {
	client := RedisClient(t)
	w := throttle.Window{Name: "w", Limit: 9, Period: h}
	l := New(t, client, Policy(Slots(1), w))
	r := Reserve(t, l, Acme(1)).Reservation
	SetPolicy(t, l, Slots(1), w, throttle.Window{Name: "user", Limit: 9, Period: h, Per: []string{"user"}})
	held, err := r.Renew(t.Context())
	expect.That(t, held && err == nil, "held", held, err)
	for method, err := range methods(t.Context(), r) {
		expect.That(t, err == nil || method == "Pause" || method == "ReportRemaining", method, err)
	}
	request := Acme(1)
	request.Attributes = map[string]string{"user": "bob"}
	WantUsed(t, l, request, 0, 0, 0)
}

// Ten calls are under way when the first of them is answered: 12 are left, and nine will be used. So
// three more are granted. That holds for the first answer ever, and after a reset.
func TestWhatIsUnderWayIsNoPartOfWhatIsLeft(t *testing.T) {
	for name, row := range map[string]struct {
		apart time.Duration
		first int // that is answered
		more  int
	}{
		"at once": {0, 0, 3}, "one by one": {ms, 0, 3}, "at once, and the answers cross": {0, 1, 2}, "one by one, and they cross": {ms, 1, 3},
	} {
		t.Run(name, func(t *testing.T) {
			throttletest.Each(t, func(t *testing.T, client *redis.Client) {
				l, c := NewWithClock(t, client, Policy(throttle.Window{Name: "w", Limit: 100, Period: 10 * s}))
				report := func(r throttle.Reservation, units int64) {
					t.Helper()
					expect.Must(t, r.ReportRemaining(t.Context(), throttle.Requests, units, m))
				}
				for period := range 2 {
					var calls []throttle.Reservation
					begun := time.Duration(period) * (m + 10*s)
					for i := range 10 {
						c.Set(begun + time.Duration(i)*row.apart)
						calls = append(calls, Reserve(t, l, Acme(1)).Reservation)
					}
					c.Set(begun + s)
					report(calls[row.first], int64(12-row.first))
					report(calls[1-row.first], int64(11+row.first))
					for i := range 4 {
						expect.Equal(t, Reserve(t, l, Acme(1)).Granted, i < row.more, "period", period, "call after ten", i+1)
					}
				}
			})
		})
	}
}

// A lease that has run out is renewed while nobody waits for the slot, and then no more.
func TestALeaseThatRanOutGoesToWhoeverWaits(t *testing.T) {
	client := RedisClient(t)
	l, c := NewWithClock(t, client, Policy(Slots(1), SharedWindow(20, s)))
	holder := Reserve(t, l, Acme(1)).Reservation
	renewed := func(want bool) {
		t.Helper()
		held, err := holder.Renew(t.Context())
		expect.That(t, held == want && err == nil, "renewed", held, err)
	}
	c.Set(31 * s)
	renewed(true)
	r := Acme(1)
	r.Ticket = Ticket("waits")
	Join(t, l, r)
	c.Set(40 * s)
	renewed(true)
	c.Set(71 * s)
	renewed(false)
	taken, err := l.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{r.Ticket.Queue: 1}, Max: 1})
	expect.That(t, err == nil && len(taken.Tickets) == 1, "took", taken.Tickets, err)
	c.Set(2 * m)
	expect.Must(t, holder.Release(t.Context()))
	renewed(false) // a late one takes no slot, though all are free
	holder = Reserve(t, l, Acme(1)).Reservation
	c.Set(3 * m)
	expect.Must(t, expect.Got(holder.Settle(t.Context(), map[string]int64{"requests": 0}))(t).Release(t.Context()))
	renewed(false)
}
