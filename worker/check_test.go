package worker_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A server says at its start, once, how the Redis of both is not set up.
func TestAServerChecksItsRedis(t *testing.T) {
	t.Parallel()
	client := throttletest.Client(t, throttletest.Redis(t, "--maxmemory-policy", "allkeys-lru"))
	s := newSite(t, client, policy(100, time.Hour))
	server := s.serve(s.ok)
	s.enqueue(acmeTask(), asynq.TaskID("a"))
	s.waitGone("a")
	s.wait("it is logged", func() bool { return s.log.count("maxmemory-policy is allkeys-lru") > 0 })
	if s.log.count("worker: Redis is not set up for throttling") != 1 {
		t.Errorf("want it logged once:\n%s", s.log)
	}
	for _, check := range []func() ([]string, error){
		func() ([]string, error) { return server.Check(t.Context()) },
		func() ([]string, error) { return s.client(s.limiter).Check(t.Context()) },
	} {
		if findings, err := check(); err != nil || len(findings) != 1 || !strings.Contains(findings[0], "allkeys-lru") {
			t.Errorf("%q, %v", findings, err)
		}
	}
}

// A ping asks both Redises, and a refused user of the limiter's is told again every minute.
func TestARefusedUserIsToldAgain(t *testing.T) {
	t.Parallel()
	admin := throttletest.Client(t, throttletest.Redis(t))
	s := newSite(t, throttletest.Client(t, throttletest.Redis(t)), policy(100, time.Hour))
	if err := admin.Do(t.Context(), "acl", "setuser", "half", "on", "nopass", "~*", "+@all", "-set").Err(); err != nil {
		t.Fatal(err)
	}
	limits := redis.NewClient(&redis.Options{Addr: admin.Options().Addr, Username: "half", Password: "any"})
	defer limits.Close()
	s.limiter = s.limiterOn(limits)
	server, client := s.serve(s.ok), s.client(s.limiter)
	for _, ping := range []func() error{server.Ping, client.Ping} {
		if err := ping(); !errors.Is(err, throttle.ErrForbidden) || !strings.Contains(err.Error(), "may not call set") {
			t.Errorf("%v", err)
		}
	}
	s.enqueue(acmeTask(), asynq.TaskID("a"))
	s.wait("it is logged", func() bool {
		return s.log.count("worker: the limiter is unavailable") > 0 && s.log.count(throttle.ErrForbidden.Error()) > 0
	})
	if err := admin.Do(t.Context(), "acl", "setuser", "half", "+set").Err(); err != nil {
		t.Fatal(err)
	}
	s.waitGone("a")
	if err := server.Ping(); err != nil {
		t.Error(err)
	}
}
