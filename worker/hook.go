package worker

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A hook stands between asynq's server and its Redis. It answers dequeue and forward, and requeues a denied
// task when asynq makes a call that ends it (denial.go).
type hook struct {
	singleCalls
	server *Server
}

// singleCalls lets through what is no single call. Asynq moves no task in a pipeline.
type singleCalls struct{}

func (singleCalls) DialHook(next redis.DialHook) redis.DialHook { return next }

func (singleCalls) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h *hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		if !ok {
			return next(ctx, cmd)
		}
		switch call := asynqredis.CallOf(script.Args()); call.Verb {
		case "":
			return next(ctx, cmd)
		case asynqredis.Dequeue:
			return h.dequeue(ctx, script)
		case asynqredis.ForwardScheduled, asynqredis.ForwardRetry:
			n, err := h.server.dispatch.Forward(ctx, call.Queue, call.Verb == asynqredis.ForwardRetry)
			return reply(script, int64(n), err) // how many due tasks were moved
		default:
			return h.server.finish(ctx, next, script, call)
		}
	}
}

// dequeue answers with the task that runs next, whatever queue asynq asks for.
func (h *hook) dequeue(ctx context.Context, cmd *redis.Cmd) error {
	s := h.server
	task, ok := s.dispatch.Next(ctx)
	if !ok {
		return reply(cmd, nil, redis.Nil)
	}
	message := task.Message
	if a := s.attempts.begin(task); s.isLate(a) {
		// Past its deadline asynq would give it to no middleware, and fail it at every attempt.
		message = message.WithDeadline(time.Now().Add(lateFor))
	}
	return reply(cmd, string(message), nil)
}

// reply answers a call of asynq's in place of Redis.
func reply(cmd *redis.Cmd, value any, err error) error {
	cmd.SetVal(value)
	cmd.SetErr(err)
	return err
}
