package worker

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

//go:embed lua/place.lua
var placeLua string

// An option is one of ours among asynq's, which ignores it.
type option struct {
	name  string
	value any
}

func (o option) String() string         { return fmt.Sprintf("%s(%v)", o.name, o.value) }
func (o option) Type() asynq.OptionType { return -1 }
func (o option) Value() any             { return o.value }

type maxWait struct{ option }
type backlog struct{ option }

// MaxWait is an option for Client.EnqueueContext: a task that is expected to wait longer before
// it starts is refused with a *throttle.RefusedError, and nothing is enqueued. 0 is no limit.
func MaxWait(d time.Duration) asynq.Option { return maxWait{option{"MaxWait", d}} }

// Backlog is an option for Client.EnqueueContext: a task of which that many with the same tenant
// and attributes are in line already is refused with a *throttle.RefusedError, and nothing is
// enqueued. 0 is no limit.
func Backlog(n int) asynq.Option { return backlog{option{"Backlog", n}} }

// TaskInfo is asynq's, and when the task is expected to start.
type TaskInfo struct {
	*asynq.TaskInfo

	// StartsAt is when the task's turn is expected, by this machine's clock: now if it fits now.
	// NextProcessAt of a task that waits is later, as it says when it comes if nobody calls it.
	StartsAt time.Time
}

// A placing is one task on its way through asynq's client, which alone knows its queue and ID.
type placing struct {
	backlog int
	maxWait time.Duration
	request throttle.Request

	processAt time.Time // set if the task waits in line
	refused   error
	startsAt  time.Time
}

type placingKey struct{}

// A planner is the hook in a client's connection that gives a task its place in line before
// asynq enqueues it, and has one that must wait scheduled instead of pending.
type planner struct {
	client  redis.UniversalClient
	limiter *throttle.Limiter
	lines   *lines
	places  *redis.Script
}

func (p *planner) DialHook(next redis.DialHook) redis.DialHook { return next }

func (p *planner) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next // asynq's client enqueues nothing in a pipeline
}

func (p *planner) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		placing, _ := ctx.Value(placingKey{}).(*placing)
		if !ok || placing == nil {
			return next(ctx, cmd)
		}
		call, ok := enqueueOf(script.Args())
		if !ok {
			return next(ctx, cmd)
		}
		return p.place(ctx, next, script, call, placing)
	}
}

func (p *planner) place(ctx context.Context, next redis.ProcessHook, cmd *redis.Cmd, call enqueueCall, placing *placing) error {
	if !p.limiter.Listening() {
		p.lines.start()
	}
	placing.request.Ticket = call.task.ticket()
	d, err := p.plan(ctx, placing, deadlineOf(call.message), time.Now())
	var refused *throttle.RefusedError
	var late *TooLateError
	switch {
	case errors.As(err, &refused), errors.As(err, &late):
		placing.refused = err
		cmd.SetErr(err)
		return err
	case err != nil:
		return next(ctx, cmd) // it takes its place when it is denied
	}
	now := time.Now()
	placing.startsAt = now.Add(d.RetryIn)
	processAt := wholeSecond(now.Add(fallback(d.RetryIn)))
	enqueued, err := p.schedule(ctx, cmd, call, processAt, now)
	switch {
	case !enqueued && !d.Known:
		leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTimeout)
		defer cancel()
		if err != nil {
			// It may be enqueued all the same. Then it keeps its place; and if nobody can tell, it is found to be gone when it is called.
			if n, unknown := p.client.Exists(leave, "asynq:{"+call.task.queue+"}:t:"+call.task.id).Result(); unknown != nil || n > 0 {
				return err
			}
		}
		p.limiter.Leave(leave, placing.request.Policy, placing.request.Tenant, placing.request.Ticket) // or its hold runs out
	case enqueued && d.RetryIn > 0:
		placing.processAt = processAt
	case enqueued:
		// What it needs is held for it: like whoever is called, it must not stand behind all that is pending.
		p.lines.wakeOnce([]taskRef{call.task}) // or its hold runs out, and it is called again
	}
	return err
}

