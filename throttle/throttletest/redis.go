// Package throttletest starts what tests of throttled code need: a limiter in memory, on fake time
// if the test wants, a real Redis, or an embedded one. Each starts empty, and serves one test or Example.
package throttletest

import (
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
)

// Each runs the test twice, in parallel: on a real Redis ("redis") and on miniredis ("miniredis").
func Each(t *testing.T, test func(t *testing.T, client *redis.Client)) {
	t.Helper()
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		test(t, Client(t, Redis(t)))
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		test(t, Client(t, Miniredis(t).Addr()))
	})
}

// Client returns a client that is closed when the test ends.
func Client(t testing.TB, addr string) *redis.Client {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { client.Close() })
	return client
}

// Miniredis starts an embedded Redis whose keys expire as its clock goes on.
func Miniredis(t testing.TB) *miniredis.Miniredis {
	t.Helper()
	m := miniredis.RunT(t)
	m.ClockTTL(true)
	return m
}

// Redis starts a redis-server for this test on a free loopback port, without persistence and with
// further arguments, and returns its address. It ends with the test. Where redis-server is not
// installed the test is skipped, or fails if SLUICE_REQUIRE_REDIS is set.
func Redis(t testing.TB, args ...string) string {
	t.Helper()
	return servers.RedisProcess(t, args...).Addr
}
