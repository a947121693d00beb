package httpthrottle_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A slot that a call gives back is the next call's at once.
func TestCallsFollowEachOtherThroughSlots(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		const calls, atOnce, each = 80, 3, 5 * time.Millisecond
		l := newLimiter(t, client, policy("api", slots(atOnce)))
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
				if _, err := get(t.Context(), rt, "http://far"); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		// By looks every 100 ms it were at least 2.6 s.
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("%d calls of %v, %d at once, took %v", calls, each, atOnce, took)
		}
	})
}

// A free slot is no reason to look for room in a window that has none.
func TestACallThatCannotFitInTimeIsDeniedAtOnce(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l := newLimiter(t, client, policy("api", perHour(1), slots(3)))
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: time.Minute, Base: answer(http.NoBody)})
		if _, err := get(t.Context(), rt, "http://far"); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		_, err := get(t.Context(), rt, "http://far")
		if !errors.As(err, new(*throttle.DeniedError)) || errors.As(err, new(*throttle.TooLateError)) {
			t.Errorf("within MaxWait: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if _, err := get(ctx, rt, "http://far"); !errors.As(err, new(*throttle.TooLateError)) {
			t.Errorf("within the context's deadline: %v", err)
		}
		if took := time.Since(start); took > 20*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}
