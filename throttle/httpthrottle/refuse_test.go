package httpthrottle_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestRequestsWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: -1})
	defer client.Close()
	for _, row := range []struct {
		fail   throttle.FailMode
		status int
		retry  string
	}{{throttle.FailClosed, 503, "1"}, {throttle.FailOpen, 200, ""}} {
		p := policy("site", perHour(1))
		p.Fail = row.fail
		log := &limitertest.Journal{}
		h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limitertest.New(t, client, p), Policy: "site",
			Logger: slog.New(slog.NewTextHandler(log, nil))})(http.HandlerFunc(ok))
		for range 3 {
			resp := ask(h, "10.0.0.1", "")
			expect.That(t, resp.StatusCode == row.status &&
				resp.Header.Get("Retry-After") == row.retry && resp.Header.Get("RateLimit") == "",
				"fail", row.fail, "status", resp.StatusCode, "fields", resp.Header)
		}
		expect.Equal(t, log.Count("limiter is unavailable"), 1, "fail", row.fail, "logged", "times")
	}
}

// While Redis hangs, the first request waits for it, and later ones do not: in ten seconds, each of a
// hundred clients is served.
func TestRequestsDoNotWaitForARedisThatHangs(t *testing.T) {
	for fail, status := range map[throttle.FailMode]int{throttle.FailClosed: 503, throttle.FailOpen: 200} {
		synctest.Test(t, func(t *testing.T) {
			client := redis.NewClient(&redis.Options{
				Addr: "127.0.0.1:6379",
				Dialer: func(context.Context, string, string) (net.Conn, error) {
					here, there := net.Pipe()
					go io.Copy(io.Discard, there) // it never answers
					return here, nil
				},
			})
			defer client.Close()
			p := policy("site", perHour(1))
			p.Fail = fail
			limiter := limitertest.New(t, client, p)
			h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limiter, Policy: "site"})(http.HandlerFunc(ok))
			begun, longest := time.Now(), time.Duration(0)
			for i := range 100 {
				asked := time.Now()
				expect.Equal(t, ask(h, "10.0.0.1", "").StatusCode, status)
				if i > 0 {
					longest = max(longest, time.Since(asked))
				}
				time.Sleep(50 * time.Millisecond)
			}
			took := time.Since(begun)
			expect.That(t, took <= 10*time.Second && longest <= 250*time.Millisecond,
				"fail", fail, "100 requests took", took, "and one after the first", longest)
			now := time.Now()
			limiter.SetInterventions(throttle.Interventions{At: now, Pauses: []throttle.OperatorPause{
				{Policy: "site", Until: now.Add(time.Hour)},
			}})
			resp := ask(h, "10.0.0.1", "")
			expect.That(t, resp.StatusCode == 503, "fail", fail, "while operators pause it", resp.StatusCode)
		})
	}
}

// An outage that lasts is logged once a minute.
func TestAnOutageThatLastsIsLoggedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := redis.NewClient(&redis.Options{
			Addr: "127.0.0.1:6379", DialerRetries: 1, MaxRetries: -1,
			Dialer: func(context.Context, string, string) (net.Conn, error) { return nil, net.ErrClosed },
		})
		defer client.Close()
		log := &limitertest.Journal{}
		h := newMiddleware(t, httpthrottle.MiddlewareConfig{Limiter: limitertest.New(t, client, policy("site", perHour(1))), Policy: "site",
			Logger: slog.New(slog.NewTextHandler(log, nil))})(http.HandlerFunc(ok))
		for i := range 13 { // two minutes
			ask(h, "10.0.0.1", "")
			expect.Equal(t, log.Count("limiter is unavailable"), 1+i/6, "after", 10*i, "s logged", "times")
			time.Sleep(10 * time.Second)
		}
	})
}

// A client can neither cause a server error by its attributes nor fill the log.
func TestAttributesThatCannotBeCountedAreBadRequests(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("site", perHour(5, "user"), throttle.Window{Name: "each", Limit: 9, Period: time.Hour}), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		log := &limitertest.Journal{}
		served := 0
		h := newMiddleware(t, httpthrottle.MiddlewareConfig{
			Limiter: l, Policy: "site", Attributes: byUser, Logger: slog.New(slog.NewTextHandler(log, nil)),
			Tenant: func(r *http.Request) string { return r.Header.Get("X-Tenant") },
		})(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served++ }))
		long := strings.Repeat("x", throttle.MaxValueBytes+1)
		send := func(user, tenant string) *http.Response {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.SetBasicAuth(user, "")
			r.Header.Set("X-Tenant", tenant)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			return w.Result()
		}
		for range 10 {
			for _, row := range [][2]string{{"", "acme"}, {long, "acme"}, {"ann", ""}, {"ann", long}} {
				resp := send(row[0], row[1])
				body, _ := io.ReadAll(resp.Body)
				if resp.StatusCode != http.StatusBadRequest || resp.Header.Get("Retry-After") != "" || string(body) != "Bad Request\n" {
					t.Errorf("user of %d bytes, tenant of %d: %d, %q", len(row[0]), len(row[1]), resp.StatusCode, body)
				}
			}
		}
		expect.Equal(t, served, 0, "were served")
		expect.Equal(t, log.Count("level=WARN"), 1)
		expect.Equal(t, log.Count("\n"), 1, "lines")
		time.Sleep(time.Minute)
		expect.Equal(t, send("", "acme").StatusCode, http.StatusBadRequest)
		expect.Equal(t, log.Count("requests=40 "), 1, "a line with the number of requests since the last", "times")
		expect.Equal(t, send("ann", "acme").StatusCode, 200)
		expect.Equal(t, served, 1, "served")
	})
}

func TestCostsThatCannotBeCounted(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), policy("site", perHour(5, "ip")))
	var cost map[string]int64
	log := &limitertest.Journal{}
	h := newMiddleware(t, httpthrottle.MiddlewareConfig{
		Limiter: limiter, Policy: "site", Logger: slog.New(slog.NewTextHandler(log, nil)),
		Cost: func(*http.Request) map[string]int64 { return cost },
	})(http.HandlerFunc(ok))
	for _, row := range []struct {
		cost   map[string]int64
		status int
	}{
		{nil, 200}, {map[string]int64{"requests": 6}, 413},
		{map[string]int64{"requests": -1}, 500}, {map[string]int64{"apples": 1}, 500}, {map[string]int64{"apples": 1}, 500},
	} {
		cost = row.cost
		expect.Equal(t, ask(h, "10.0.0.1", "").StatusCode, row.status)
	}
	expect.Equal(t, log.Count("\n"), 1, "logged", "times")
}
