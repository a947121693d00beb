package httpthrottle_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// ask serves one request, of a user from an address.
func ask(h http.Handler, ip, user string) *http.Response {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = ip + ":1234"
	r.SetBasicAuth(user, "")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func byUser(r *http.Request) map[string]string {
	user, _, _ := r.BasicAuth()
	return map[string]string{"user": user}
}

func TestSeveralIdentitiesAtOnce(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := limitertest.New(t, client, policy("site",
			throttle.Window{Name: "address", Limit: 3, Period: time.Hour, Scope: throttle.Per("ip")},
			throttle.Window{Name: "person", Limit: 2, Period: 2 * time.Hour, Scope: throttle.Per("user")}))
		var served atomic.Int64
		h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limiter, Policy: "site", Attributes: byUser})(
			http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { served.Add(1) }))
		for i, row := range []struct {
			ip, user                 string
			status                   int
			limit, remaining, period string // of the tightest window
			left                     string
		}{
			{"10.0.0.1", "ann", 200, "2", "1", "2h", `"address";r=2;t=3600, "person";r=1;t=7200`},
			{"10.0.0.1", "ann", 200, "2", "0", "2h", `"address";r=1;t=3600, "person";r=0;t=7200`},
			{"10.0.0.1", "ann", 429, "2", "0", "2h", `"address";r=1;t=3600, "person";r=0;t=7200`},
			{"10.0.0.2", "ann", 429, "2", "0", "2h", `"address";r=3;t=0, "person";r=0;t=7200`}, // the person counts at all addresses
			{"10.0.0.1", "bob", 200, "3", "0", "1h", `"address";r=0;t=3600, "person";r=1;t=7200`},
			{"10.0.0.1", "cid", 429, "3", "0", "1h", `"address";r=0;t=3600, "person";r=2;t=0`}, // the address counts for all persons
			{"10.0.0.2", "cid", 200, "2", "1", "2h", `"address";r=2;t=3600, "person";r=1;t=7200`},
		} {
			before := served.Load()
			resp := ask(h, row.ip, row.user)
			expect.Equal(t, resp.StatusCode, row.status, "request", i)
			expect.Equal(t, served.Load() > before, row.status == 200, "request", i, "is served")
			// The clock of Redis goes on: what began a moment ago may round to a second less.
			left := resp.Header.Get("RateLimit")
			left = strings.NewReplacer("t=3599", "t=3600", "t=7199", "t=7200").Replace(left)
			expect.Equal(t, left, row.left, "request", i, "RateLimit")
			expect.Equal(t, resp.Header.Get("RateLimit-Policy"), `"address";q=3;w=3600, "person";q=2;w=7200`, i)
			for field, want := range map[string]string{"X-RateLimit-Limit": row.limit, "X-RateLimit-Remaining": row.remaining} {
				expect.Equal(t, resp.Header.Get(field), want, "request", i, field)
			}
			period, _ := time.ParseDuration(row.period)
			about := func(what string, seconds, want float64) {
				expect.That(t, seconds <= want+2 && seconds >= want-60,
					"request", i, what, "in", seconds, "s, want", want)
			}
			reset, _ := strconv.ParseFloat(resp.Header.Get("X-RateLimit-Reset"), 64)
			about("resets", reset-float64(time.Now().Unix()), period.Seconds())
			if retry := resp.Header.Get("Retry-After"); row.status == 429 {
				seconds, err := strconv.ParseFloat(retry, 64)
				about(fmt.Sprint("retry ", err), seconds, period.Seconds())
			} else if retry != "" {
				t.Errorf("request %d: Retry-After %s", i, retry)
			}
		}
	})
}

