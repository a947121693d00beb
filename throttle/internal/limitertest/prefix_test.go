package limitertest

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Limiters of different prefixes share a Redis, and nothing else: no window and no line.
func TestPrefixesDoNotMeet(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := func(prefix string) *throttle.Limiter {
			l := NewFrom(t, throttle.Config{
				Client: client, Prefix: prefix,
				Policies: []throttle.Policy{Policy(throttle.Window{Name: "w", Limit: 1, Period: m, Shared: true})},
			})
			return l
		}
		waiting := Acme(1)
		waiting.Ticket = throttle.Ticket{Queue: "q", ID: "1"}
		prefixes := []string{"", "staging:", "staging:eu:"}
		for _, prefix := range prefixes {
			expect.Equal(t, Reserve(t, limiter(prefix), Acme(1)).Granted, true)
			expect.Equal(t, Reserve(t, limiter(prefix), Acme(1)).Granted, false)
		}
		// Somebody waits in the line of one prefix.
		staging := limiter("staging:")
		d := Reserve(t, staging, waiting)
		expect.Require(t, d.Queued, "not queued", d)
		// The line of a removed policy is served while somebody waits in it.
		expect.Must(t, staging.SetPolicies(nil))
		expect.Must(t, expect.ErrOf(staging.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"other": 1}, Max: 1})))
		expect.Equal(t, len(staging.Lines()), 1)
		counts := map[string]int{}
		keys := expect.Got(client.Keys(t.Context(), "*").Result())(t)
		for _, key := range keys {
			prefix, rest, found := strings.Cut(key, "sluice:{p}:")
			counts[prefix]++
			expect.That(t, found, "of no prefix", key)
			line := rest == "q"
			expect.That(t, !line || prefix == "staging:", "key", key, "nobody waits there")
		}
		expect.That(t, len(counts) == len(prefixes) && counts["staging:"] > counts[""], "keys by prefix", counts)
	})
}

func TestABadPrefixIsRefused(t *testing.T) {
	for _, prefix := range []string{"a{b", "a}b", "a b", "\n", strings.Repeat("x", 65)} {
		_, err := throttle.New(throttle.Config{Client: redis.NewClient(&redis.Options{}), Prefix: prefix})
		expect.That(t, err != nil && strings.Contains(err.Error(), "throttle: Config.Prefix "), prefix, err)
	}
}
