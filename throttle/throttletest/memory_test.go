package throttletest_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A failing test panics with what it says, instead of its end.
type failing struct{ testing.TB }

func (failing) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// A client that outlives its test, such as one that asynq has not closed yet, gets errors.
func TestWhatIsInMemoryEndsWithItsTest(t *testing.T) {
	var m throttletest.Memory
	dial := func() error {
		options := m.Options()
		options.MaxRetries, options.DialerRetries = -1, 1
		client := redis.NewClient(options)
		defer client.Close()
		return client.Ping(context.Background()).Err()
	}
	ended := make(chan struct{})
	t.Run("a test", func(t *testing.T) {
		m = throttletest.InMemory(t)
		expect.Must(t, dial())
		go func() {
			defer close(ended)
			for i := 0; i < 1000 && dial() == nil; i++ {
			}
		}()
		time.Sleep(time.Millisecond)
	})
	<-ended
	expect.Err(t, dial(), net.ErrClosed)
}

// A test whose requests are never denied would pass by mistake.
func TestDenyAfterNeedsWhatCanBeDenied(t *testing.T) {
	hour := []throttle.Window{{Name: "hour", Limit: 3, Period: time.Hour}}
	limiter := throttletest.NewLimiter(t,
		throttle.Policy{Name: "api", Tenants: map[string]throttle.Tenant{"zeta": {Exempt: true}}, Windows: hour},
		throttle.Policy{Name: "new", Observe: true, Windows: hour})
	for _, row := range []struct {
		r    throttle.Request
		n    int64
		want string
	}{
		{throttle.Request{Policy: "api", Tenant: "zeta"}, 1, "never denied"},
		{throttle.Request{Policy: "new", Tenant: "acme"}, 1, "never denied"},
		{throttle.Request{Policy: "api", Tenant: "acme"}, -1, "-1 requests"},
		{throttle.Request{Policy: "api", Tenant: "acme", Cost: map[string]int64{throttle.Requests: 0}}, 1, "costs nothing"},
		{throttle.Request{Policy: "api", Tenant: "acme"}, 4, "too few for 4"},
		{throttle.Request{Policy: "api", Tenant: "acme"}, 1, ""},
	} {
		message := ""
		func() {
			defer func() { message, _ = recover().(string) }()
			throttletest.DenyAfter(failing{t}, limiter, row.r, row.n)
		}()
		expect.That(t, strings.Contains(message, row.want) && (message == "") == (row.want == ""),
			row.r, row.n, message, "want", row.want)
	}
	for i := range 2 {
		d, err := limiter.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		expect.That(t, err == nil && d.Granted == (i == 0), "request", i, "granted", d.Granted, err)
	}
}
