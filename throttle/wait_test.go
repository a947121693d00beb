package throttle_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// bubble runs the test on fake time, with a miniredis inside.
func bubble(t *testing.T, windows []throttle.Window, test func(t *testing.T, l *throttle.Limiter)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server := miniredis.NewMiniRedis()
		server.ClockTTL(true)
		client := redis.NewClient(&redis.Options{
			Addr:   "127.0.0.1:6379", // a name would be looked up outside the bubble
			Dialer: func(context.Context, string, string) (net.Conn, error) { return server.Dial() },
		})
		test(t, newLimiter(t, client, policy(windows...)))
		client.Close()
		server.Close()
	})
}

func TestWaitSleepsUntilItFits(t *testing.T) {
	bubble(t, []throttle.Window{
		{Name: "day", Algorithm: throttle.GCRA, Limit: 7, Burst: 1, Period: 24 * m},
		{Name: "w", Limit: 2, Period: 10 * m},
	}, func(t *testing.T, l *throttle.Limiter) {
		start := time.Now()
		var waited []time.Duration
		for range 4 {
			d, err := l.Wait(t.Context(), acme(1))
			if err != nil || !d.Granted || d.Reservation.ID == "" {
				t.Fatalf("granted %v, %v", d.Granted, err)
			}
			waited = append(waited, time.Since(start))
		}
		const each = 205714286 * us // a seventh of 24 minutes, never rounded down
		if want := []time.Duration{0, each, 10 * m, 10*m + each}; !slices.Equal(waited, want) {
			t.Errorf("granted after %v, want %v", waited, want)
		}
	})
}

func TestWaitOfManyIsGrantedOneByOne(t *testing.T) {
	bubble(t, []throttle.Window{{Name: "w", Limit: 3, Period: m}}, func(t *testing.T, l *throttle.Limiter) {
		start := time.Now()
		var group sync.WaitGroup
		for range 30 {
			group.Go(func() {
				if _, err := l.Wait(t.Context(), acme(1)); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		if took := time.Since(start); took != 9*m {
			t.Errorf("30 at 3 a minute took %v, want 9m", took)
		}
	})
}

func TestWaitGivesUpAtOnce(t *testing.T) {
	bubble(t, []throttle.Window{{Name: "w", Limit: 1, Period: m}}, func(t *testing.T, l *throttle.Limiter) {
		start := time.Now()
		reserve(t, l, acme(1))
		ctx, end := context.WithTimeout(t.Context(), m-us)
		defer end()
		d, err := l.Wait(ctx, acme(1))
		var late *throttle.TooLateError
		if !errors.As(err, &late) || d.Granted || late.Decision.RetryIn != m || !late.Deadline.Equal(start.Add(m-us)) || !late.StartsAt.Equal(start.Add(m)) {
			t.Fatalf("granted %v, %v", d.Granted, err)
		}
		if want := "throttled: p/w, tenant acme, 1m0s: would start 2000-01-01T00:01:00Z, deadline 2000-01-01T00:00:59Z"; err.Error() != want || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %q, want %q", err, want)
		}
		if slept := time.Since(start); slept != 0 {
			t.Errorf("slept for %v", slept)
		}
		if _, err := l.Wait(ctx, acme(2)); !errors.As(err, new(*throttle.NeverFitsError)) {
			t.Errorf("what never fits: %v", err)
		}

		later, end := context.WithTimeout(t.Context(), m+us)
		defer end()
		if d, err := l.Wait(later, acme(1)); err != nil || !d.Granted || time.Since(start) != m {
			t.Errorf("with time enough: granted %v after %v, %v", d.Granted, time.Since(start), err)
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	bubble(t, []throttle.Window{{Name: "w", Limit: 1, Period: h}}, func(t *testing.T, l *throttle.Limiter) {
		start := time.Now()
		reserve(t, l, acme(1))
		ctx, end := context.WithCancel(t.Context())
		time.AfterFunc(10*m, end)
		d, err := l.Wait(ctx, acme(1))
		if !errors.Is(err, context.Canceled) || d.Granted || time.Since(start) != 10*m {
			t.Errorf("granted %v after %v, %v", d.Granted, time.Since(start), err)
		}
		if d := peek(t, l, acme(0)); d.Windows[0].Used != 1 {
			t.Errorf("used %d", d.Windows[0].Used)
		}
		stopping := errors.New("stopping")
		caused, stop := context.WithCancelCause(t.Context())
		time.AfterFunc(10*m, func() { stop(stopping) })
		if _, err := l.Wait(caused, acme(1)); !errors.Is(err, stopping) || !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
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
			bubble(t, []throttle.Window{{Name: "w", Limit: 3, Period: 10 * m}}, func(t *testing.T, l *throttle.Limiter) {
				d := reserve(t, l, acme(3))
				var waited atomic.Bool
				go func() {
					if _, err := l.Wait(t.Context(), acme(1)); err != nil {
						t.Error(err)
					}
					waited.Store(true)
				}()
				time.Sleep(m + 500*ms) // between two takes of the claims, which come each second
				if err := giveBack(t.Context(), l, d); err != nil {
					t.Fatal(err)
				}
				time.Sleep(ms)
				if !waited.Load() {
					t.Error("it goes on waiting")
				}
				time.Sleep(s)
			})
		})
	}
}
