package limitertest

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

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
		Equal(t, strings.Join(log.Lines(), "\n"), row.want)
	}
}
