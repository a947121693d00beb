package limitertest

import (
	"context"
	"net"
	"testing"
	"testing/synctest"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// Bubble runs the test on fake time, with a limiter on a miniredis. It fails if the test leaves a
// goroutine behind.
func Bubble(t *testing.T, p throttle.Policy, test func(t *testing.T, l *throttle.Limiter, server *miniredis.Miniredis)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server := miniredis.NewMiniRedis()
		server.ClockTTL(true)
		client := inBubble(server)
		test(t, New(t, client, p), server)
		client.Close()
		server.Close()
	})
}

// inBubble returns a client of a miniredis that works on fake time.
func inBubble(server *miniredis.Miniredis) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr:   "127.0.0.1:6379", // a name would be looked up outside the bubble
		Dialer: func(context.Context, string, string) (net.Conn, error) { return server.Dial() },
	})
}
