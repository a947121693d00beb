package httpthrottle_test

import (
	"context"
	"errors"
	"net/http"
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
				limitertest.Must(t, limitertest.Err(get(t.Context(), rt, "http://upstream")))
				ctx := t.Context()
				if row.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, row.timeout)
					defer cancel()
				}
				start := time.Now()
				_, err := get(ctx, rt, "http://upstream")
				var denied *throttle.DeniedError
				limitertest.That(t, row.denied == errors.As(err, &denied) && (row.denied || err == nil), err)
				limitertest.Equal(t, time.Since(start), row.waits, "waited")
			})
		})
	}
}
