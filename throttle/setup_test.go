package throttle_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// midnight is when handed clocks begin, in microseconds: a whole day in UTC, so that buckets by
// the clock are easy to see.
const midnight = 20_834 * 24 * int64(time.Hour/time.Microsecond)

// at is a time by a handed clock.
func at(d time.Duration) time.Time { return time.UnixMicro(midnight + d.Microseconds()) }

// A clock is the time that a test hands to the scripts.
type clock struct{ us atomic.Int64 }

func (c *clock) set(d time.Duration) { c.us.Store(midnight + d.Microseconds()) }

// tb is what testing.T and rapid.T have in common.
type tb interface {
	Context() context.Context
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Helper()
	Log(args ...any)
}

// newLimiter returns a limiter that goes by the clock of Redis.
func newLimiter(t tb, client redis.UniversalClient, policies ...throttle.Policy) *throttle.Limiter {
	t.Helper()
	l, err := throttle.New(throttle.Config{Client: client, Policies: policies})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// newHanded returns a limiter that goes by a clock in the test's hand. Its keys never expire:
// they would by the real clock, while the handed one stands still.
func newHanded(t tb, client redis.UniversalClient, policies ...throttle.Policy) (*throttle.Limiter, *clock) {
	t.Helper()
	l := newLimiter(t, client, policies...)
	c := &clock{}
	c.set(0)
	hand(t, l, c)
	return l, c
}

func hand(t tb, l *throttle.Limiter, c *clock) {
	t.Helper()
	l.SetNow(c.us.Load)
	if err := l.EditScripts(throttle.WithoutExpiry); err != nil {
		t.Fatal(err)
	}
}

func policy(windows ...throttle.Window) throttle.Policy {
	return throttle.Policy{Name: "p", Windows: windows}
}

// made is a reservation that was never granted, unless by that ID.
func made(r throttle.Request, id string) throttle.Reservation {
	return throttle.Reservation{Request: r, ID: id}
}

// acme is one request of the usual tenant.
func acme(cost int64) throttle.Request {
	return throttle.Request{Policy: "p", Tenant: "acme", Cost: map[string]int64{throttle.Requests: cost}}
}

func reserve(t tb, l *throttle.Limiter, r throttle.Request) throttle.Decision {
	t.Helper()
	d, err := l.Reserve(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func peek(t tb, l *throttle.Limiter, r throttle.Request) throttle.Decision {
	t.Helper()
	d, err := l.Peek(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func cancel(t tb, l *throttle.Limiter, r throttle.Reservation) throttle.Decision {
	t.Helper()
	d, err := l.Attach(r).Cancel(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// dump returns what is under every key, whatever its type.
func dump(t tb, client *redis.Client) map[string]string {
	t.Helper()
	keys, err := client.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string, len(keys))
	for _, key := range keys {
		var value any
		switch kind := client.Type(t.Context(), key).Val(); kind {
		case "string":
			value, err = client.Get(t.Context(), key).Result()
		case "hash":
			value, err = client.HGetAll(t.Context(), key).Result()
		case "zset":
			value, err = client.ZRangeWithScores(t.Context(), key, 0, -1).Result()
		default:
			t.Fatalf("%q is a %s", key, kind)
		}
		if err != nil {
			t.Fatal(err)
		}
		all[key] = fmt.Sprint(value)
	}
	return all
}