// A request repeated after Retry-After is served; one a second before is not.
func TestRetryAfterIsRoundedUp(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("site", throttle.Window{Name: "w", Limit: 1, Period: 2500 * time.Millisecond, Scope: throttle.Per("ip")}),
		func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
			h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: l, Policy: "site"})(http.HandlerFunc(ok))
			statuses := []int{ask(h, "10.0.0.1", "").StatusCode}
			resp := ask(h, "10.0.0.1", "")
			expect.Equal(t, resp.Header.Get("Retry-After"), "3", "Retry-After")
			expect.Equal(t, resp.Header.Get("X-RateLimit-Reset"), fmt.Sprint(time.Now().Unix()+3), "X-RateLimit-Reset")
			time.Sleep(2 * time.Second)
			statuses = append(statuses, ask(h, "10.0.0.1", "").StatusCode)
			time.Sleep(time.Second)
			statuses = append(statuses, ask(h, "10.0.0.1", "").StatusCode)
			want := []int{200, 429, 200}
			expect.That(t, slices.Equal(statuses, want), "after 0, 2 and 3 s", statuses, "want", want)
		})
}

func TestAllowedRequestsAreCountedAndServed(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := limitertest.New(t, client, policy("site", perHour(2, "ip")))
		h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limiter, Policy: "site",
			Allow: func(r *http.Request) bool { user, _, _ := r.BasicAuth(); return user == "monitor" }})(http.HandlerFunc(ok))
		for range 5 {
			expect.Equal(t, ask(h, "10.0.0.1", "monitor").StatusCode, 200)
		}
		limitertest.WantUsed(t, limiter, throttle.Request{Policy: "site", Attributes: map[string]string{"ip": "10.0.0.1"}}, 5)
		expect.Equal(t, ask(h, "10.0.0.1", "ann").StatusCode, 429)
	})
}

func TestRefusedRequestsCanBeCharged(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		window := throttle.Window{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: 60, Burst: 2, Period: time.Hour, Scope: throttle.Per("ip")}
		p, q := policy("charged", window, slots(5)), policy("free", window, slots(5))
		limiter := limitertest.New(t, client, p, q)
		for _, row := range []struct {
			policy  string
			retries []float64 // seconds
		}{{"free", []float64{60, 60, 60}}, {"charged", []float64{120, 180, 240}}} {
			h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limiter, Policy: row.policy, ChargeRefused: row.policy == "charged"})(http.HandlerFunc(ok))
			ask(h, "10.0.0.1", "")
			ask(h, "10.0.0.1", "")
			for i, want := range row.retries {
				resp := ask(h, "10.0.0.1", "")
				retry, _ := strconv.ParseFloat(resp.Header.Get("Retry-After"), 64)
				expect.That(t, resp.StatusCode == 429 && retry <= want && retry >= want-30,
					row.policy, "refusal", i, "status", resp.StatusCode, "Retry-After", retry, "want", want)
			}
			expect.Equal(t, limitertest.Used(limitertest.Peek(t, limiter, throttle.Request{Policy: row.policy, Attributes: map[string]string{"ip": "10.0.0.1"}}))[1], 0, row.policy, "refused requests hold slots")
		}
	})
}

// A config that can never supply what a window counts by is refused.
func TestMiddlewaresThatCannotSupplyAttributes(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, throttletest.Client(t, "127.0.0.1:1"), policy("user", perHour(1, "user", "ip")), policy("tenant", perHour(1, "tenant")), policy("ip", perHour(1, "ip")))
	user := func(*http.Request) map[string]string { return nil }
	tenant := func(*http.Request) string { return "" }
	for _, row := range []struct {
		config httpthrottle.MiddlewareConfig
		want   string
	}{
		{httpthrottle.MiddlewareConfig{Policy: "user"}, `Attributes is nil: must return "user"`},
		{httpthrottle.MiddlewareConfig{Policy: "tenant"}, "Tenant is nil: "},
		{httpthrottle.MiddlewareConfig{Policy: "user", Attributes: user}, ""},
		{httpthrottle.MiddlewareConfig{Policy: "tenant", Tenant: tenant}, ""},
		{httpthrottle.MiddlewareConfig{Policy: "ip"}, ""},
	} {
		row.config.Limiter = limiter
		_, err := httpthrottle.NewMiddleware(row.config)
		if row.want == "" {
			expect.Must(t, err)
		} else {
			expect.Contains(t, fmt.Sprint(err), "httpthrottle: MiddlewareConfig."+row.want)
		}
	}
}

