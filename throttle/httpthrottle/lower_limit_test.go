package httpthrottle_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// An API whose limit is lower than the policy's, and says so, refuses nothing: what remains is
// believed. It need not name a period for that, as X-RateLimit-Limit would have to.
func TestALowerLimitIsBelieved(t *testing.T) {
	t.Parallel()
	const limit, period = 10, 2 * time.Second
	ours := throttle.Window{Name: "w", Limit: 2 * limit, Period: period, Scope: throttle.ScopeShared}
	limitertest.Bubble(t, policy("api", ours), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		begun := time.Now()
		var window time.Duration
		served, refused := 0, 0
		api := base(func(r *http.Request) (*http.Response, error) {
			time.Sleep(10 * time.Millisecond)
			since := time.Since(begun)
			if now := since.Truncate(period); now != window {
				window, served = now, 0
			}
			resp := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: http.NoBody, Request: r}
			if served++; served > limit {
				refused++
				resp.StatusCode = http.StatusTooManyRequests
			}
			resp.Header.Set("X-RateLimit-Limit", fmt.Sprint(limit))
			resp.Header.Set("X-RateLimit-Remaining", fmt.Sprint(max(0, limit-served)))
			resp.Header.Set("X-RateLimit-Reset", fmt.Sprint((window + period - since).Seconds()))
			return resp, nil
		})
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: time.Minute, Base: api})
		for range 6 * limit {
			if _, err := rt.RoundTrip(httptest.NewRequestWithContext(t.Context(), "GET", "http://upstream", nil)); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(begun); refused > 0 || took != 5*period+limit*10*time.Millisecond {
			t.Errorf("%d calls were refused, all took %v: want none, and the beginning of the sixth period", refused, took)
		}
	})
}
