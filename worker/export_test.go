package worker

import (
	"context"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

const ForgetAfter = forgetAfter

func defaultRef(id string) asynqredis.Ref { return asynqredis.Ref{Queue: "default", ID: id} }

// Attempts counts the attempts that are remembered.
func (s *Server) Attempts() int {
	s.attempts.mu.Lock()
	defer s.attempts.mu.Unlock()
	return len(s.attempts.byTask)
}

// Attempt does what a dequeue of the task does, and if ctx is not nil, what the middleware does then.
func (s *Server) Attempt(id string, ctx context.Context) {
	s.attempts.begin(dispatch.Task{Ref: defaultRef(id)})
	if ctx != nil {
		s.attempts.enter(ctx, defaultRef(id), nil, nil)
	}
}

// OnFree has a function called, and not the dispatcher, when the slot of an attempt is free again.
func (s *Server) OnFree(free func()) { s.attempts.onEnd = free }

// EndOf returns what ends the attempt that the task is in now.
func (s *Server) EndOf(id string) func() {
	a := s.attempts.get(defaultRef(id))
	return func() { s.attempts.end(a) }
}

// AsynqConfig is the config of the asynq.Server that is made of c.
func (s *Server) AsynqConfig(c asynq.Config) asynq.Config { return s.asynqConfig(c) }

// Process is what asynq calls for a task, by the context that it makes.
func (s *Server) Process(ctx context.Context, task *asynq.Task, handler asynq.HandlerFunc) error {
	return s.middleware(handler).ProcessTask(ctx, task)
}

// Enter does what a dequeue of the task and the middleware do, and returns what later denies it.
func (s *Server) Enter(id string) (deny func()) {
	s.attempts.begin(dispatch.Task{Ref: defaultRef(id)})
	a := s.attempts.enter(context.Background(), defaultRef(id), nil, nil)
	return func() { a.outcome.Store(&outcome{requeue: func(context.Context) error { return nil }}) }
}

// Denied reports whether the attempt that the task is in now is denied.
func (s *Server) Denied(id string) bool {
	return s.attempts.get(defaultRef(id)).ending().requeue != nil
}
