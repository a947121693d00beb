package faulttest

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A ping asks both Redises. A refused user of the limiter's is logged by its own class, and work goes on
// when the user is let in.
func TestARefusedUserIsTold(t *testing.T) {
	t.Parallel()
	admin := throttletest.Client(t, throttletest.Redis(t))
	s := sitetest.New(t, throttletest.Client(t, throttletest.Redis(t)), sitetest.Policy(100, time.Hour))
	sitetest.Must(t, admin.Do(t.Context(), "acl", "setuser", "half", "on", "nopass", "~*", "+@all", "-set").Err())
	limits := redis.NewClient(&redis.Options{Addr: admin.Options().Addr, Username: "half", Password: "any"})
	defer limits.Close()
	s.Limiter = s.LimiterOn(limits)
	server, client := s.Serve(s.Ok), s.Client(s.Limiter)
	for _, ping := range []func() error{server.Ping, client.Ping} {
		if err := ping(); !errors.Is(err, throttle.ErrForbidden) || !strings.Contains(err.Error(), "may not call set") {
			t.Errorf("%v", err)
		}
	}
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"))
	s.Wait("it is logged", func() bool {
		return s.Journal.Count("worker: the limiter is unavailable") > 0 && s.Journal.Count(throttle.ErrForbidden.Error()) > 0
	})
	sitetest.Must(t, admin.Do(t.Context(), "acl", "setuser", "half", "+set").Err())
	s.WaitGone("a")
	if err := server.Ping(); err != nil {
		t.Error(err)
	}
}
