package worker

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// refusedPause is the pause before a refused dequeue: asynq asks again at once.
const refusedPause = time.Second

// hooked makes the clients of an asynq.RedisConnOpt, with our hook in them.
type hooked struct {
	opt     asynq.RedisConnOpt
	adapter *Adapter
}

func (h hooked) MakeRedisClient() any {
	made := h.opt.MakeRedisClient()
	if client, ok := made.(redis.UniversalClient); ok { // else asynq refuses it
		h.adapter.hook(client)
	}
	return made
}

// A hook stands between asynq's server and its Redis. It answers the calls by which asynq asks for
// work, dequeue and forward. It requeues a denied task when asynq makes a call that ends it
// (denial.go).
type hook struct {
	singleCalls
	adapter *Adapter
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
			if asynqredis.IsGoodbye(cmd.Args()) {
				h.adapter.drain(ctx)
			}
			return next(ctx, cmd)
		}
		switch call := asynqredis.CallOf(script.Args()); call.Verb {
		case "":
			return next(ctx, cmd)
		case asynqredis.Dequeue:
			return h.dequeue(ctx, script)
		case asynqredis.ForwardScheduled, asynqredis.ForwardRetry:
			return h.forward(ctx, next, script, call)
		default:
			return h.adapter.finish(ctx, next, script, call)
		}
	}
}

// dequeue answers with the task that runs next, whatever queue asynq asks for.
func (h *hook) dequeue(ctx context.Context, cmd *redis.Cmd) error {
	ad := h.adapter
	if err := ad.unfit(); err != nil {
		select {
		case <-time.After(refusedPause):
		case <-ctx.Done():
		}
		cmd.SetErr(err)
		return err
	}
	task, ok, err := ad.dispatcher().Next(ctx)
	if err == nil && !ok {
		err = redis.Nil
	}
	if err != nil {
		cmd.SetErr(err)
		return err
	}
	late := ad.missedDeadline(task.Message, time.Now())
	if late != nil {
		ad.giveBack(task.Grant)
		task.Grant = nil
	}
	ad.attempts.begin(task, late)
	message := task.Message
	if last, ok := message.WithoutRetries(); ok && late != nil {
		message = last // asynq archives it at once; finish gives the retries back
	}
	cmd.SetVal(string(message))
	return nil
}

// unfit returns why the adapter must not pick up tasks, or nil.
func (ad *Adapter) unfit() error {
	switch {
	case ad.reused.Load():
		return errReused
	case !ad.guarded.Load():
		return errors.New("worker: no task is picked up, as it would run unthrottled: " +
			"call Adapter.Middleware and put what it returns into the handler")
	}
	return nil
}

var errReused = errors.New("worker: two servers have the connection of one Adapter: make an Adapter for each")

// forward answers with the number of due tasks that were moved.
func (h *hook) forward(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call asynqredis.Call) error {
	if !h.adapter.guarded.Load() {
		return next(ctx, cmd)
	}
	n, err := h.adapter.dispatcher().Forward(ctx, call.Queue, call.Verb == asynqredis.ForwardRetry)
	if err != nil {
		cmd.SetErr(err)
		return err
	}
	cmd.SetVal(int64(n))
	return nil
}

// checkEntered logs, once, that tasks finish which the middleware has never seen.
func (ad *Adapter) checkEntered(a attempt) {
	if a.message == nil || ad.entered.Load() {
		return
	}
	if _, matched := ad.config.Limiter.Match(a.message.Type()); matched && ad.missed.CompareAndSwap(false, true) {
		ad.config.Logger.Error("worker: a task ran unthrottled: put what Adapter.Middleware returns into the handler",
			"type", a.message.Type())
	}
}

// giveBack returns, in the background, what was granted to a task that does not run.
func (ad *Adapter) giveBack(g *dispatch.Grant) {
	if g != nil {
		_, queue, _ := strings.Cut(g.Queue, "/") // behind the identity of asynq's Redis
		ad.dispatcher().GiveBack(g.Line, queue, g.TakenTicket)
	}
}
