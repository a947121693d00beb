package main

import (
	"slices"
	"sync"
	"time"
)

// An attempt is one pick-up of a task as seen on the wire: from the reply to a worker's dequeue to
// the call that puts the task down.
type attempt struct {
	At      time.Time
	Call    string    // the ID by which Sluice repeats or undoes it if it gets no reply; "" for asynq
	Ended   time.Time // zero while it goes on
	EndedBy string
	Holder  string // the worker's process
	Lost    bool   // the worker never got a reply
	Taken   bool   // from the line, which charged it
	Task    string
}

// A witness keeps what was seen on the wire of one stack.
type witness struct {
	mu         sync.Mutex
	faults     map[fate]int
	attempts   map[string][]*attempt // by task
	killed     map[string]time.Time  // processes
	reenqueued map[string]bool       // tasks whose enqueue was repeated after a lost reply
	lost       map[string]int        // replies, by kind of call; of dequeues, only replies with a task
	takes      map[string]take       // by the ID of the grant
}

func newWitness() *witness {
	return &witness{
		faults: map[fate]int{}, attempts: map[string][]*attempt{}, killed: map[string]time.Time{},
		reenqueued: map[string]bool{}, lost: map[string]int{}, takes: map[string]take{},
	}
}

// died notes that a process was killed.
func (w *witness) died(holder string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.killed[holder] = time.Now()
}

// saw notes a call and its reply, and whether deliver has delivered the reply. It notes no other call meanwhile, as a
// worker may put a task down as soon as it has the reply.
func (w *witness) saw(call wireCall, reply []byte, holder string, deliver func() bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now, delivered := time.Now(), deliver()
	var picked []string
	if call.kind == dequeues {
		picked = tasksIn(reply)
	}
	if !delivered && (len(picked) > 0 || call.kind != dequeues) {
		w.lost[call.kind]++
	}
	switch call.kind {
	case dequeues:
		for _, id := range picked {
			w.pickedUp(attempt{At: now, Call: call.call, Holder: holder, Lost: !delivered, Taken: call.taken, Task: id})
		}
	case enqueues:
		if !delivered && (reply[0] == ':' || reply[0] == '*') {
			for _, id := range call.tasks {
				w.reenqueued[id] = true
			}
		}
	case finishes:
		if reply[0] == '+' || reply[0] == ':' { // asynq's, or a requeue's
			w.putDown(call, holder, now)
		}
	case restores:
		if reply[0] == ':' {
			w.putDown(call, holder, now)
		}
	case limiterCalls:
		for id, t := range takesIn(reply) {
			if _, known := w.takes[id]; !known { // a repeated reply is no news
				t.Holder, t.Seen = holder, now
				w.takes[id] = t
			}
		}
	}
}

// pickedUp notes an attempt, or that the call that began it was repeated. The lock is held.
func (w *witness) pickedUp(a attempt) {
	for _, earlier := range w.attempts[a.Task] {
		if a.Call != "" && earlier.Call == a.Call {
			earlier.Lost = earlier.Lost && a.Lost
			return
		}
	}
	w.attempts[a.Task] = append(w.attempts[a.Task], &a)
}

// putDown ends the attempts that a call puts down. The lock is held.
func (w *witness) putDown(call wireCall, holder string, now time.Time) {
	for _, id := range call.tasks {
		for _, a := range w.attempts[id] {
			if a.Ended.IsZero() && (call.call == "" || call.call == a.Call) {
				a.Ended, a.EndedBy = now, holder
			}
		}
	}
}

// isExcused reports whether a fault ended the attempt: its worker was killed, or never got the
// reply and cannot ask again. The lock is held.
func (w *witness) isExcused(a *attempt) bool {
	return a.Lost && a.Call == "" || !w.killed[a.Holder].IsZero() && a.EndedBy != a.Holder
}

// excused returns the attempts of a task that a fault ended. Each may cost a retry and one more
// run, with or without Sluice.
func (w *witness) excused(task string) []*attempt {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(w.attempts[task]), func(a *attempt) bool { return !w.isExcused(a) })
}

// orphans returns the active tasks that no process will put down.
func (w *witness) orphans() (tasks []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for task, attempts := range w.attempts {
		if last := attempts[len(attempts)-1]; last.Ended.IsZero() && w.isExcused(last) {
			tasks = append(tasks, task)
		}
	}
	return tasks
}

// killedTakes returns what processes took shortly before they were killed.
func (w *witness) killedTakes() (takes []take) {
	const within = 3 * time.Second
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.takes {
		if killed := w.killed[t.Holder]; !killed.IsZero() && killed.Sub(t.Seen) < within {
			takes = append(takes, t)
		}
	}
	return takes
}

// attemptsOf returns all attempts of a task.
func (w *witness) attemptsOf(task string) (attempts []attempt) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range w.attempts[task] {
		attempts = append(attempts, *a)
	}
	return attempts
}

// pickUps returns how many pick-ups there were.
func (w *witness) pickUps() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, attempts := range w.attempts {
		n += len(attempts)
	}
	return n
}
