package throttletest

import (
	"context"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/sluice-go/sluice/throttle"
)

// A Memory is an embedded Redis without a network, made by InMemory. In a bubble of testing/synctest it
// goes by the bubble's clock: there an hour's sleep takes no time.
//
// It is an asynq.RedisConnOpt, so that it also serves clients, servers and inspectors of asynq.
type Memory struct {
	*miniredis.Miniredis
	closing *sync.RWMutex
}

// InMemory starts a Redis in memory, empty. It ends with the test.
func InMemory(t testing.TB) Memory {
	t.Helper()
	m := newMemory()
	t.Cleanup(func() { // miniredis has a data race if a client dials while it closes, and dials start it again
		m.closing.Lock()
		m.Close()
	})
	return m
}

// Embedded returns a client of an embedded Redis of its own, for an Example or a first program. Both end with that.
func Embedded() *redis.Client { return redis.NewClient(newMemory().Options()) }

func newMemory() Memory {
	m := Memory{miniredis.NewMiniRedis(), &sync.RWMutex{}}
	m.ClockTTL(true)
	return m
}

// Options returns the options of a client. The caller may change them.
func (m Memory) Options() *redis.Options {
	return &redis.Options{
		Addr: "127.0.0.1:6379", // a name would be looked up, which a bubble does not allow
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			if !m.closing.TryRLock() {
				return nil, net.ErrClosed
			}
			defer m.closing.RUnlock()
			return m.Dial()
		},
		// Each client needs a config of its own, as the client writes to it.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
}

// Client returns a client that is closed when the test ends.
func (m Memory) Client(t testing.TB) *redis.Client {
	t.Helper()
	client := redis.NewClient(m.Options())
	t.Cleanup(func() { client.Close() })
	return client
}

// MakeRedisClient returns a client. The caller, such as asynq, closes it.
func (m Memory) MakeRedisClient() any { return redis.NewClient(m.Options()) }

// NewLimiter returns a limiter in memory, which logs to the test's output. It goes by the real clock, in a bubble
// of testing/synctest by the bubble's: there time.Sleep brings the next window, and waits take no time.
func NewLimiter(t testing.TB, policies ...throttle.Policy) *throttle.Limiter {
	t.Helper()
	l, err := throttle.New(throttle.Config{
		Client: InMemory(t).Client(t), Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Policies: policies,
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// DenyAfter takes so much capacity that n more requests like r are granted, and the next is denied until windows have
// room again. With n = 0 the next one is denied. It takes units of Concurrency windows for one lease. The test fails
// if the windows have room for fewer than n, or if r costs nothing or is never denied.
func DenyAfter(t testing.TB, l *throttle.Limiter, r throttle.Request, n int64) {
	t.Helper()
	d, err := l.Peek(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	observes := func(p throttle.Policy) bool { return p.Name == r.Policy && p.Observe }
	switch {
	case n < 0:
		t.Fatalf("throttletest: %d requests: must be 0 or more", n)
	case d.Exempt || slices.ContainsFunc(l.Policies(), observes):
		t.Fatalf("throttletest: tenant %q is never denied in policy %q: it is exempt, or the policy observes", r.Tenant, r.Policy)
	case !slices.ContainsFunc(d.Windows, func(w throttle.WindowState) bool { return r.CostOf(w.Unit) > 0 }):
		t.Fatalf("throttletest: the request costs nothing in policy %q: give it a Cost", r.Policy)
	}
	take := map[string]int64{} // by unit, how much its tightest window can spare
	for _, w := range d.Windows {
		cost := r.CostOf(w.Unit)
		spare := w.Remaining - n*cost
		if cost == 0 {
			spare = 0
		}
		if spare < 0 {
			t.Fatalf("throttletest: window %q of policy %q has %d %s left: too few for %d requests of %d",
				w.Name, r.Policy, w.Remaining, w.Unit, n, cost)
		}
		if known, ok := take[w.Unit]; !ok || spare < known {
			take[w.Unit] = spare
		}
	}
	r.Cost, r.Ticket = take, throttle.Ticket{}
	if d, err = l.Reserve(t.Context(), r); err != nil || !d.Granted {
		t.Fatalf("throttletest: taking %v of policy %q: granted %v, %v", take, r.Policy, d.Granted, err)
	}
}
