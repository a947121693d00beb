package worker

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// forgetAfter is when an attempt is forgotten whose end was not seen: asynq makes no call for a
// task whose lease it has lost. By then the recoverer of this server has found a denied task that
// could not be requeued.
const forgetAfter = time.Hour

// taskOf returns the task that asynq made the context for, or an empty Ref.
func taskOf(ctx context.Context) asynqredis.Ref {
	queue, _ := asynq.GetQueueName(ctx)
	id, _ := asynq.GetTaskID(ctx)
	return asynqredis.Ref{Queue: queue, ID: id}
}

// An attempt is one run of a task by this server, from asynq's dequeue to the call by which asynq
// ends it.
type attempt struct {
	asynqredis.Ref
	begun   time.Time
	call    string             // by which it is active
	free    func()             // frees its slot, once
	grant   *dispatch.Grant    // what was decided before it was handed out; nil: nothing
	message asynqredis.Message // the task as it was stored when it was picked up

	ctx     context.Context // of the handler; nil before the middleware
	task    *asynq.Task
	handler asynq.Handler
	done    bool // its handler has returned no error, or has revoked it: only now it may be gone

	// Set while the task waits, whatever asynq's call would do. They are set, too, while the limiter
	// decides: if the task's time runs out meanwhile, the task waits.
	denied *throttle.DeniedError
	mark   string // of its join; "" if it waits in no line
}

func (a *attempt) running() bool { return a.ctx != nil && a.ctx.Err() == nil }

// attempts holds the attempts under way, one per slot of the server, and a few whose end was not
// seen.
type attempts struct {
	free func() // is called once for each attempt, when its slot is free again

	mu     sync.Mutex
	byTask map[asynqredis.Ref]*attempt
	swept  time.Time
}

// begin notes that a task was picked up, and forgets its attempt before.
func (as *attempts) begin(task dispatch.Task) *attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	now := time.Now()
	if before := as.byTask[task.Ref]; before != nil {
		before.free()
	}
	begun := &attempt{
		Ref: task.Ref, begun: now, call: task.Call, free: sync.OnceFunc(as.free),
		grant: task.Grant, message: task.Message,
	}
	as.byTask[task.Ref] = begun
	if now.Sub(as.swept) >= time.Minute {
		as.swept = now
		for ref, a := range as.byTask {
			if !a.running() && now.Sub(a.begun) > forgetAfter {
				a.free()
				delete(as.byTask, ref)
			}
		}
	}
	return begun
}

// enter notes that the middleware decides about a task. The decision is noted with the attempt that is
// returned, as the task may have been picked up again by then. It is nil if the attempt has ended. Its slot
// is free when the context ends, as asynq may make no call then.
func (as *attempts) enter(
	ctx context.Context, ref asynqredis.Ref, task *asynq.Task, handler asynq.Handler,
) *attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	a := as.byTask[ref]
	if a != nil {
		context.AfterFunc(ctx, a.free)
		a.ctx, a.task, a.handler = ctx, task, handler
	}
	return a
}

// note notes why the task waits, and the mark by which it does in line; nil if it runs, or fails.
func (as *attempts) note(a *attempt, denied *throttle.DeniedError, mark string) {
	as.mu.Lock()
	defer as.mu.Unlock()
	a.denied, a.mark = denied, mark
}

// returned notes what asynq is told of a task, unless it waits.
func (as *attempts) returned(a *attempt, err error) {
	as.mu.Lock()
	defer as.mu.Unlock()
	a.done = a.denied == nil && (err == nil || errors.Is(err, asynq.RevokeTask))
}

// refused notes that the upstream refused a call of the task. It returns when it did so first since
// the task last failed by something else.
func (as *attempts) refused(a *attempt, now time.Time) time.Time {
	as.mu.Lock()
	defer as.mu.Unlock()
	a.message = a.message.WithRefusal(now)
	return a.message.RefusedSince()
}

// get returns a copy of the attempt as it is now, and the attempt itself for end. Without an attempt both are
// empty.
func (as *attempts) get(ref asynqredis.Ref) (attempt, *attempt) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if a := as.byTask[ref]; a != nil {
		return *a, a
	}
	none := attempt{free: func() {}}
	return none, &none
}

// end forgets the attempt, unless the task has been picked up again since, and frees its slot.
func (as *attempts) end(ref asynqredis.Ref, a *attempt) {
	as.mu.Lock()
	defer as.mu.Unlock()
	a.free()
	if as.byTask[ref] == a {
		delete(as.byTask, ref)
	}
}
