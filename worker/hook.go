package worker

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

//go:embed lua/requeue.lua
var requeueLua string

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
		client.AddHook(&hook{client, redis.NewScript(requeueLua), h.throttle})
		h.throttle.lines.use(client)
	}
	return made
}

// A hook stands between asynq's server and its Redis. It sees which task is picked up, and
// whatever asynq wants to do with a task that was denied (retry, archive, even finish it, if
// some middleware has swallowed the error), it requeues the task in place of that: asynq itself
// archives a task without retries left before it asks whether its error was a failure, and
// gives up on the call if Redis does not answer at once.
type hook struct {
	client   redis.UniversalClient
	requeues *redis.Script
	throttle *Throttle
}

func (h *hook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next // asynq's server moves no task in a pipeline
}

func (h *hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		if !ok {
			return next(ctx, cmd)
		}
		switch call := callOf(script.Args()); call.verb {
		case "":
			return next(ctx, cmd)
		case "dequeue":
			return h.dequeue(ctx, next, script, call)
		default:
			return h.finish(ctx, next, script, call)
		}
	}
}

// dequeue lets asynq pick a task up, and remembers it.
func (h *hook) dequeue(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call scriptCall) error {
	if !h.throttle.guarded.Load() {
		select {
		case <-time.After(refusedPause):
		case <-ctx.Done():
		}
		err := errors.New("worker: no task is picked up, as it would run unthrottled: " +
			"call Throttle.Middleware and put what it returns into the handler")
		cmd.SetErr(err)
		return err
	}
	h.throttle.lines.start()
	if err := next(ctx, cmd); err != nil {
		return err
	}
	if text, err := cmd.Text(); err == nil {
		message := []byte(text)
		ref := taskRef{call.task.queue, messageText(message, fieldID)}
		late := h.throttle.missedDeadline(message, time.Now())
		h.throttle.attempts.begin(ref, message, late)
		if last, ok := without(message, fieldRetry); ok && late != nil {
			cmd.SetVal(string(last)) // asynq archives it at once; finish gives the retries back
		}
	}
	return nil
}

// finish lets asynq put a task down, unless it was denied.
func (h *hook) finish(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call scriptCall) error {
	now, a := h.throttle.attempts.get(call.task)
	if now.late != nil && call.verb == "archive" {
		call.args[1] = withError(now.message, now.late.Error(), time.Now())
		err := next(ctx, cmd)
		if err == nil { // or else asynq calls again, as Redis does not know its script
			h.throttle.attempts.end(call.task, a)
		}
		return err
	}
	if call.verb == "requeue" || now.denied == nil { // asynq's requeue, at shutdown, loses nothing
		h.throttle.attempts.end(call.task, a)
		if call.verb == "done" || call.verb == "complete" {
			h.throttle.checkEntered(now)
		}
		return next(ctx, cmd)
	}
	err := h.requeue(ctx, call.task, now)
	if err == nil || isNotFound(err) {
		h.throttle.attempts.end(call.task, a)
	}
	if err != nil {
		cmd.SetErr(err)
		return err
	}
	cmd.SetVal("OK")
	return nil
}

// requeue puts a denied task back to wait. Every denial ends here. While Redis does not answer
// it goes on until the context ends, which asynq's does with the task's lease, or the server has
// shut down: asynq's own repetition of a failed call uses a context that has ended, and can never
// succeed.
func (h *hook) requeue(ctx context.Context, task taskRef, a attempt) error {
	queue := "asynq:{" + task.queue + "}:"
	keys := []string{queue + "active", queue + "lease", queue + "retry", queue + "t:" + task.id}
	if lock := messageText(a.message, fieldUniqueKey); lock != "" {
		keys = append(keys, lock)
	}
	message := withError(a.message, a.denied.Error(), time.Now())
	for pause := requeuePauseMin; ; pause = min(2*pause, requeuePauseMax) {
		at := a.denied.ProcessAt
		call, cancel := context.WithTimeout(ctx, requeueTimeout)
		err := h.requeues.Run(call, h.client, keys, task.id, message, at.Unix(), a.nonce, max(0, int(time.Until(at)/time.Second))).Err()
		cancel()
		if err == nil || isNotFound(err) {
			return err
		}
		if _, ends := ctx.Deadline(); !ends { // asynq's recoverer, which comes again
			return err
		}
		select {
		case <-time.After(pause):
			continue
		case <-ctx.Done():
		case <-h.throttle.patience.Done():
		}
		return fmt.Errorf("worker: requeueing task %s, which was denied: %w", task.id, err)
	}
}

func isNotFound(err error) bool {
	return err != nil && strings.HasPrefix(err.Error(), "NOT FOUND")
}

// checkEntered says, once, that tasks finish which the middleware has never seen.
func (t *Throttle) checkEntered(a attempt) {
	if a.message == nil || t.entered.Load() {
		return
	}
	if _, matched := t.config.Limiter.PolicyFor(messageText(a.message, fieldType)); matched && t.missed.CompareAndSwap(false, true) {
		t.config.Logger.Error("worker: a task ran unthrottled: put what Throttle.Middleware returns into the handler",
			"type", messageText(a.message, fieldType))
	}
}

// A scriptCall is what asynq does to a task, or to a queue, by one of its scripts.
type scriptCall struct {
	verb string // a verb of shapes, or empty for anything else
	task taskRef
	args []any // after the keys: the task's ID, and for most verbs its message
}

// shapes are the first keys of the calls that move a task, without "asynq:{QUEUE}:". "t:" is
// the task's own key, whose ID is the first argument. TestCallsOfAsynq holds them to what the
// asynq in use does.
var shapes = []struct {
	verb string
	keys []string
}{
	{"dequeue", []string{"pending", "paused", "active", "lease"}},
	{"retry", []string{"t:", "active", "lease", "retry"}},
	{"archive", []string{"t:", "active", "lease", "archived"}},
	{"done", []string{"active", "lease", "t:"}},
	{"complete", []string{"active", "lease", "completed", "t:"}},
	{"requeue", []string{"active", "lease", "pending", "t:"}},
}

// callOf recognises one of asynq's calls by what it sends: EVALSHA, script, number of keys,
// keys, arguments.
func callOf(args []any) scriptCall {
	if len(args) < 3 || args[0] != "evalsha" && args[0] != "eval" {
		return scriptCall{}
	}
	n, _ := args[2].(int)
	if n < 3 || len(args) <= 3+n {
		return scriptCall{}
	}
	keys, id := args[3:3+n], args[3+n]
	for _, shape := range shapes {
		if queue, ok := queueOf(keys, shape.keys, id); ok {
			id, _ := id.(string)
			return scriptCall{shape.verb, taskRef{queue, id}, args[3+n:]}
		}
	}
	return scriptCall{}
}

// queueOf returns the queue whose keys these are, if they have the shape.
func queueOf(keys []any, shape []string, id any) (queue string, ok bool) {
	if len(keys) < len(shape) {
		return "", false
	}
	prefix := ""
	for i, suffix := range shape {
		key, _ := keys[i].(string)
		if suffix == "t:" {
			suffix = fmt.Sprint("t:", id)
		}
		rest, ok := strings.CutSuffix(key, suffix)
		if !ok || i > 0 && rest != prefix {
			return "", false
		}
		prefix = rest
	}
	queue, opened := strings.CutPrefix(prefix, "asynq:{")
	queue, closed := strings.CutSuffix(queue, "}:")
	return queue, opened && closed
}
