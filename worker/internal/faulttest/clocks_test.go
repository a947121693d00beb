package faulttest

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A redisClock makes Redis run by another clock for the limiter's scripts, as time goes on.
type redisClock struct{ offset time.Duration }

func (o redisClock) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if args := cmd.Args(); strings.HasPrefix(cmd.Name(), "eval") {
		now := 3 + args[2].(int) // the first argument of each of our scripts
		args[now] = time.Now().Add(o.offset).UnixMicro()
	}
	return next(ctx, cmd)
}

// The clocks of all workers are off from that of Redis: nobody notices.
func TestWorkersClocksAreOff(t *testing.T) {
	for _, offset := range []time.Duration{-5 * time.Minute, 5 * time.Minute} {
		for _, earliestReset := range []bool{false, true} {
			t.Run(fmt.Sprint(offset, " ", earliestReset), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := sitetest.Policy(4, 10*time.Second)
					p.EarliestReset = earliestReset
					s := sitetest.NewInBubble(t, p)
					s.Limiter = s.AnotherLimiter(hooktest.Hook(redisClock{offset}.see))
					s.Serve(s.Ok)
					s.EnqueueMany("acme", 0, 16, asynq.MaxRetry(0))
					s.SleepUntil(16, 2*time.Minute)
					s.WantOnceEach(t, 16)
					s.WantCounters(sitetest.Counters{Processed: 16})
					sitetest.WantNeverOver(t, s.Grants(), 4, 10*time.Second)
					if !earliestReset {
						s.WantWakes(sitetest.DeniedAndRun)
					}
					expect.Equal(t, s.Logs.String(), "", "nothing was to be noticed")
				})
			})
		}
	}
}

// A workerClock is the clock of one worker, by what it hands to asynq's Redis: when tasks come back and it forwards.
type workerClock struct{ offset time.Duration }

func (a workerClock) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	args := cmd.Args()
	shift := func(i int) {
		switch at := args[i].(type) {
		case int64:
			args[i] = at + int64(a.offset/time.Second)
		case string:
			if seconds, err := strconv.ParseInt(at, 10, 64); err == nil {
				args[i] = strconv.FormatInt(seconds+int64(a.offset/time.Second), 10)
			}
		}
	}
	if !strings.HasPrefix(cmd.Name(), "eval") {
		return next(ctx, cmd)
	}
	keys := args[2].(int)
	switch {
	case sitetest.IsRequeue(args):
		shift(11)
		shift(12)
	case keys == 1 && len(args) == 7: // due
		shift(5)
	case keys == 5 && fmt.Sprint(args[5]) == "asynq:{default}:archived": // move
		shift(10)
		for i := 14; i < len(args); i += 7 {
			shift(i)
		}
	}
	return next(ctx, cmd)
}

// The clocks of workers differ. By less than the fallback is late, that costs nothing. By more,
// tasks whose fallback seems to have come wake in vain, and nothing else happens.
func TestWorkersClocksDiffer(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(-5*time.Minute, 90*time.Second, 5*time.Minute), func(t *testing.T, offset time.Duration) {
		s := sitetest.NewInBubble(t, sitetest.Policy(4, 10*time.Second))
		s.Serve(s.Ok)
		right := s.Asynq
		s.Asynq = hooktest.With(right, hooktest.Hook((workerClock{offset}).see))
		s.Serve(s.Ok, s.Apart)
		s.Asynq = right
		s.EnqueueMany("acme", 0, 16, asynq.MaxRetry(0))
		s.SleepUntil(16, 2*time.Minute)
		s.WantOnceEach(t, 16)
		s.WantCounters(sitetest.Counters{Processed: 16})
		sitetest.WantNeverOver(t, s.Grants(), 4, 10*time.Second)
		if offset.Abs() < sitetest.FallbackMin {
			s.WantWakes(sitetest.DeniedAndRun)
		}
	})
}
