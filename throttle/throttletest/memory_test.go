package throttletest_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A failing test panics with what it says, in place of its end.
type failing struct{ testing.TB }

func (failing) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// A test whose requests are never denied would pass by mistake.
func TestDenyAfterNeedsWhatCanBeDenied(t *testing.T) {
	hour := []throttle.Window{{Name: "hour", Limit: 3, Period: time.Hour}}
	limiter := throttletest.NewLimiter(t,
		throttle.Policy{Name: "api", Tenants: map[string]throttle.Tenant{"zeta": {Exempt: true}}, Windows: hour},
		throttle.Policy{Name: "new", Mode: throttle.ModeObserve, Windows: hour})
	for _, row := range []struct {
		r    throttle.Request
		n    int64
		want string
	}{
		{throttle.Request{Policy: "api", Tenant: "zeta"}, 1, "never denied"},
		{throttle.Request{Policy: "api", Tenant: "acme", Exempt: true}, 1, "never denied"},
		{throttle.Request{Policy: "new", Tenant: "acme"}, 1, "never denied"},
		{throttle.Request{Policy: "api", Tenant: "acme"}, -1, "-1 requests"},
		{throttle.Request{Policy: "api", Tenant: "acme"}, 4, "too few for 4"},
		{throttle.Request{Policy: "api", Tenant: "acme"}, 1, ""},
	} {
		said := ""
		func() {
			defer func() { said, _ = recover().(string) }()
			throttletest.DenyAfter(failing{t}, limiter, row.r, row.n)
		}()
		expect.That(t, strings.Contains(said, row.want) && (said == "") == (row.want == ""),
			row.r, row.n, said, "want", row.want)
	}
	for i := range 2 {
		d, err := limiter.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		expect.That(t, err == nil && d.Granted == (i == 0), "request", i, "granted", d.Granted, err)
	}
}

// A test goes to the end of a quota, and of a year, without waiting.
func TestADateIsSleptTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 12, 31, 23, 59, 0, 0, time.UTC)))
		limiter := throttletest.NewLimiter(t, throttle.Policy{
			Name: "api", Windows: []throttle.Window{
				{Name: "month", Algorithm: throttle.AlgorithmCalendar, Limit: 1, Resets: "@monthly"},
				{Name: "second", Limit: 1, Period: time.Second},
			},
		})
		for i, row := range []struct {
			after   time.Duration
			granted bool
			retryIn time.Duration
		}{
			{0, true, 0},
			{30 * time.Second, false, 30 * time.Second},
			{30*time.Second - time.Microsecond, false, time.Microsecond},
			{time.Microsecond, true, 0},
			{time.Second, false, 31*24*time.Hour - time.Second},
		} {
			time.Sleep(row.after)
			d, err := limiter.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
			expect.That(t, err == nil && d.Granted == row.granted && d.RetryIn == row.retryIn &&
				d.At.Equal(time.Now()), "request", i, "at", d.At, "granted", d.Granted, "retry in", d.RetryIn, err)
		}
	})
}
