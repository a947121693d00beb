package throttle

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestADenialSaysItsReason(t *testing.T) {
	windows := []WindowState{
		{Name: "idle", RetryIn: 9 * time.Hour},
		{Name: "burst", Denied: true, RetryIn: 300 * time.Millisecond},
		{Name: "per-minute", Denied: true, RetryIn: 1771 * time.Millisecond},
	}
	for _, tc := range []struct {
		d    Decision
		want string
	}{
		{Decision{Policy: "github-api", Tenant: "acme", RetryIn: 1771 * time.Millisecond, Binds: "per-minute"},
			"throttled: github-api/per-minute, tenant acme, 1.8s"},
		{Decision{Policy: "p", Tenant: "acme\nadmin", RetryIn: time.Microsecond, Binds: "burst"},
			`throttled: p/burst, tenant "acme\nadmin", 1µs`},
		{Decision{Policy: "p", Tenant: strings.Repeat("x", 100), RetryIn: time.Hour + 1, Binds: "burst"},
			"throttled: p/burst, tenant " + strings.Repeat("x", 64) + "..., 1h0m1s"},
		{Decision{Policy: "p", Tenant: "a", Queued: true, RetryIn: time.Second, Binds: BySlots}, "throttled: p, tenant a, 1s"},
		{Decision{Policy: "p", Tenant: "a", RetryIn: time.Second, Binds: ByLine},
			"throttled: p, tenant a, 1s: others wait before it"},
		{Decision{Policy: "p", Granted: true, Windows: windows}, ""},
	} {
		expect.Equal(t, tc.d.Reason(), tc.want)
	}
	expect.Equal(t, (Decision{RetryIn: time.Second, Windows: windows}).EarliestReset(), 300*time.Millisecond, "earliest reset")
	expect.Equal(t, WindowState{Algorithm: AlgorithmFixed, Period: time.Minute, ResetsAt: time.Unix(75, 0), Used: 90}.PerSecond(time.Unix(0, 0)), 2.0)
}

// A rounded wait is never shorter, and no more than a tenth longer.
func TestAWaitIsNeverRoundedDown(t *testing.T) {
	for d := time.Duration(1); d < 1000*time.Hour; d += d/7 + 1 {
		got := roundUp(d)
		expect.That(t, got >= d && (d <= time.Microsecond || got-d <= max(d/10, time.Microsecond)), d, "is rounded to", got)
	}
	for d, want := range map[time.Duration]string{
		0: "0s", 1: "1µs", 9999 * time.Microsecond: "9.999ms", 10001 * time.Microsecond: "11ms",
		1001 * time.Millisecond: "1.1s", 10 * time.Second: "10s", 10001 * time.Millisecond: "11s",
	} {
		expect.Equal(t, roundUp(d).String(), want, d, "is rounded to")
	}
}

// A task that is requeued in an outage names its policy once.
func TestAnOutageNamesItsPolicyOnce(t *testing.T) {
	cause := classify(t.Context(), "api", errors.New("connection refused"))
	denied := &DeniedError{Cause: cause, Decision: Decision{Policy: "api", Tenant: "acme", RetryIn: time.Second}}
	text := denied.Error()
	expect.That(t, strings.Count(text, "api") == 1 && errors.Is(denied, ErrUnavailable), text)
}
