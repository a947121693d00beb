package worker

var (
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
	t.attempts.begin(taskRef{"default", id}, nil)
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
