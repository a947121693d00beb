package httpthrottle

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

func TestRemaindersAreReadInManySpellings(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_790_000_000, 0)
	for _, row := range []struct {
		fields string // one a line
		want   string
	}{
		{`RateLimit: "default";r=50;t=30`, "requests 50 30s"},
		{`RateLimit: default;r=50;t=30;pk=:dHJpYWwxMjEzMjM=:`, "requests 50 30s"},
		{"RateLimit: \"a\";r=50;t=30, \"b\";r=7;t=3600\nRateLimit: \"c\";r=1;t=2", "requests 1 2s; requests 50 30s; requests 7 1h0m0s"},
		{"RateLimit: \"a\";r=50;t=30, \"b\";r=900;t=60\nRateLimit-Policy: \"a\";q=100;w=60, \"b\";q=1000;qu=\"tokens\"", "requests 50 30s; tokens 900 1m0s"},
		{"RateLimit: \"a\";r=0;t=30\nRateLimit-Policy: \"a\";q=9;qu=\"concurrent-requests\"", ""},
		{"RateLimit: \"a\";r=5;t=30\nRateLimit-Policy: \"a\";q=9;qu=7", ""}, // a unit, but which?
		{`RateLimit: "default";r=50`, ""},
		{`RateLimit: "default";r=-1;t=30`, ""},
		{`RateLimit: "default";r="50";t=30`, ""},
		{`RateLimit: "default";r=50;t=0`, ""},
		{`RateLimit: "default";r=50;t=999999999999999`, ""}, // longer than any limit lasts
		{`RateLimit: "default;r=50;t=30`, ""},
		{`RateLimit: ("a" "b");r=50;t=30`, ""},
		{"RateLimit: \"default\";r=50;t=30\nX-RateLimit-Remaining: 1\nX-RateLimit-Reset: 9", "requests 50 30s"},
		{`RateLimit: limit=100, remaining=50, reset=5`, "requests 50 5s"},
		{`RateLimit: limit=100, remaining=50, reset=-18446744073`, ""}, // in nanoseconds it overflows to 0.7 s
		{`RateLimit: limit=100, remaining=50`, ""},
		{"RateLimit-Limit: 100, 100;w=60\nRateLimit-Remaining: 50\nRateLimit-Reset: 5", "requests 50 5s"},
		{"X-RateLimit-Remaining: 4999\nX-RateLimit-Reset: 1790003600", "requests 4999 1h0m0s"},
		{"X-RateLimit-Remaining: 4999\nX-RateLimit-Reset: 1790003600500", "requests 4999 1h0m0.5s"},
		{"X-RateLimit-Remaining: 9\nX-RateLimit-Reset: 12", "requests 9 12s"},
		{"X-RateLimit-Remaining: 9\nX-RateLimit-Reset: 0.5", "requests 9 500ms"},
		{"X-Rate-Limit-Remaining: 9\nX-Rate-Limit-Reset: 1790000060", "requests 9 1m0s"},
		{"X-RateLimit-Remaining-Requests: 59\nX-RateLimit-Reset-Requests: 1s\nX-RateLimit-Remaining-Tokens: 149984\nX-RateLimit-Reset-Tokens: 6m0s", "requests 59 1s; tokens 149984 6m0s"},
		{"X-RateLimit-Remaining: 9", ""},
		{"X-RateLimit-Remaining: lots\nX-RateLimit-Reset: 12", ""},
		{"X-RateLimit-Remaining: 9\nX-RateLimit-Reset: never", ""},
		{"X-RateLimit-Remaining: 9\nX-RateLimit-Reset: NaN", ""},
		{"X-RateLimit-Remaining: 9\nX-RateLimit-Reset: 1e300", ""},
		{"X-RateLimit-Remaining: 9\nX-RateLimit-Reset: 1789990000", ""}, // has passed
		{"X-RateLimit-Remaining: 9999999999999999\nX-RateLimit-Reset: 9", ""},
		{"", ""},
	} {
		h := http.Header{}
		for line := range strings.Lines(row.fields) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			h.Add(name, value)
		}
		var got []string
		for _, r := range remainders(h, now, map[string]bool{throttle.Requests: true, "tokens": true}) {
			got = append(got, fmt.Sprint(r.unit, " ", r.units, " ", r.reset))
		}
		slices.Sort(got)
		expect.Equal(t, strings.Join(got, "; "), row.want, row.fields, "read as")
	}
}

