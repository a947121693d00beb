package worker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// While asynq's Redis does not answer the sweep of a line, a caller waits no longer than its context.
func TestASweepHoldsUpNobodyForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		silent := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) // a name would be looked up
		silent.AddHook(hooktest.Hook(func(ctx context.Context, _ redis.Cmder, _ redis.ProcessHook) error {
			<-ctx.Done()
			return ctx.Err()
		}))
		defer silent.Close()
		limiter, err := throttle.New(throttle.Config{Client: silent})
		expect.Equal(t, err, nil)
		s := link{tasks: asynqredis.New(silent), limiter: limiter}
		begun := time.Now()
		first := make(chan time.Duration)
		go func() {
			s.sweep(t.Context(), "a", begun)
			first <- time.Since(begun)
		}()
		synctest.Wait()
		for _, line := range []string{"a", "b"} {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			expect.Equal(t, s.sweep(ctx, line, begun), false, line)
			cancel()
		}
		expect.Equal(t, time.Since(begun), 200*time.Millisecond)
		expect.Equal(t, <-first, sweepTimeout)
	})
}
