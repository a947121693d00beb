package worker

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"time"

	"github.com/hibiken/asynq"
)

// forgetAfter is for how long an attempt is remembered whose end is not seen: asynq makes no
// call for a task whose lease it has lost. It is long enough for the recoverer of this server
// to find a denied task that could not be requeued.
const forgetAfter = time.Hour

// A taskRef names a task: IDs are unique per queue only.
type taskRef struct{ queue, id string }

// taskOf returns the task that asynq made the context for, or an empty taskRef.
func taskOf(ctx context.Context) taskRef {
	queue, _ := asynq.GetQueueName(ctx)
	id, _ := asynq.GetTaskID(ctx)
	return taskRef{queue, id}
}

// An attempt is one pick-up of a task by this server, from asynq's dequeue to the call by which
// asynq ends it.
type attempt struct {
	begun   time.Time
	denied  *DeniedError    // what the middleware said last, if that was a denial
	done    <-chan struct{} // of the handler's context; nil before the middleware
	message []byte          // the task as it was stored when it was picked up
	nonce   string          // identifies the denial to requeue.lua
}

func (a *attempt) running() bool {
	if a.done == nil {
		return false
	}
	select {
	case <-a.done:
		return false
	default:
		return true
	}
}

// attempts are those that go on, by task: as many as the server has workers, and a few whose
// end was not seen.
type attempts struct {
	mu     sync.Mutex
	byTask map[taskRef]*attempt
	swept  time.Time
}

func newAttempts() *attempts {
	return &attempts{byTask: map[taskRef]*attempt{}, swept: time.Now()}
}

// begin remembers a task that was picked up, and forgets its attempt before.
func (as *attempts) begin(ref taskRef, message []byte) {
	as.mu.Lock()
	defer as.mu.Unlock()
	now := time.Now()
	as.byTask[ref] = &attempt{begun: now, message: message}
	if now.Sub(as.swept) < time.Minute {
		return
	}
	as.swept = now
	for ref, a := range as.byTask {
		if !a.running() && now.Sub(a.begun) > forgetAfter {
			delete(as.byTask, ref)
		}
	}
}

// enter notes that the middleware decides about the task, anew if it was called before. It is
// false if the task was not picked up through our connection.
func (as *attempts) enter(ref taskRef, done <-chan struct{}) bool {
	as.mu.Lock()
	defer as.mu.Unlock()
	a := as.byTask[ref]
	if a == nil {
		return false
	}
	a.denied, a.done = nil, done
	return true
}

// deny notes the denial, and returns it.
func (as *attempts) deny(ref taskRef, denied *DeniedError) error {
	as.note(ref, denied)
	return denied
}

// allow takes a denial back.
func (as *attempts) allow(ref taskRef) { as.note(ref, nil) }

func (as *attempts) note(ref taskRef, denied *DeniedError) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if a := as.byTask[ref]; a != nil {
		a.denied, a.nonce = denied, rand.Text()
	}
}

// get returns a copy of the attempt as it is now, and the attempt itself for end.
func (as *attempts) get(ref taskRef) (attempt, *attempt) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if a := as.byTask[ref]; a != nil {
		return *a, a
	}
	return attempt{}, nil
}

// denial returns the task's denial, or nil.
func (as *attempts) denial(ref taskRef) *DeniedError {
	a, _ := as.get(ref)
	return a.denied
}

// denialNamed returns a denial whose reason the text contains, or nil.
func (as *attempts) denialNamed(text string) *DeniedError {
	as.mu.Lock()
	defer as.mu.Unlock()
	for _, a := range as.byTask {
		if a.denied != nil && strings.Contains(text, a.denied.Error()) {
			return a.denied
		}
	}
	return nil
}

// end forgets the attempt, unless the task has been picked up again since.
func (as *attempts) end(ref taskRef, a *attempt) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if as.byTask[ref] == a {
		delete(as.byTask, ref)
	}
}
