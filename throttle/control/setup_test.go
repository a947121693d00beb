package control_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

var anna = control.By{Who: "anna", Why: "incident 7"}

func policy(name string, limit int64) throttle.Policy {
	return throttle.Policy{Name: name, Windows: []throttle.Window{{Name: "hour", Limit: limit, Period: time.Hour}}}
}

func newStore(t testing.TB, client redis.UniversalClient) *control.Store {
	t.Helper()
	s, err := control.NewStore(newLimiter(t, throttle.Config{Client: client}))
	must(t, err)
	return s
}

func newLimiter(t testing.TB, c throttle.Config) *throttle.Limiter {
	t.Helper()
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	l, err := throttle.New(c)
	must(t, err)
	return l
}

func follow(t testing.TB, l *throttle.Limiter, keepPolicies bool) {
	t.Helper()
	s, err := control.NewStore(l)
	must(t, err)
	f, err := control.Follow(t.Context(), control.FollowConfig{KeepPolicies: keepPolicies, Store: s})
	must(t, err)
	t.Cleanup(func() { f.Close() })
}

// granted reports whether one request of a tenant is granted.
func granted(t testing.TB, l *throttle.Limiter, policy, tenant string) bool {
	t.Helper()
	d, err := l.Reserve(t.Context(), throttle.Request{Policy: policy, Tenant: tenant})
	must(t, err)
	return d.Granted
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
