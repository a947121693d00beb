package worker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// Pauses between attempts to requeue while Redis does not answer.
const (
	requeuePauseMin = 50 * time.Millisecond
	requeuePauseMax = 2 * time.Second
)

// requeueTimeout bounds one such attempt.
const requeueTimeout = 5 * time.Second

// refusedPause keeps asynq, which asks again at once, from spinning while it is refused.
const refusedPause = time.Second

// hooked makes the clients of an asynq.RedisConnOpt, with our hook in them.
type hooked struct {
	opt      asynq.RedisConnOpt
	throttle *Throttle
}

func (h hooked) MakeRedisClient() any {
	made := h.opt.MakeRedisClient()
	if client, ok := made.(redis.UniversalClient); ok { // or else asynq refuses it
		h.throttle.use(asynqredis.New(client))
		client.AddHook(&hook{h.throttle})
	}
	return made
}

// A hook stands between asynq's server and its Redis.
//
// It answers the calls by which asynq asks for work: dequeue, and forward. And it sees whatever asynq wants to do with a
// task that was denied (retry, archive, even finish it, if some middleware has swallowed the error), and requeues
// the task in place of that: asynq itself archives a task without retries left before it asks whether its error
// was a failure, and gives up on the call if Redis does not answer at once.
type hook struct{ throttle *Throttle }

func (h *hook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next // asynq's server moves no task in a pipeline
}

func (h *hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		if !ok {
			if asynqredis.IsGoodbye(cmd.Args()) {
				h.throttle.drain(ctx)
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
			return h.finish(ctx, next, script, call)
		}
	}
}

// dequeue answers with the task that is to run next, whatever queue asynq asks for.
func (h *hook) dequeue(ctx context.Context, cmd *redis.Cmd) error {
	t := h.throttle
	if !t.guarded.Load() {
		select {
		case <-time.After(refusedPause):
		case <-ctx.Done():
		}
		err := errors.New("worker: no task is picked up, as it would run unthrottled: " +
			"call Throttle.Middleware and put what it returns into the handler")
		cmd.SetErr(err)
		return err
	}
	task, ok, err := t.dispatcher().Next(ctx)
	if err == nil && !ok {
		err = redis.Nil
	}
	if err != nil {
		cmd.SetErr(err)
		return err
	}
	late := t.missedDeadline(task.Message, time.Now())
	if late != nil {
		t.giveBack(task.Grant)
		task.Grant = nil
	}
	t.attempts.begin(task, late)
	message := task.Message
	if last, ok := message.WithoutRetries(); ok && late != nil {
		message = last // asynq archives it at once; finish gives the retries back
	}
	cmd.SetVal(string(message))
	return nil
}

// forward answers by how many tasks that were due were moved.
func (h *hook) forward(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call asynqredis.Call) error {
	if !h.throttle.guarded.Load() {
		return next(ctx, cmd)
	}
	n, err := h.throttle.dispatcher().Forward(ctx, call.Queue, call.Verb == asynqredis.ForwardRetry)
	if err != nil {
		cmd.SetErr(err)
		return err
	}
	cmd.SetVal(int64(n))
	return nil
}

// finish lets asynq put a task down, unless it was denied.
func (h *hook) finish(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call asynqredis.Call) error {
	t := h.throttle
	now, a := t.attempts.get(call.Ref)
	if now.late != nil && call.Verb == asynqredis.Archive {
		call.Args[1] = []byte(now.message.WithError(now.late.Error(), time.Now()))
		err := next(ctx, cmd)
		if err == nil { // or else asynq calls again, as Redis does not know its script
			t.attempts.end(call.Ref, a)
		}
		return err
	}
	if call.Verb == asynqredis.Requeue || now.denied == nil { // asynq's requeue, at shutdown, loses nothing
		t.attempts.end(call.Ref, a)
		if call.Verb == asynqredis.Done || call.Verb == asynqredis.Complete {
			t.checkEntered(now)
		}
		return next(ctx, cmd)
	}
	err := t.requeue(ctx, now)
	if err == nil || asynqredis.IsNotFound(err) {
		t.attempts.end(call.Ref, a)
	}
	if err != nil {
		cmd.SetErr(err)
		return err
	}
	cmd.SetVal("OK")
	return nil
}

// requeue puts a denied task back to wait. Every denial ends here. While Redis does not answer it goes on until the
// context ends, which asynq's does with the task's lease, or the server has shut down: asynq's own repetition of a
// failed call uses a context that has ended, and can never succeed.
func (t *Throttle) requeue(ctx context.Context, a attempt) error {
	r := asynqredis.Requeued{
		Ref: a.Ref, Message: a.message.WithError(a.denied.Error(), time.Now()),
		At: a.denied.ProcessAt, Nonce: a.nonce, Mark: a.mark,
	}
	for pause := requeuePauseMin; ; pause = min(2*pause, requeuePauseMax) {
		call, cancel := context.WithTimeout(ctx, requeueTimeout)
		err := t.asynq.Load().Requeue(call, r)
		cancel()
		if err == nil {
			if a.denied.mayComeAt() {
				t.dispatcher().WakeAt(a.Queue, r.At)
			}
			return nil
		}
		if asynqredis.IsNotFound(err) {
			return err
		}
		if _, ends := ctx.Deadline(); !ends { // asynq's recoverer, which comes again
			return err
		}
		select {
		case <-time.After(pause):
			continue
		case <-ctx.Done():
		case <-t.patience.Done():
		}
		return fmt.Errorf("worker: requeueing task %s, which was denied: %w", a.ID, err)
	}
}

// checkEntered says, once, that tasks finish which the middleware has never seen.
func (t *Throttle) checkEntered(a attempt) {
	if a.message == nil || t.entered.Load() {
		return
	}
	if _, matched := t.config.Limiter.Match(a.message.Type()); matched && t.missed.CompareAndSwap(false, true) {
		t.config.Logger.Error("worker: a task ran unthrottled: put what Throttle.Middleware returns into the handler",
			"type", a.message.Type())
	}
}

// giveBack gives back what a task was granted that does not run, in the background.
func (t *Throttle) giveBack(g *dispatch.Grant) {
	if g != nil {
		_, queue, _ := strings.Cut(g.Queue, "/") // behind the identity of asynq's Redis
		t.dispatcher().GiveBack(g.Policy, queue, g.TakenTicket)
	}
}
