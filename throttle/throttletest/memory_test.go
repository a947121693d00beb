package throttletest_test

import (
	"fmt"
	"strings"
	"testing"
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
