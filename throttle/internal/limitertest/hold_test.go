package limitertest

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestAHoldRenewsUntilItIsReleased(t *testing.T) {
	Bubble(t, Policy(Slots(2)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		caller, stop := context.WithCancel(t.Context())
		held := Reserve(t, l, Acme(1)).Reservation
		work := held.Hold(caller)
		time.Sleep(5 * m) // ten leases
		WantUsed(t, l, Acme(1), 1)
		expect.Must(t, work.Err())
		stop() // the work may go on for a while: so does the hold
		time.Sleep(5 * m)
		WantUsed(t, l, Acme(1), 1)
		expect.Equal(t, context.Cause(work), context.Canceled)
		expect.Must(t, held.Release(caller))
		WantUsed(t, l, Acme(1), 0)
		brief := Reserve(t, l, Acme(1)).Reservation
		done := brief.Hold(t.Context())
		expect.Must(t, brief.Release(t.Context()))
		expect.Equal(t, context.Cause(done), context.Canceled, "the work's context ends at the release")
		again := Reserve(t, l, Acme(1))
		expect.Must(t, held.Release(t.Context()))
		WantUsed(t, l, Acme(1), 1)
		Release(t, again)
	})
}

func TestALostLeaseEndsTheWork(t *testing.T) {
	for name, lose := range map[string]func(TB, *throttle.Limiter, throttle.Decision, throttletest.Memory){
		"others have the room": func(t TB, l *throttle.Limiter, d throttle.Decision, _ throttletest.Memory) {
			expect.Must(t, New(t, l.Config().Client, l.Policies()...).Attach(d.Reservation).Release(t.Context()))
			Reserve(t, l, Acme(1))
		},
		"it cannot be renewed": func(_ TB, _ *throttle.Limiter, _ throttle.Decision, memory throttletest.Memory) {
			memory.SetError("LOADING")
		},
	} {
		t.Run(name, func(t *testing.T) {
			Bubble(t, Policy(Slots(1)), func(t *testing.T, l *throttle.Limiter, memory throttletest.Memory) {
				d := Reserve(t, l, Acme(1))
				work := d.Reservation.Hold(t.Context())
				lose(t, l, d, memory)
				time.Sleep(30 * s)
				synctest.Wait()
				expect.Err(t, context.Cause(work), throttle.ErrLeaseLost, "the work's context ended with")
				_ = d.Reservation.Release(t.Context())
			})
		})
	}
}

// What is cancelled was not lost: the work goes on.
func TestACancelledHoldIsNotLost(t *testing.T) {
	Bubble(t, Policy(Slots(1)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		held := Reserve(t, l, Acme(1)).Reservation
		work := held.Hold(t.Context())
		time.Sleep(10 * s) // a renewal is under way, too
		Cancel(t, l, held)
		WantUsed(t, l, Acme(1), 0)
		other := Reserve(t, l, Acme(1))
		time.Sleep(m)
		expect.That(t, work.Err() == nil, "the work's context ended with", context.Cause(work))
		Release(t, other)
	})
}

// If a Cancel and a Release fail at once, the lease runs out: nothing renews it.
func TestAFailedCancelTakesNoReleaseBack(t *testing.T) {
	Bubble(t, Policy(Slots(1)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		held := Reserve(t, l, Acme(1)).Reservation
		held.Hold(t.Context())
		back := time.Now().Add(30 * s)
		l.Config().Client.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if time.Now().Before(back) {
				time.Sleep(8 * s)
				return io.EOF
			}
			return next(ctx, cmd)
		}))
		go held.Cancel(t.Context())
		time.Sleep(s)
		expect.That(t, held.Release(t.Context()) != nil, "it was released")
		time.Sleep(3 * m)
		WantUsed(t, l, Acme(1), 0)
	})
}
