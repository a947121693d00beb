package limitertest

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A refusal that starts a pause is logged, with the rate that it leads to.
func TestRatesAreLogged(t *testing.T) {
	p := Policy(throttle.Window{Name: "w", Limit: 10, Period: time.Second})
	Bubble(t, p, func(t *testing.T, _ *throttle.Limiter, server *miniredis.Miniredis) {
		client := throttletest.Memory{Miniredis: server}.Client(t)
		log := &Journal{}
		l, err := throttle.New(throttle.Config{
			Client: client, Logger: slog.New(slog.NewTextHandler(log, nil)), Policies: []throttle.Policy{p},
		})
		Must(t, err)
		wants := func(want ...string) {
			t.Helper()
			synctest.Wait()
			got := log.Lines()
			for i := 0; i < max(len(got), len(want)); i++ {
				if i >= len(got) || i >= len(want) || !strings.HasPrefix(got[i], want[i]) {
					t.Errorf("logged %q, want %q", got, want)
					return
				}
			}
		}
		refused := func() {
			t.Helper()
			d, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "a"})
			if err != nil || !d.Granted {
				t.Fatal(d, err)
			}
			if _, err := d.Reservation.Pause(t.Context(), 0, ""); err != nil {
				t.Fatal(err)
			}
		}
		refused()
		pauses := `"throttle: the upstream refused a call: its policy pauses" policy=p tenant=a for=125ms rate="refused `
		wants(pauses + "once since")
		time.Sleep(30 * time.Second)
		refused()
		wants(pauses + "2 times since")
	})
}

// SetPolicies logs what it changes, and nothing if that is nothing.
func TestReplacedPoliciesAreLogged(t *testing.T) {
	log := &Journal{}
	named := func(name string, limit int64) throttle.Policy {
		return throttle.Policy{Name: name, Match: []string{name}, Windows: []throttle.Window{{Name: "w", Limit: limit, Period: time.Second}}}
	}
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	l, err := throttle.New(throttle.Config{
		Client: client, Logger: slog.New(slog.NewTextHandler(log, nil)), Policies: []throttle.Policy{named("a", 1), named("b", 1), named("c", 1)},
	})
	Must(t, err)
	for _, row := range []struct {
		policies []throttle.Policy
		want     string
	}{
		{[]throttle.Policy{named("a", 1), named("b", 1), named("c", 1)}, ""},
		{[]throttle.Policy{named("d", 1), named("b", 2), named("c", 1)}, `"throttle: the policies were replaced" added=[d] changed=[b] removed=[a]`},
		{[]throttle.Policy{named("bad name", 1)}, ""},
	} {
		_ = l.SetPolicies(row.policies)
		if got := strings.Join(log.Lines(), "\n"); got != row.want {
			t.Errorf("logged %q, want %q", got, row.want)
		}
	}
}
