package worker

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A hook sees the calls of asynq's server to Redis. It answers dequeue and forward itself, and requeues a denied
// task instead of a call that ends it (denial.go).
type hook struct {
	singleCalls
	server *Server
}

// singleCalls passes dials and pipelines on, for hooks of single calls. Asynq moves no task in a pipeline.
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
		case "": // no call that picks up, forwards or ends tasks
			return next(ctx, cmd)
		case asynqredis.Dequeue:
			return h.dequeue(ctx, script)
		case asynqredis.ForwardScheduled, asynqredis.ForwardRetry:
			n, err := h.server.dispatch.Forward(ctx, call.Queue, call.Verb == asynqredis.ForwardRetry)
			return reply(script, int64(n), err) // how many were due: asynq calls again until it is 0
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
		// After its deadline asynq would fail the task at every attempt, before it calls the middleware.
		message = message.WithDeadline(time.Now().Add(lateFor))
	}
	return reply(cmd, string(message), nil)
}

// reply answers a call of asynq's instead of Redis.
func reply(cmd *redis.Cmd, value any, err error) error {
	cmd.SetVal(value)
	cmd.SetErr(err)
	return err
}
