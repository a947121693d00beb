package httpthrottle_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestARefusalIsLearnt(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	now := time.Now().UTC().Truncate(time.Second)
	date := func(d time.Duration) string { return now.Add(d).Format(http.TimeFormat) }
	for _, row := range []struct {
		name   string
		status int
		fields []string // pairs
		pause  time.Duration
	}{
		{"seconds", 429, []string{"Retry-After", "30"}, 30 * time.Second},
		{"a date, by the upstream's clock", 429, []string{"Date", date(-day), "Retry-After", date(40*time.Second - day)}, 40 * time.Second},
		{"a date without a clock", 429, []string{"Retry-After", now.Add(2 * time.Hour).Format(http.TimeFormat)}, 2 * time.Hour},
		{"no word", 429, nil, 7 * time.Second},
		{"milliseconds", 429, []string{"Retry-After-Ms", "2500"}, 2500 * time.Millisecond},
		{"milliseconds, and seconds rounded up", 429, []string{"Retry-After-Ms", "2500", "Retry-After", "3"}, 2500 * time.Millisecond},
		{"nonsense", 429, []string{"Retry-After", "soon"}, 7 * time.Second},
		{"at once", 429, []string{"Retry-After", "0"}, 7 * time.Second},
		{"below 0", 429, []string{"Retry-After", "-5"}, 7 * time.Second},
		{"for ages", 429, []string{"Retry-After", "99999999999999999999"}, day},
		{"nothing left, and until when", 429, []string{"RateLimit", `"a";r=0;t=50, "b";r=9;t=3600`}, 50 * time.Second},
		{"tokens are used up", 429, []string{"X-RateLimit-Remaining-Requests", "5", "X-RateLimit-Reset-Requests", "1s",
			"X-RateLimit-Remaining-Tokens", "0", "X-RateLimit-Reset-Tokens", "6m0s"}, 6 * time.Minute},
		{"tokens are used up, by RateLimit", 429, []string{"RateLimit", `"a";r=5;t=1, "b";r=0;t=360`, "RateLimit-Policy", `"b";q=9;qu="tokens"`}, 6 * time.Minute},
		{"requests and tokens are used up", 429, []string{"RateLimit-Remaining", "0", "RateLimit-Reset", "2",
			"RateLimit-Remaining-Tokens", "0", "RateLimit-Reset-Tokens", "300"}, 5 * time.Minute},
		{"tokens are used up, and Retry-After", 429, []string{"Retry-After", "60", "RateLimit-Remaining-Tokens", "0", "RateLimit-Reset-Tokens", "300"}, time.Minute},
		{"forbidden, as tokens are used up", 403, []string{"RateLimit-Remaining-Tokens", "0", "RateLimit-Reset-Tokens", "300"}, 5 * time.Minute},
		{"forbidden, though all is left", 403, []string{"RateLimit-Remaining-Tokens", "9", "RateLimit-Reset-Tokens", "300"}, 0},
		{"unavailable", 503, []string{"Retry-After", "20"}, 20 * time.Second},
		{"unavailable, without a word", 503, nil, 0},
		{"broken", 500, []string{"Retry-After", "20"}, 0},
		{"forbidden", 403, nil, 0},
		{"forbidden for now", 403, []string{"Retry-After", "60"}, time.Minute},
		{"forbidden, as nothing is left", 403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "90"}, 90 * time.Second},
		{"forbidden, as nothing was left until now", 403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "0"}, 7 * time.Second},
		{"forbidden, as nothing is left, by RateLimit", 403, []string{"RateLimit", `"a";r=9, "b";r=0`}, 7 * time.Second},
		{"forbidden, as nothing is left, by draft 07", 403, []string{"RateLimit", "limit=9, remaining=0, reset=5"}, 5 * time.Second},
		{"forbidden, though some is left", 403, []string{"RateLimit", `"a";r=9`, "X-RateLimit-Remaining", "4"}, 0},
		{"fine", 200, []string{"Retry-After", "20"}, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			p := policy("api", perHour(1000))
			p.MaxPause = 24 * time.Hour
			limiter := limitertest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), p)
			job := &throttle.Caller{}
			job.Refused("api", time.Hour) // by an earlier call
			if row.pause > 0 {
				job.Answered("api", time.Now())
			}
			rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api", Pause: 7 * time.Second,
				Base: base(func(req *http.Request) (*http.Response, error) {
					h := http.Header{}
					for i := 0; i < len(row.fields); i += 2 {
						h.Set(row.fields[i], row.fields[i+1])
					}
					return &http.Response{StatusCode: row.status, Header: h, Body: http.NoBody}, nil
				})})
			resp, err := get(throttle.WithCaller(t.Context(), job), rt, "http://upstream")
			expect.Require(t, err == nil && resp.StatusCode == row.status, "the answer is the caller's in any case:", err)
			retryIn, policy, refused := job.Refusal()
			d := limitertest.Peek(t, limiter, throttle.Request{Policy: "api"})
			if row.pause == 0 {
				expect.That(t, !refused && d.Granted, "no refusal, but the job was refused", refused, "for", d.RetryIn)
				return
			}
			within := func(what string, got time.Duration) {
				expect.That(t, got <= row.pause &&
					(got >= row.pause-20*time.Second || got >= row.pause/2) && got > 0,
					what, got, "want", row.pause)
			}
			within("paused for", d.RetryIn)
			within("the job is to come again in", retryIn)
			expect.That(t, refused && policy == "api", "the job notes a refusal", refused, "by policy", policy)
		})
	}
}

