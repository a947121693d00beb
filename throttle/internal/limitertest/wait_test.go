package limitertest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestWaitSleepsUntilItFits(t *testing.T) {
	Bubble(t, Policy(
		throttle.Window{Name: "spaced", Algorithm: throttle.AlgorithmGCRA, Limit: 7, Burst: 1, Period: 144 * s},
		throttle.Window{Name: "w", Limit: 2, Period: m},
	), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		start := time.Now()
		var waited []time.Duration
		for range 4 {
			d, err := l.Wait(t.Context(), Acme(1))
			expect.Require(t, err == nil && d.Granted && d.Reservation.ID != "", "granted", d.Granted, err)
			waited = append(waited, time.Since(start))
		}
		const each = 20571429 * us // a seventh of 144 s, never rounded down
		expect.Equal(t, waited, []time.Duration{0, each, m, m + each})
	})
}

func TestWaitGivesUpAtOnce(t *testing.T) {
	Bubble(t, Policy(throttle.Window{Name: "w", Limit: 1, Period: m}), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		start := time.Now()
		Reserve(t, l, Acme(1))
		ctx, end := context.WithTimeout(t.Context(), m-us)
		defer end()
		d, err := l.Wait(ctx, Acme(1))
		wantNotInTime(t, d, err)
		brief := Acme(1)
		brief.MaxWait = m - us
		d, err = l.Wait(t.Context(), brief)
		wantNotInTime(t, d, err)
		expect.Equal(t, time.Since(start), 0)
		expect.Err(t, expect.ErrOf(l.Wait(ctx, Acme(2))), new(*throttle.RequestError), "what never fits")

		later, end := context.WithTimeout(t.Context(), m+us)
		defer end()
		d, err = l.Wait(later, Acme(1))
		expect.That(t, err == nil && d.Granted && time.Since(start) == m, "with time enough", d, err)
	})
}

// wantNotInTime fails unless a Wait was denied for a minute, as it would have ended too late.
func wantNotInTime(t *testing.T, d throttle.Decision, err error) {
	t.Helper()
	var denied *throttle.DeniedError
	expect.Require(t, errors.As(err, &denied) && !d.Granted && denied.Decision.RetryIn == m &&
		errors.Is(err, context.DeadlineExceeded), "granted", d.Granted, err)
	expect.Equal(t, err.Error(), "throttled: p/w, tenant acme, 1m0s: would start 2000-01-01T00:01:00Z, deadline 2000-01-01T00:00:59Z")
}

// With a MaxWait below 0, Wait is a Reserve whose denial is an error, and Join refuses what would wait.
func TestWaitThatMustNotWait(t *testing.T) {
	Bubble(t, Policy(throttle.Window{Name: "w", Limit: 1, Period: m}), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		start := time.Now()
		r := Acme(1)
		r.MaxWait, r.Ticket = -1, throttle.Ticket{Queue: "q", ID: "1"}
		d, err := l.Wait(t.Context(), r)
		expect.Require(t, err == nil && d.Granted, "granted", d.Granted, err)
		var denied *throttle.DeniedError
		_, err = l.Wait(t.Context(), r)
		expect.That(t, errors.As(err, &denied) && denied.Cause == nil && !denied.Decision.Queued && denied.Decision.RetryIn == m, "denied", err)
		decisions, err := l.Line("p").Join(t.Context(), []throttle.Request{r})
		expect.That(t, err == nil && errors.As(decisions[0].Err, new(*throttle.DeniedError)), "joined", decisions, err)
		expect.Equal(t, time.Since(start), 0)
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	Bubble(t, Policy(throttle.Window{Name: "w", Limit: 1, Period: h}), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		start := time.Now()
		Reserve(t, l, Acme(1))
		ctx, end := context.WithCancel(t.Context())
		time.AfterFunc(m, end)
		d, err := l.Wait(ctx, Acme(1))
		expect.That(t, errors.Is(err, context.Canceled) && !d.Granted && time.Since(start) == m, d, err)
		WantUsed(t, l, Acme(0), 1)
		stopping := errors.New("stopping")
		caused, stop := context.WithCancelCause(t.Context())
		time.AfterFunc(m, func() { stop(stopping) })
		_, err = l.Wait(caused, Acme(1))
		expect.That(t, errors.Is(err, stopping) && errors.Is(err, context.Canceled), err)
	})
}

// When the context of a job ends, its server fails it: before that Wait denies, which costs the job nothing.
func TestWaitDeniesAJobBeforeItsTimeIsOver(t *testing.T) {
	Bubble(t, Policy(Slots(1)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		Reserve(t, l, Acme(1)) // nobody knows for how long
		ctx, cancel := context.WithTimeout(throttle.WithCaller(t.Context(), &throttle.Caller{}), 3*s)
		defer cancel()
		err := expect.ErrOf(l.Wait(ctx, Acme(1)))
		expect.That(t, errors.As(err, new(*throttle.DeniedError)) && ctx.Err() == nil, err, ctx.Err())
	})
}

func TestWaitGoesOnWhenItsPolicyLosesAWindow(t *testing.T) {
	tenantWindow := throttle.Window{Name: "own", Limit: 1, Period: m}
	Bubble(t, Policy(tenantWindow, throttle.Window{Name: "w", Limit: 5, Period: h}), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		Reserve(t, l, Acme(1))
		time.AfterFunc(s, func() { expect.Must(t, l.SetPolicies([]throttle.Policy{Policy(tenantWindow)})) })
		d, err := l.Wait(t.Context(), Acme(1))
		expect.That(t, err == nil && d.Granted && len(d.Windows) == 1, d, err)
	})
}

// What a process gives back is for its own waiting calls at once, in whatever way it does so.
func TestWaitEndsWhenTheProcessGivesSomethingBack(t *testing.T) {
	for name, giveBack := range map[string]func(context.Context, *throttle.Limiter, throttle.Decision) error{
		"cancel": func(ctx context.Context, _ *throttle.Limiter, d throttle.Decision) error {
			_, err := d.Reservation.Cancel(ctx)
			return err
		},
		"settle": func(ctx context.Context, _ *throttle.Limiter, d throttle.Decision) error {
			_, err := d.Reservation.Settle(ctx, map[string]int64{"requests": 1})
			return err
		},
		"refund": func(ctx context.Context, l *throttle.Limiter, d throttle.Decision) error {
			r := d.Reservation
			return l.Line("p").Refund(ctx, []throttle.TakenTicket{{Flow: "q|acme", Cost: "requests=3", Decision: throttle.Decision{Reservation: r}}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			Bubble(t, Policy(throttle.Window{Name: "w", Limit: 3, Period: 10 * m}), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
				d := Reserve(t, l, Acme(3))
				var waited atomic.Bool
				go func() {
					expect.Equal(t, expect.ErrOf(l.Wait(t.Context(), Acme(1))), nil)
					waited.Store(true)
				}()
				time.Sleep(m + 500*ms) // between two takes of the claims, which come each second
				expect.Must(t, giveBack(t.Context(), l, d))
				time.Sleep(ms)
				expect.That(t, waited.Load(), "it goes on waiting")
				time.Sleep(s)
			})
		})
	}
}
