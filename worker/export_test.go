package worker

var (
	MessageText  = messageText
	TaskOfTicket = func(ticket string) (queue, id string, ok bool) {
		ref, ok := taskOfTicket(ticket)
		return ref.queue, ref.id, ok
	}
	TicketOf    = func(queue, id string) string { return taskRef{queue, id}.ticket() }
	WholeSecond = wholeSecond
	WithError   = withError
)

const ForgetAfter = forgetAfter

// Attempts counts the attempts that are remembered.
func (t *Throttle) Attempts() int {
	t.attempts.mu.Lock()
	defer t.attempts.mu.Unlock()
	return len(t.attempts.byTask)
}

// Attempt does what a dequeue of the task does, and if done is not nil, what the middleware
// does then.
func (t *Throttle) Attempt(id string, done <-chan struct{}) {
	t.attempts.begin(taskRef{"default", id}, nil, nil)
	if done != nil {
		t.attempts.enter(taskRef{"default", id}, done)
	}
}

// EndOf returns what ends the attempt that the task is in now.
func (t *Throttle) EndOf(id string) func() {
	ref := taskRef{"default", id}
	_, a := t.attempts.get(ref)
	return func() { t.attempts.end(ref, a) }
}

// Enter does what a dequeue of the task and the middleware do, and returns what the middleware does
// later that denies it.
func (t *Throttle) Enter(id string) (deny func()) {
	ref := taskRef{"default", id}
	t.attempts.begin(ref, nil, nil)
	a := t.attempts.enter(ref, make(chan struct{}))
	return func() { t.attempts.deny(a, &DeniedError{}) }
}

// Denied reports whether the attempt that the task is in now is denied.
func (t *Throttle) Denied(id string) bool {
	a, _ := t.attempts.get(taskRef{"default", id})
	return a.denied != nil
}

func (s *Server) Throttle() *Throttle { return s.throttle }
