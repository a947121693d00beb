package queuetest

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// roundsEnv multiplies the rounds of the scenes with random order.
const roundsEnv = "SLUICE_SCENE_ROUNDS"

// rounds is n, times what the environment asks for.
func rounds(n int) int {
	if times, err := strconv.Atoi(os.Getenv(roundsEnv)); err == nil {
		return n * times
	}
	return n
}

// crossingStart is how late a task may start that fits at once: the last of many idle servers asks by
// then, as SPREAD of line_appointments.lua has it.
const crossingStart = 2 * time.Second

// notStranded is how late it may start where time is real, and a slow machine can make the
// limiter look silent: half of the two minutes after which a task that is stranded is looked at.
const notStranded = time.Minute

// crossing runs a scene in which replies cross, for a number of rounds: in a bubble, where no slow
// machine delays a task, and a few rounds on a real Redis.
func crossing(t *testing.T, n int, policies []throttle.Policy, scene func(t *testing.T, s *sitetest.Site, n int, most time.Duration)) {
	t.Parallel()
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		s := sitetest.New(t, throttletest.Client(t, throttletest.Redis(t)), policies...)
		jittery(s)
		scene(t, s, rounds(n)/4, notStranded)
	})
	t.Run("bubble", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			s := sitetest.NewInBubble(t, policies...)
			jittery(s)
			scene(t, s, rounds(n), crossingStart)
		})
	})
}

// idle returns policies that guard nothing. A server asks one of its empty lines every 5 s. So
// beside 30 of them a task waits for minutes if a server wrongly holds its line to be empty.
func idle(n int) (policies []throttle.Policy) {
	for i := range n {
		policies = append(policies, throttle.Policy{
			Name:    "idle-" + strconv.Itoa(i),
			Windows: []throttle.Window{{Name: "window", Limit: 1, Period: time.Second, Scope: throttle.ScopeShared}},
		})
	}
	return policies
}

// jitter delays every reply by up to a millisecond, so that replies on several connections cross.
func jitter(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	time.Sleep(rand.N(time.Millisecond))
	return err
}

// jittery makes replies of asynq's Redis cross, for servers and clients that are made after it.
func jittery(s *sitetest.Site) { s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(jitter)) }

// jitteryLimiter returns another limiter, whose replies cross.
func jitteryLimiter(s *sitetest.Site) *throttle.Limiter {
	s.Helper()
	return s.AnotherLimiter(hooktest.Hook(jitter))
}
