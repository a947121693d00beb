package control_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

var anna = control.Author{Who: "anna", Why: "incident 7"}

// hourly is a policy of a limit by the hour.
func hourly(name string, limit int64) throttle.Policy {
	return throttle.Policy{Name: name, Windows: []throttle.Window{{Name: "hour", Limit: limit, Period: time.Hour}}}
}

func newStore(t testing.TB, client redis.UniversalClient) *control.Store {
	t.Helper()
	return control.StoreOf(limitertest.New(t, client))
}

func follow(t testing.TB, l *throttle.Limiter, keepPolicies bool) {
	t.Helper()
	f := control.StoreOf(l).Follow(t.Context(), control.FollowConfig{KeepPolicies: keepPolicies})
	t.Cleanup(func() { f.Close() })
}

// granted reports whether one request of a tenant is granted.
func granted(t testing.TB, l *throttle.Limiter, policy, tenant string) bool {
	t.Helper()
	return expect.Got(l.Reserve(t.Context(), throttle.Request{Policy: policy, Tenant: tenant}))(t).Granted
}

// publish publishes instead of a version, and returns the new one.
func publish(t testing.TB, s *control.Store, version int64, policies ...throttle.Policy) int64 {
	t.Helper()
	return expect.Got(s.Publish(t.Context(), policies, version, anna))(t)
}

func state(t testing.TB, s *control.Store) control.State {
	t.Helper()
	return expect.Got(s.State(t.Context()))(t)
}

// changes are the last ones of the log.
func changes(t testing.TB, s *control.Store, n int) []control.Change {
	t.Helper()
	return expect.Got(s.Changes(t.Context(), n))(t)
}
