package worker

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

const (
	// forgetAfter is the age at which an attempt without an ending call is forgotten: asynq makes none for a task
	// whose lease it lost. By then asynq's recoverer has found the task if it was denied and could not be requeued.
	forgetAfter = time.Hour

	// lateFor is how far ahead a late task's deadline is set, so that asynq calls the middleware, which fails it.
	lateFor = time.Minute
)

// taskOf returns the task that asynq made the context for, or an empty Ref.
func taskOf(ctx context.Context) asynqredis.Ref {
	queue, _ := asynq.GetQueueName(ctx)
	id, _ := asynq.GetTaskID(ctx)
	return asynqredis.Ref{Queue: queue, ID: id}
}

// An attempt is one run of a task by this server, from asynq's dequeue to the call by which asynq ends it.
type attempt struct {
	dispatch.Task
	begun       time.Time
	releaseSlot func()                               // frees its slot, at the first call
	asking      sync.Mutex                           // decide holds it until it has noted the limiter's answer
	grant       atomic.Pointer[throttle.Reservation] // until its handler uses it, or giveBack returns it
	outcome     atomic.Pointer[outcome]              // nil: none, see there
	counted     atomic.Bool                          // its handler used the grant
	released    context.Context                      // ends after the first try to release its leases; nil until the handler returns

	ctx     context.Context // of the handler; nil until the middleware is called
	task    *asynq.Task
	handler asynq.Handler
}

// An outcome is the fate of a task if its attempt ends now. Without an outcome asynq's call goes through, unless
// it would delete the task.
type outcome struct {
	// requeue requeues the task, instead of asynq's call: after a denial or a refusal, or if nothing was decided.
	requeue func(context.Context) error

	// done lets asynq delete the task. run sets it if the handler returns no error, middleware if the task is revoked.
	done bool
}

// isLate reports whether the middleware, instead of asynq, is to fail a task: its deadline had passed at pick-up, it
// has only waited, and a policy enforces limits or has denied it. If it ran and failed, asynq fails it.
func (s *Server) isLate(a *attempt) bool {
	deadline, hasFailed := a.Message.Deadline(), a.Message.LastError() != "" && !a.Message.Denied()
	if deadline.IsZero() || a.begun.Before(deadline) || hasFailed {
		return false
	}
	policy, matched := s.limiter.Match(a.Message.Type(), true)
	return matched && !policy.Observe || a.Message.Denied() // denied: perhaps for a call of its handler
}

func (a *attempt) isFromLine() bool { return a.Verdict != nil && a.Verdict.FromLine }

// ending returns the outcome. While the limiter is asked, it waits for the answer.
func (a *attempt) ending() outcome {
	a.asking.Lock()
	defer a.asking.Unlock()
	return *cmp.Or(a.outcome.Load(), &outcome{})
}

// attempts has the attempts under way, one per slot, and a few that no call has ended.
type attempts struct {
	onEnd func() // is called when an attempt frees its slot

	mu     sync.Mutex
	byTask map[asynqredis.Ref]*attempt
	swept  time.Time
}

// begin notes that a task was picked up, and frees the slot of an earlier attempt that no call has ended.
func (as *attempts) begin(task dispatch.Task) *attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	now := time.Now()
	if previous := as.byTask[task.Ref]; previous != nil {
		previous.releaseSlot()
	}
	begun := &attempt{Task: task, begun: now, releaseSlot: sync.OnceFunc(as.onEnd)}
	if task.Verdict != nil {
		begun.grant.Store(&task.Verdict.Decision.Reservation)
	}
	as.byTask[task.Ref] = begun
	if now.Sub(as.swept) >= time.Minute {
		as.swept = now
		for ref, a := range as.byTask {
			if runs := a.ctx != nil && a.ctx.Err() == nil; !runs && now.Sub(a.begun) > forgetAfter {
				a.releaseSlot()
				delete(as.byTask, ref)
			}
		}
	}
	return begun
}

// enter returns the attempt for the middleware, or nil if it has ended. It frees the slot when ctx ends, as asynq may
// make no call then. The task may then be picked up again, by another attempt.
func (as *attempts) enter(ctx context.Context, ref asynqredis.Ref, task *asynq.Task, handler asynq.Handler) *attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	a := as.byTask[ref]
	if a != nil {
		context.AfterFunc(ctx, a.releaseSlot)
		a.ctx, a.task, a.handler = ctx, task, handler
	}
	return a
}

// get returns the attempt of a task. If none is known, as after its server has died, it is empty.
func (as *attempts) get(ref asynqredis.Ref) *attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	if a := as.byTask[ref]; a != nil {
		return a
	}
	return &attempt{Task: dispatch.Task{Ref: ref}, begun: time.Now(), releaseSlot: func() {}}
}

func (as *attempts) end(a *attempt) {
	as.mu.Lock()
	defer as.mu.Unlock()
	a.releaseSlot()
	if as.byTask[a.Ref] == a { // the task was not picked up again
		delete(as.byTask, a.Ref)
	}
}
