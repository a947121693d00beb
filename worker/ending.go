package worker

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// conclude makes the call by which asynq ends a task. While asynq's Redis is out, as during a
// failover, it is repeated until the context ends, which asynq's does with the task's lease, or the
// server's shutdown waits no longer. Asynq's own repetition uses a context that has ended, and never
// succeeds: the task would stay active, and asynq's recoverer would take one of its retries.
func (ad *Adapter) conclude(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd) error {
	for pause, repeated := requeuePauseMin, false; ; pause, repeated = min(2*pause, requeuePauseMax), true {
		call, cancel := context.WithTimeout(ctx, requeueTimeout)
		err := next(call, cmd)
		cancel()
		if repeated && asynqredis.IsNotFound(err) { // a call before has arrived
			cmd.SetErr(nil)
			cmd.SetVal("OK")
			return nil
		}
		if !asynqredis.IsOutage(err) || !ad.outlasts(ctx, pause) {
			return err
		}
		cmd.SetErr(nil)
	}
}

// outlasts waits before a call that ends a task is repeated. It returns false if that is too late,
// or if it is a call of asynq's recoverer, which comes again.
func (ad *Adapter) outlasts(ctx context.Context, pause time.Duration) bool {
	if _, ends := ctx.Deadline(); !ends {
		return false
	}
	select {
	case <-time.After(pause):
		return true
	case <-ctx.Done():
	case <-ad.shutdownGrace.Done():
	}
	return false
}
