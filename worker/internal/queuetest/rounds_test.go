package queuetest

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// roundsEnv multiplies the rounds of tests with random order.
const roundsEnv = "SLUICE_ROUNDS"

// rounds is n, times what the environment asks for.
func rounds(n int) int {
	if times, err := strconv.Atoi(os.Getenv(roundsEnv)); err == nil {
		return n * times
	}
	return n
}

// crossingStart is how late a task may start that fits at once: the last of many idle servers asks by then (SPREAD of
// line_appointments.lua).
const crossingStart = 2 * time.Second

// idle returns policies that guard nothing. A server asks one of its empty lines every 5 s. So
// beside 30 of them a task waits for minutes if a server wrongly holds its line to be empty.
func idle(n int) (policies []throttle.Policy) {
	for i := range n {
		policies = append(policies, throttle.Policy{
			Name:    "idle-" + strconv.Itoa(i),
			Windows: []throttle.Window{{Name: "window", Limit: 1, Period: time.Second, Shared: true}},
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
