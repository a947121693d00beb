package httpthrottle_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestACallWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		maxWait time.Duration
		request time.Duration // of what Request returns
		timeout time.Duration // of the second call's context; 0 for none
		waits   time.Duration
		denied  bool
	}{
		{"not at all", 0, 0, 0, 0, true},
		{"long enough", 5 * time.Second, 0, 0, 2 * time.Second, false},
		{"as long as Request says", 0, 5 * time.Second, 0, 2 * time.Second, false},
		{"not at all, as Request says", 5 * time.Second, -1, 0, 0, true},
		{"it is known at once that it is too long", time.Second, 0, 0, 0, true},
		{"the deadline comes before its turn", 5 * time.Second, 0, time.Second, 0, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			limitertest.Bubble(t, policy("api", throttle.Window{Name: "w", Limit: 1, Period: 2 * time.Second, Scope: throttle.ScopeShared}), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
				rt := newTransport(t, httpthrottle.TransportConfig{
					Limiter: l, Policy: "api", MaxWait: row.maxWait, Base: answer(http.NoBody),
					Request: func(*http.Request) (throttle.Request, bool) { return throttle.Request{MaxWait: row.request}, true },
				})
				if _, err := get(t.Context(), rt, "http://upstream"); err != nil {
					t.Fatal(err)
				}
				ctx := t.Context()
				if row.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, row.timeout)
					defer cancel()
				}
				start := time.Now()
				_, err := get(ctx, rt, "http://upstream")
				var denied *throttle.DeniedError
				if row.denied != errors.As(err, &denied) || !row.denied && err != nil {
					t.Error(err)
				}
				if waited := time.Since(start); waited != row.waits {
					t.Errorf("waited %v, want %v", waited, row.waits)
				}
			})
		})
	}
}

func TestACallWaitsForASlotThatComesEarly(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("api", slots(1)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		fake, writer := stream()
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: time.Minute, Base: fake})
		// It says that it may take an hour: all that is known of when the slot is free.
		long, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		first, err := rt.RoundTrip(httptest.NewRequestWithContext(long, "GET", "http://upstream", nil))
		if err != nil {
			t.Fatal(err)
		}
		if d := limitertest.Peek(t, l, throttle.Request{Policy: "api"}); d.RetryIn < 59*time.Minute {
			t.Fatalf("the slot is free in %v at the latest, not an hour", d.RetryIn)
		}
		time.AfterFunc(10*time.Second+300*time.Millisecond, func() { writer.Close() })
		go io.Copy(io.Discard, first.Body)
		start := time.Now()
		rt = newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: time.Minute, Base: answer(http.NoBody)})
		if _, err := get(t.Context(), rt, "http://upstream"); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(start); waited != 10300*time.Millisecond {
			t.Errorf("waited %v for a slot that was free after 10.3s", waited)
		}
	})
}

func TestACallWhoseContextEndsWaitsNoLonger(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("api", perHour(1)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: 2 * time.Hour, Base: answer(http.NoBody)})
		if _, err := get(t.Context(), rt, "http://upstream"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		start := time.Now()
		if _, err := get(ctx, rt, "http://upstream"); !errors.Is(err, context.Canceled) || time.Since(start) != time.Minute {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
	})
}

// The next call gets a slot at once that another gives back.
func TestCallsFollowEachOtherThroughSlots(t *testing.T) {
	t.Parallel()
	const calls, atOnce, each = 80, 3, 5 * time.Millisecond
	limitertest.Bubble(t, policy("api", slots(atOnce)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		rt := newTransport(t, httpthrottle.TransportConfig{
			Limiter: l, Policy: "api", MaxWait: time.Minute,
			Base: base(func(req *http.Request) (*http.Response, error) {
				time.Sleep(each)
				return answer(http.NoBody)(req)
			}),
		})
		start := time.Now()
		var group sync.WaitGroup
		for range calls {
			group.Go(func() {
				if _, err := get(t.Context(), rt, "http://upstream"); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		if took, most := time.Since(start), (calls+atOnce-1)/atOnce*each; took > most {
			t.Errorf("%d calls of %v, %d at once, took %v, want %v at most", calls, each, atOnce, took, most)
		}
	})
}

// A free slot does not keep a call waiting for a window that has no room in time.
func TestACallThatCannotFitInTimeIsDeniedAtOnce(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("api", perHour(1), slots(3)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: time.Minute, Base: answer(http.NoBody)})
		if _, err := get(t.Context(), rt, "http://upstream"); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		notInTime := func(err error) bool {
			return errors.As(err, new(*throttle.DeniedError)) && errors.Is(err, context.DeadlineExceeded)
		}
		if _, err := get(t.Context(), rt, "http://upstream"); !notInTime(err) {
			t.Errorf("within MaxWait: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if _, err := get(ctx, rt, "http://upstream"); !notInTime(err) {
			t.Errorf("within the context's deadline: %v", err)
		}
		if waited := time.Since(start); waited != 0 {
			t.Errorf("waited %v", waited)
		}
	})
}