// The limiter accepts all that is parsed, even of hostile header fields.
func FuzzRemainders(f *testing.F) {
	f.Add(`"default";r=50;t=30`, `"default";q=100;qu="tokens"`, "9", "1790003600", "12")
	f.Add(`limit=100, remaining=50, reset=5`, `("a" "b");q=1`, "-1", "6m0s", "Mon, 05 Aug 2019 09:27:05 GMT")
	f.Add(`"a";r=999999999999999;t=999999999999999`, `a;qu=1`, "999999999999999999", "1e300", "99999999999999999999")
	f.Fuzz(func(t *testing.T, limit, policy, remaining, reset, retry string) {
		h := http.Header{"Ratelimit": {limit}, "Ratelimit-Policy": {policy}}
		h.Set("X-RateLimit-Remaining", remaining)
		h.Set("X-RateLimit-Reset", reset)
		h.Set("Retry-After", retry)
		now := time.Unix(1_790_000_000, 0)
		units := map[string]bool{throttle.Requests: true, "tokens": true}
		for range 2 {
			for _, r := range remainders(h, now, units) {
				expect.That(t, units[r.unit] && r.units >= 0 && r.units <= throttle.MaxLimit &&
					r.reset > 0 && r.reset <= throttle.MaxPeriod, r)
			}
			h.Del("RateLimit") // for the other fields
		}
		d, refused := refusal(&http.Response{StatusCode: http.StatusTooManyRequests, Header: h})
		expect.That(t, d >= 0 && refused, "refused", refused, "for", d)
	})
}

// The upstream's remaining units are compared with an upper bound of ours.
func TestWhatOurWindowsCanGrant(t *testing.T) {
	t.Parallel()
	at := time.Unix(1_790_000_000, 0)
	d := throttle.Decision{At: at, Windows: []throttle.WindowState{
		{Algorithm: throttle.AlgorithmSliding, Unit: "requests", Limit: 5, Remaining: 4, Period: 3 * time.Second},
		{Algorithm: throttle.AlgorithmFixed, Unit: "requests", Limit: 1000, Remaining: 900, Period: time.Hour},
		{Algorithm: throttle.AlgorithmCalendar, Unit: "requests", Limit: 2000, Remaining: 1000, ResetsAt: at.Add(90 * time.Minute)},
		{Algorithm: throttle.AlgorithmConcurrency, Unit: "requests", Limit: 1, Remaining: 0},
		{Algorithm: throttle.AlgorithmSliding, Unit: "tokens", Limit: 10, Remaining: 1, Period: time.Second},
	}}
	for _, row := range []struct {
		unit  string
		reset time.Duration
		want  int64
	}{
		{"requests", time.Second, 4},
		{"requests", 7 * time.Second, 14},
		{"requests", 30 * time.Minute, 900},
		{"requests", time.Hour, 1000}, // of the day
		{"requests", 2 * time.Hour, 2900},
		{"tokens", time.Second, 11},
		{"bytes", time.Second, -1},
	} {
		got, ok := grantable(d, remainder{unit: row.unit, reset: row.reset})
		if !ok {
			got = -1
		}
		expect.Equal(t, got, row.want, row.unit, "in", row.reset)
	}
}

func TestAnExcessIsReportedOnce(t *testing.T) {
	t.Parallel()
	l := &learner{reported: map[string]gap{}}
	for i, row := range []struct {
		behind int64
		reset  time.Duration
		news   bool
	}{
		{0, time.Hour, false},
		{-5, time.Hour, false},
		{10, time.Hour, true},
		{10, time.Hour - time.Second, false},
		{9, time.Hour, false},
		{11, time.Hour, true},
		{5, time.Hour, false},
		{4, time.Hour, true}, // the last report is far too strict by now
		{4, 2 * time.Hour, true},
		{0, 2 * time.Hour, true},
		{0, 2 * time.Hour, false},
	} {
		got := l.isNews("key", row.behind, row.reset)
		expect.Equal(t, got, row.news, i, "behind by", row.behind, "reset in", row.reset, "news")
		if got {
			l.note("key", row.behind, row.reset)
		}
	}
	for i := range 3 * maxReported {
		l.note(fmt.Sprint(i), 1, time.Hour)
	}
	expect.That(t, len(l.reported) <= maxReported, len(l.reported), "excesses are remembered")
}
