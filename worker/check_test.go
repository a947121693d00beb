package worker_test

import (
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A server says at its start, once, how the Redis of both is not set up.
func TestAServerChecksItsRedis(t *testing.T) {
	t.Parallel()
	client := throttletest.Client(t, throttletest.Redis(t, "--maxmemory-policy", "allkeys-lru"))
	s := newSite(t, client, policy(100, time.Hour))
	s.serve(s.ok)
	s.enqueue(acmeTask(), asynq.TaskID("a"))
	s.waitGone("a")
	s.wait("it is logged", func() bool { return s.log.count("maxmemory-policy is allkeys-lru") > 0 })
	if s.log.count("worker: Redis is not set up for throttling") != 1 {
		t.Errorf("want it logged once:\n%s", s.log)
	}
}
