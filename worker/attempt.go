package worker

import (
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
	// forgetAfter ends an attempt whose end was not seen: asynq makes no call for a task whose lease it lost.
	// By then this server's recoverer has found a denied task that could not be requeued.
	forgetAfter = time.Hour

	// lateFor is the time that asynq gives the middleware to fail a task whose deadline has passed.
	lateFor = time.Minute
)

// taskOf returns the task that asynq made the context for, or an empty Ref.
func taskOf(ctx context.Context) asynqredis.Ref {
	queue, _ := asynq.GetQueueName(ctx)
	id, _ := asynq.GetTaskID(ctx)
	return asynqredis.Ref{Queue: queue, ID: id}
}

// An attempt is one run of a task by this server, from asynq's dequeue to the call by which asynq
// ends it.
type attempt struct {
	dispatch.Task
	begun       time.Time
	releaseSlot func()                  // makes its slot free, once
	outcome     atomic.Pointer[outcome] // nil: asynq decides, but must not delete the task

	ctx     context.Context // of the handler; nil before the middleware
	task    *asynq.Task
	handler asynq.Handler
}

// An outcome replaces what asynq's call would do at the end of an attempt: the task waits, or is done.
type outcome struct {
	// waits requeues it: it was denied, or its time may run out while the limiter is asked.
	waits func(context.Context) error
	done  bool // its handler has returned no error, or has revoked it: only now it may be gone
}

// isWaiting reports whether the task is to wait if its attempt ends now.
func (a *attempt) isWaiting() bool {
	o := a.outcome.Load()
	return o != nil && !o.done
}

// isLate reports whether the deadline of a task had passed when it was picked up, and the task only
// waited: it fails once. A task that ran and failed is asynq's to fail, at every attempt.
func (s *Server) isLate(a *attempt) bool {
	deadline := a.Message.Deadline()
	if deadline.IsZero() || a.begun.Before(deadline) || a.Message.LastError() != "" && !a.Message.Denied() {
		return false
	}
	_, matched := s.limiter.Match(a.Message.Type(), true)
	return matched
}

// attempts holds the attempts under way, one per slot, and a few whose end was not seen.
type attempts struct {
	onEnd func() // is called once for each attempt, when its slot is free again

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
		before.releaseSlot()
	}
	begun := &attempt{Task: task, begun: now, releaseSlot: sync.OnceFunc(as.onEnd)}
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

// enter returns the attempt about which the middleware decides, nil if it has ended. The task may be picked up
// again meanwhile, as another attempt. The slot is free when ctx ends: asynq may make no call then.
func (as *attempts) enter(
	ctx context.Context, ref asynqredis.Ref, task *asynq.Task, handler asynq.Handler,
) *attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	a := as.byTask[ref]
	if a != nil {
		context.AfterFunc(ctx, a.releaseSlot)
		a.ctx, a.task, a.handler = ctx, task, handler
	}
	return a
}

// get returns the attempt of a task, or one that has just begun if none is known.
func (as *attempts) get(ref asynqredis.Ref) *attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	if a := as.byTask[ref]; a != nil {
		return a
	}
	return &attempt{Task: dispatch.Task{Ref: ref}, begun: time.Now(), releaseSlot: func() {}}
}

// end forgets the attempt, unless the task has been picked up again since, and frees its slot. It returns what
// was granted to it if it never got to the middleware, such as if the server's base context has ended.
func (as *attempts) end(a *attempt) (unused throttle.Reservation) {
	as.mu.Lock()
	defer as.mu.Unlock()
	a.releaseSlot()
	if as.byTask[a.Ref] == a {
		delete(as.byTask, a.Ref)
	}
	if a.ctx == nil && a.Verdict != nil {
		unused = a.Verdict.Decision.Reservation
	}
	return unused
}
