package worker

import (
	"context"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

const ForgetAfter = forgetAfter

func defaultRef(id string) asynqredis.Ref { return asynqredis.Ref{Queue: "default", ID: id} }

// Attempts counts the attempts that are remembered.
func (t *Adapter) Attempts() int {
	t.attempts.mu.Lock()
	defer t.attempts.mu.Unlock()
	return len(t.attempts.byTask)
}

// Attempt does what a dequeue of the task does, and if ctx is not nil, what the middleware does
// then.
func (t *Adapter) Attempt(id string, ctx context.Context) {
	t.attempts.begin(dispatch.Task{Ref: defaultRef(id)}, nil)
	if ctx != nil {
		t.attempts.enter(ctx, defaultRef(id))
	}
}

// EndOf returns what ends the attempt that the task is in now.
func (t *Adapter) EndOf(id string) func() {
	_, a := t.attempts.get(defaultRef(id))
	return func() { t.attempts.end(defaultRef(id), a) }
}

// Enter does what a dequeue of the task and the middleware do, and returns what the middleware does
// later that denies it.
func (t *Adapter) Enter(id string) (deny func()) {
	t.attempts.begin(dispatch.Task{Ref: defaultRef(id)}, nil)
	a := t.attempts.enter(context.Background(), defaultRef(id))
	return func() { t.attempts.deny(a, &throttle.DeniedError{}, "") }
}

// Denied reports whether the attempt that the task is in now is denied.
func (t *Adapter) Denied(id string) bool {
	a, _ := t.attempts.get(defaultRef(id))
	return a.denied != nil
}

func (s *Server) Adapter() *Adapter { return s.adapter }