func TestAPauseHoldsForAllWhoShareThePolicy(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		server := newUpstream(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "600")
			w.WriteHeader(http.StatusTooManyRequests)
		})
		for _, learnOnly := range []bool{false, true} {
			name := fmt.Sprintf("api-%v", learnOnly)
			var log bytes.Buffer
			limiter := limitertest.NewFrom(t, throttle.Config{
				Client: client, Logger: slog.New(slog.NewTextHandler(&log, nil)), Policies: []throttle.Policy{policy(name, perHour(1000))},
			})
			one := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: name, LearnOnly: learnOnly})
			other := newTransport(t, httpthrottle.TransportConfig{Limiter: limitertest.New(t, client, policy(name, perHour(1000))), Policy: name})
			before := server.calls.Load()
			expect.Must(t, expect.ErrOf(get(t.Context(), one, server.URL)))
			_, err := get(t.Context(), other, server.URL)
			var denied *throttle.DeniedError
			expect.That(t, errors.As(err, &denied) && denied.Decision.RetryIn >= time.Minute,
				"learn only", learnOnly, "a call after a refusal", err)
			expect.Equal(t, server.calls.Load()-before, 1, "learn only", learnOnly, "the upstream saw", "calls")
			if learnOnly { // it is refused again
				expect.Must(t, expect.ErrOf(get(t.Context(), one, server.URL)))
			}
			want := `msg="throttle: the upstream refused a call: its policy pauses" policy=` + name + ` tenant="" for=10m0s`
			rate := ` rate="refused once since `
			expect.That(t, strings.Count(log.String(), "\n") == 1 &&
				strings.Contains(log.String(), want) && strings.Contains(log.String(), rate),
				"logged", &log, "want once", want, rate)
		}
	})
}

func TestRemainingUnitsAreReportedOnce(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		remaining, quota, age := int64(1000), int64(1000), "0"
		server := newUpstream(t, func(w http.ResponseWriter, _ *http.Request) {
			remaining--
			w.Header().Set("Age", age)
			w.Header().Set("RateLimit", fmt.Sprintf(`"all";r=%d;t=3000, "slots";r=0;t=10`, max(0, remaining)))
			w.Header().Set("RateLimit-Policy", `"slots";q=5;qu="concurrent-requests"`)
		})
		var sent atomic.Int64
		client.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if hooktest.IsScript(cmd) && err == nil { // else go-redis loads it by a second call
				sent.Add(1)
			}
			return err
		}))
		limiter := limitertest.New(t, client, policy("api", perHour(quota)))
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api"})
		call := func(what string, granted bool, scripts int64) {
			t.Helper()
			before := sent.Load()
			_, err := get(t.Context(), rt, server.URL)
			var denied *throttle.DeniedError
			expect.Require(t, granted == (err == nil) && (granted || errors.As(err, &denied)), what, err)
			expect.Equal(t, sent.Load()-before, scripts, what, "script calls")
		}
		call("the first", true, 1)
		for range 5 {
			call("the upstream counts as we do", true, 1)
		}
		remaining, age = 5, "7"
		call("others took all but 5, by an answer from a cache", true, 1)
		age = "0"
		call("others took all but 4", true, 2)
		call("3 are left", true, 1)
		remaining = 1000
		call("more are left than by our count", true, 2)
		call("one less is left", true, 1)
		remaining = 2
		call("2 are left", true, 2)
		call("1 is left", true, 1)
		call("none is left", false, 1)
		expect.Equal(t, server.calls.Load(), 13, "the upstream saw", "calls")
	})
}

// A job's own grant is what the answers to its calls are compared with.
func TestAJobsCallLearnsWhatIsLeft(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		server := newUpstream(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("RateLimit", `"all";r=1;t=600`) })
		window := perHour(1000)
		window.Per, window.Shared = []string{"user"}, false
		limiter := limitertest.New(t, client, policy("api", window))
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, LearnOnly: true})
		requestOf := func(user string) throttle.Request {
			return throttle.Request{Policy: "api", Attributes: map[string]string{"team": "x", "user": user}}
		}
		bob := throttle.Request{Policy: "api", Attributes: map[string]string{"user": "bob"}} // of the scope, as a taken ticket
		grant := limitertest.Reserve(t, limiter, bob)
		for range 5 {
			limitertest.Reserve(t, limiter, bob)
		}
		grant.At = grant.At.Add(-time.Minute) // since which the upstream has counted the others
		for i, job := range []*throttle.Caller{{Request: bob}, {Decision: grant, Request: requestOf("eve")}, {Decision: grant, Request: requestOf("bob")}} {
			expect.Must(t, expect.ErrOf(get(throttle.WithCaller(t.Context(), job), rt, server.URL)))
			two := bob
			two.Cost = map[string]int64{"requests": 2}
			left := limitertest.Peek(t, limiter, two)
			expect.Equal(t, left.Granted, i < 2, "after a call of", job.Request, "granted", left.Granted)
		}
		one := limitertest.Peek(t, limiter, bob)
		expect.That(t, one.Granted, "the one that is left is denied")
	})
}
