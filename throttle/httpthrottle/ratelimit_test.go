package httpthrottle_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// The remaining units in a response never exceed the limit beside them.
func TestABurstAboveTheLimitIsTheQuota(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for _, tc := range []struct {
			limit, burst   int64
			policy, limits string
			left, ofUnits  string
		}{
			{1, 20, `"w";q=20;w=72000`, `"w";r=19;t=3600`, "19", "20"},
			{3, 20, `"w";q=20;w=24000`, `"w";r=19;t=1200`, "19", "20"},
			{60, 2, `"w";q=60;w=3600`, `"w";r=1;t=60`, "1", "60"},
		} {
			limitertest.Must(t, client.FlushDB(t.Context()).Err())
			limiter := limitertest.New(t, client, policy("site", throttle.Window{
				Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: tc.limit, Burst: tc.burst, Period: time.Hour, Scope: throttle.Per("ip"),
			}))
			h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limiter, Policy: "site"})(
				http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			header := ask(h, "10.0.0.1", "ann").Header
			for field, want := range map[string]string{
				"RateLimit-Policy": tc.policy, "RateLimit": tc.limits, "X-RateLimit-Limit": tc.ofUnits, "X-RateLimit-Remaining": tc.left,
			} {
				limitertest.Equal(t, header.Get(field), want, tc.limit, "per hour, burst", tc.burst, field)
			}
		}
	})
}