// plan takes the place, unless the task would start too late.
func (p *planner) plan(ctx context.Context, placing *placing, deadline, now time.Time) (throttle.Decision, error) {
	maxWait, left := placing.maxWait, deadline.Sub(now)
	if deadline.IsZero() {
		return p.limiter.Plan(ctx, placing.request, maxWait, placing.backlog)
	}
	if left <= 0 {
		return throttle.Decision{}, missed(placing.request.Policy, placing.request.Tenant, deadline, now)
	}
	if !p.mayBeSooner(placing.request.Policy) && (maxWait <= 0 || left < maxWait) {
		maxWait = max(left, time.Microsecond)
	}
	d, err := p.limiter.Plan(ctx, placing.request, maxWait, placing.backlog)
	var refused *throttle.RefusedError
	if errors.As(err, &refused) && refused.Backlog == 0 && maxWait != placing.maxWait {
		return d, &TooLateError{Deadline: deadline, Decision: refused.Decision, StartsAt: now.Add(refused.Decision.RetryIn)}
	}
	return d, err
}

// mayBeSooner says that the policy's promises are upper bounds: a deadline is not missed by them.
func (p *planner) mayBeSooner(policy string) bool {
	known, _ := p.limiter.Policy(policy)
	return slices.ContainsFunc(known.Windows, func(w throttle.Window) bool { return w.Algorithm == throttle.Concurrency })
}

func (p *planner) schedule(ctx context.Context, cmd *redis.Cmd, call enqueueCall, at, now time.Time) (enqueued bool, err error) {
	queue := "asynq:{" + call.task.queue + "}:"
	keys := []string{queue + "t:" + call.task.id, queue + "scheduled"}
	if call.lock != "" {
		keys = append(keys, call.lock)
	}
	// The lock of a unique task holds while it waits, and then as long as it was to.
	wait := int(at.Sub(now)/time.Second) + 1
	n, err := p.places.Run(ctx, p.client, keys, call.message, call.task.id, at.Unix(), wait, call.lockFor, rand.Text()).Int64()
	if err != nil {
		cmd.SetErr(err)
		return false, err
	}
	cmd.SetVal(n)
	return n == 1, nil
}

// An enqueueCall is what asynq's client enqueues at once.
type enqueueCall struct {
	task    taskRef
	lock    string // of a unique task
	lockFor int    // seconds
	message []byte
}

// enqueueOf recognises asynq's enqueue and enqueueUnique. TestCallsOfAsynq holds it to what the
// asynq in use does.
func enqueueOf(args []any) (enqueueCall, bool) {
	if len(args) < 3 || args[0] != "evalsha" && args[0] != "eval" {
		return enqueueCall{}, false
	}
	n, _ := args[2].(int)
	if len(args) != 3+n+n+1 {
		return enqueueCall{}, false
	}
	keys, rest := args[3:3+n], args[3+n:]
	switch n {
	case 2: // task, pending; message, ID, now
		if queue, ok := queueOf(keys, []string{"t:", "pending"}, rest[1]); ok {
			message, ok := rest[0].([]byte)
			return enqueueCall{task: taskRef{queue, fmt.Sprint(rest[1])}, message: message}, ok
		}
	case 3: // lock, task, pending; ID, seconds, message, now
		lock, _ := keys[0].(string)
		seconds, ok := rest[1].(int)
		message, isMessage := rest[2].([]byte)
		if queue, shaped := queueOf(keys[1:], []string{"t:", "pending"}, rest[0]); ok && isMessage && shaped && strings.Contains(lock, ":unique:") {
			return enqueueCall{taskRef{queue, fmt.Sprint(rest[0])}, lock, seconds, message}, true
		}
	}
	return enqueueCall{}, false
}
