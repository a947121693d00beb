package worker

import (
	"context"
	"crypto/rand"
	"errors"
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
	late    *TooLateError   // why it was not to run at all, if its deadline had passed when it was picked up
	message []byte          // the task as it was stored when it was picked up
	nonce   string          // identifies the denial to requeue.lua
	told    string          // the error that asynq told the ErrorHandler
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
func (as *attempts) begin(ref taskRef, message []byte, late *TooLateError) {
	as.mu.Lock()
	defer as.mu.Unlock()
	now := time.Now()
	as.byTask[ref] = &attempt{begun: now, late: late, message: message}
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

// enter notes that the middleware decides about the task, anew if it was called before. What it
// decides is noted with the attempt that is returned, as the task may have been picked up again by
// then. That is nil if the task was not picked up through our connection.
func (as *attempts) enter(ref taskRef, done <-chan struct{}) *attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	a := as.byTask[ref]
	if a != nil {
		a.denied, a.done = nil, done
	}
	return a
}

// deny notes the denial, and returns it.
func (as *attempts) deny(a *attempt, denied *DeniedError) error {
	as.note(a, denied)
	return denied
}

// allow takes a denial back.
func (as *attempts) allow(a *attempt) { as.note(a, nil) }

func (as *attempts) note(a *attempt, denied *DeniedError) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if a != nil {
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

// tell notes the error that asynq tells the ErrorHandler of a task, and returns the attempt as
// it is now. Asynq's next questions are about that error, and do not say which task it is of.
func (as *attempts) tell(ref taskRef, err error) attempt {
	as.mu.Lock()
	defer as.mu.Unlock()
	a := as.byTask[ref]
	if a == nil {
		return attempt{}
	}
	a.told = err.Error()
	return *a
}

// denialTold returns the denial of which asynq told the ErrorHandler by this error, whatever some
// middleware made of it, or nil. It is nil also if a task fails by the same text just now.
func (as *attempts) denialTold(err error) *DeniedError {
	if errors.Is(err, asynq.ErrLeaseExpired) { // asynq's recoverer says it of tasks that nobody told of
		return nil
	}
	as.mu.Lock()
	defer as.mu.Unlock()
	var denied *DeniedError
	text := err.Error()
	for _, a := range as.byTask {
		switch {
		case a.told != text || text == "":
		case a.denied == nil:
			return nil
		default:
			denied = a.denied
		}
	}
	return denied
}

// end forgets the attempt, unless the task has been picked up again since.
func (as *attempts) end(ref taskRef, a *attempt) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if as.byTask[ref] == a {
		delete(as.byTask, ref)
	}
}