func TestASlotIsHeldForAsLongAsTheHandler(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("site", slots(1)), func(t *testing.T, l *throttle.Limiter, m *miniredis.Miniredis) {
		request := throttle.Request{Policy: "site"}
		serve := func(handler http.HandlerFunc) *http.Response {
			return ask(newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: l, Policy: "site"})(handler), "10.0.0.1", "")
		}
		resp := serve(func(w http.ResponseWriter, _ *http.Request) {
			for range 10 {
				time.Sleep(900 * time.Millisecond)
				limitertest.WantUsed(t, l, request, 1)
			}
			second := serve(ok)
			expect.That(t, second.StatusCode == 429 &&
				second.Header.Get("RateLimit-Policy") == `"slots";q=1;qu="concurrent-requests"` &&
				second.Header.Get("RateLimit") == `"slots";r=0`,
				"a second at once", second.StatusCode, second.Header)
		})
		expect.Equal(t, resp.StatusCode, 200)
		limitertest.WantUsed(t, l, request, 0)

		func() {
			defer func() {
				expect.That(t, recover() == http.ErrAbortHandler, "the panic is gone")
			}()
			serve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
		}()
		limitertest.WantUsed(t, l, request, 0)

		serve(func(_ http.ResponseWriter, r *http.Request) {
			m.FlushAll()
			d, err := l.Reserve(t.Context(), request)
			expect.That(t, err == nil && d.Granted, "nobody could take the slot", err)
			<-r.Context().Done()
			cause := context.Cause(r.Context())
			expect.That(t, errors.Is(cause, throttle.ErrLeaseLost),
				"the context of a handler that lost its slot ended by", cause)
		})
	})
}

func TestConfigsOfMiddlewares(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, throttletest.Client(t, "127.0.0.1:1"), policy("site", perHour(1)))
	for want, c := range map[string]httpthrottle.MiddlewareConfig{
		"Limiter is nil": {},
		`Policy ""`:      {Limiter: limiter},

		"TrustedProxies[1] invalid Prefix":      {Limiter: limiter, Policy: "site", TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), {}}},
		"TrustedProxies[0] ::ffff:10.0.0.0/104": {Limiter: limiter, Policy: "site", TrustedProxies: []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")}},
	} {
		_, err := httpthrottle.NewMiddleware(c)
		expect.Contains(t, fmt.Sprint(err), "httpthrottle: MiddlewareConfig."+want)
	}
}

// A nil handler is what it is to an http.Server.
func TestANilHandlerIsTheDefaultOne(t *testing.T) {
	limiter := throttletest.NewLimiter(t, policy("site", perHour(1, httpthrottle.IPAttribute)))
	served := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limiter, Policy: "site"})(nil)
	for i, want := range []int{http.StatusNotFound, http.StatusTooManyRequests} {
		expect.Equal(t, ask(served, "192.0.2.1", "").StatusCode, want, "request", i)
	}
}

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
			expect.Must(t, client.FlushDB(t.Context()).Err())
			limiter := limitertest.New(t, client, policy("site", throttle.Window{
				Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: tc.limit, Burst: tc.burst, Period: time.Hour, Scope: throttle.Per("ip"),
			}))
			h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limiter, Policy: "site"})(
				http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			header := ask(h, "10.0.0.1", "ann").Header
			for field, want := range map[string]string{
				"RateLimit-Policy": tc.policy, "RateLimit": tc.limits, "X-RateLimit-Limit": tc.ofUnits, "X-RateLimit-Remaining": tc.left,
			} {
				expect.Equal(t, header.Get(field), want, tc.limit, "per hour, burst", tc.burst, field)
			}
		}
	})
}
