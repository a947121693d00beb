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
	s, err := control.NewStore(client, "")
	must(t, err)
	return s
}

func TestAStoreNeedsAClient(t *testing.T) {
	for _, client := range []redis.UniversalClient{nil, (*redis.Client)(nil)} {
		_, err := control.NewStore(client, "")
		if want := "control: throttle: Config.Client is nil: must be a connection to Redis"; err == nil || err.Error() != want {
			t.Errorf("%T: got %v, want %s", client, err, want)
		}
	}
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

func follow(t testing.TB, l *throttle.Limiter, s *control.Store) {
	t.Helper()
	f, err := control.Follow(t.Context(), control.FollowConfig{Limiter: l, Logger: slog.New(slog.DiscardHandler), Store: s})
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
