package limitertest

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Limiters of different prefixes share a Redis, and nothing else: no window and no line.
func TestPrefixesDoNotMeet(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := func(prefix string) *throttle.Limiter {
			l, err := throttle.New(throttle.Config{
				Client: client, Prefix: prefix,
				Policies: []throttle.Policy{Policy(throttle.Window{Name: "w", Limit: 1, Period: m, Scope: throttle.ScopeShared})},
			})
			Must(t, err)
			return l
		}
		waiting := Acme(1)
		waiting.Ticket = throttle.Ticket{Queue: "q", ID: "1"}
		prefixes := []string{"", "staging:", "staging:eu:"}
		for _, prefix := range prefixes {
			Equal(t, Reserve(t, limiter(prefix), Acme(1)).Granted, true)
			Equal(t, Reserve(t, limiter(prefix), Acme(1)).Granted, false)
		}
		// Somebody waits in the line of one prefix.
		staging := limiter("staging:")
		if d := Reserve(t, staging, waiting); !d.Queued {
			t.Fatalf("not queued: %+v", d)
		}
		// The line of a removed policy is served while somebody waits in it.
		Must(t, staging.SetPolicies(nil))
		if _, err := staging.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"other": 1}, Max: 1}); err != nil {
			t.Fatal(err)
		}
		Equal(t, len(staging.Lines()), 1)
		counts := map[string]int{}
		keys, err := client.Keys(t.Context(), "*").Result()
		Must(t, err)
		for _, key := range keys {
			prefix, rest, found := strings.Cut(key, "sluice:{p}:")
			if counts[prefix]++; !found {
				t.Errorf("key %q is of no prefix", key)
			}
			if line := rest == "q"; line && prefix != "staging:" {
				t.Errorf("key %q: nobody waits there", key)
			}
		}
		if len(counts) != len(prefixes) || counts["staging:"] <= counts[""] {
			t.Errorf("keys by prefix: %v", counts)
		}
	})
}

func TestABadPrefixIsRefused(t *testing.T) {
	for _, prefix := range []string{"a{b", "a}b", "a b", "\n", strings.Repeat("x", 65)} {
		_, err := throttle.New(throttle.Config{Client: redis.NewClient(&redis.Options{}), Prefix: prefix})
		if err == nil || !strings.Contains(err.Error(), "throttle: Config.Prefix ") {
			t.Errorf("%q: %v", prefix, err)
		}
	}
}
