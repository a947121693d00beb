package limitertest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/sluice-go/sluice/throttle"
)

// usedNow is how much of the first window acme uses.
func usedNow(t TB, l *throttle.Limiter) int64 {
	t.Helper()
	return Peek(t, l, Acme(0)).Windows[0].Used
}

func TestAHoldRenewsUntilItIsReleased(t *testing.T) {
	Bubble(t, Policy(Slots(2)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		caller, stop := context.WithCancel(t.Context())
		work, hold := Reserve(t, l, Acme(1)).Reservation.Hold(caller)
		time.Sleep(5 * m) // ten leases
		if n := usedNow(t, l); n != 1 || work.Err() != nil {
			t.Errorf("%d used, %v", n, work.Err())
		}
		stop() // the work may go on for a while: so does the hold
		time.Sleep(5 * m)
		if n := usedNow(t, l); n != 1 || context.Cause(work) != context.Canceled {
			t.Errorf("%d used, %v", n, context.Cause(work))
		}
		if err := hold.Release(caller); err != nil || usedNow(t, l) != 0 {
			t.Errorf("%d used after the release, %v", usedNow(t, l), err)
		}
		done, brief := Reserve(t, l, Acme(1)).Reservation.Hold(t.Context())
		Must(t, brief.Release(t.Context()))
		Equal(t, context.Cause(done), context.Canceled, "a hold's context ends at its release")
		again := Reserve(t, l, Acme(1))
		if err := hold.Release(t.Context()); err != nil || usedNow(t, l) != 1 {
			t.Errorf("%d used after a second release, %v", usedNow(t, l), err)
		}
		Release(t, again)
	})
}

func TestALostLeaseEndsTheWork(t *testing.T) {
	for name, lose := range map[string]func(TB, *throttle.Limiter, throttle.Decision, *miniredis.Miniredis){
		"others have the room": func(t TB, l *throttle.Limiter, d throttle.Decision, _ *miniredis.Miniredis) {
			Release(t, d)
			Reserve(t, l, Acme(1))
		},
		"it cannot be renewed": func(_ TB, _ *throttle.Limiter, _ throttle.Decision, redis *miniredis.Miniredis) {
			redis.SetError("LOADING")
		},
	} {
		t.Run(name, func(t *testing.T) {
			Bubble(t, Policy(Slots(1)), func(t *testing.T, l *throttle.Limiter, redis *miniredis.Miniredis) {
				d := Reserve(t, l, Acme(1))
				work, hold := d.Reservation.Hold(t.Context())
				lose(t, l, d, redis)
				time.Sleep(30 * s)
				synctest.Wait()
				WantErr(t, context.Cause(work), throttle.ErrLeaseLost, "the work's context ended with")
				_ = hold.Release(t.Context())
			})
		})
	}
}

// What is cancelled was not lost: the work goes on.
func TestACancelledHoldIsNotLost(t *testing.T) {
	Bubble(t, Policy(Slots(1)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		work, hold := Reserve(t, l, Acme(1)).Reservation.Hold(t.Context())
		if err := hold.Cancel(t.Context()); err != nil || usedNow(t, l) != 0 {
			t.Fatalf("%d used, %v", usedNow(t, l), err)
		}
		other := Reserve(t, l, Acme(1))
		time.Sleep(m)
		if work.Err() != nil {
			t.Errorf("the work's context ended with %v", context.Cause(work))
		}
		Release(t, other)
		if err := hold.Release(t.Context()); err != nil || work.Err() == nil {
			t.Errorf("after the release: %v, %v", err, work.Err())
		}
	})
}

func TestAHoldGoesOnFromWhatWasSettled(t *testing.T) {
	client := Redis(t)
	l := New(t, client, Policy(throttle.Window{Name: "w", Limit: 10, Period: h}))
	ctx, hold := Reserve(t, l, Acme(8)).Reservation.Hold(t.Context())
	Equal(t, ctx, t.Context(), "it holds nothing by a lease, and its context is another")
	for _, actual := range []int64{5, 3} {
		if err := hold.Settle(t.Context(), map[string]int64{throttle.Requests: actual}); err != nil || usedNow(t, l) != actual {
			t.Errorf("settled to %d: %d used, %v", actual, usedNow(t, l), err)
		}
	}
	Equal(t, hold.Reservation().Cost[throttle.Requests], 3)
	if err := hold.Cancel(t.Context()); err != nil || usedNow(t, l) != 0 {
		t.Errorf("cancelled: %d used, %v", usedNow(t, l), err)
	}
}
