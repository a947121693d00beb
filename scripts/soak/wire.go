package main

import (
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// A wireCall is one command on its way to Redis.
type wireCall struct {
	kind  string   // what faults are drawn by: what it does to tasks, or the name of the command
	tasks []string // IDs, for enqueues and for what ends attempts
	call  string   // by which Sluice repeats it, or undoes it, if it gets no reply; "" if nobody does
	taken bool     // its tasks were taken from the line
	fate  fate
}

// Kinds of calls that matter here: asynq's own, and Sluice's in place of them.
const (
	dequeues     = "dequeue" // also Sluice's pick
	enqueues     = "enqueue"
	finishes     = "finish"  // all that ends an attempt, Sluice's requeue of a denied task as well
	restores     = "restore" // Sluice's, of tasks that no handler was found for
	limiterCalls = "limiter" // Sluice's own
	waiting      = "blpop"   // for a nudge
)

// handshake are commands of a new connection, which are left in peace.
var handshake = []string{"hello", "auth", "client", "select", "subscribe", "psubscribe", "ping"}

// scripts are those that matter, by the last parts of their keys, the first matching one counts.
// "t:" stands for a task's own key.
var scripts = []struct {
	keys []string
	call func(args []string) wireCall
}{
	{[]string{"pending", "paused", "active", "lease"}, func([]string) wireCall { return wireCall{kind: dequeues} }},
	{[]string{"", "pending", "paused", "active", "lease"}, func(args []string) wireCall { return wireCall{kind: dequeues, call: at(args, 3)} }},
	{[]string{"scheduled", "active", "lease", "paused"}, func(args []string) wireCall { return wireCall{kind: dequeues, call: at(args, 2), taken: true} }},
	{[]string{"active", "lease", "scheduled", "pending"}, func(args []string) wireCall {
		return wireCall{kind: restores, call: at(args, 1), tasks: args[min(4, len(args)):]}
	}},
	{[]string{"active", "lease"}, finish},
	{[]string{"t:", "active", "lease"}, finish},
	{[]string{"t:", "pending"}, nil}, // their task is in their key
	{[]string{"t:", "scheduled"}, nil},
	{[]string{"", "t:", "pending"}, nil}, // with a lock
	{[]string{"", "t:", "scheduled"}, nil},
}

func finish(args []string) wireCall {
	if len(args) == 0 {
		return wireCall{kind: "script"}
	}
	return wireCall{kind: finishes, tasks: args[:1]}
}

func at(words []string, i int) string {
	if i < len(words) {
		return words[i]
	}
	return ""
}

// callOf tells what a command is by its keys.
func callOf(words []string) wireCall {
	name := strings.ToLower(words[0])
	if name != "eval" && name != "evalsha" || len(words) < 4 {
		return wireCall{kind: name}
	}
	n, err := strconv.Atoi(words[2])
	if err != nil || n < 1 || len(words) < 3+n {
		return wireCall{kind: name}
	}
	keys, args := words[3:3+n], words[3+n:]
	if strings.HasPrefix(keys[0], "sluice:") {
		return wireCall{kind: limiterCalls}
	}
	for _, s := range scripts {
		if !match(keys, s.keys) {
			continue
		}
		if s.call != nil {
			return s.call(args)
		}
		_, id, _ := strings.Cut(keys[slices.Index(s.keys, "t:")], "}:t:")
		return wireCall{kind: enqueues, tasks: []string{id}}
	}
	const storedWith = 4 // values a task, behind three others
	if n == 1 && match(keys, []string{"scheduled"}) && len(args) >= 3+storedWith && (len(args)-3)%storedWith == 0 && strings.HasSuffix(args[0], "}:t:") {
		call := wireCall{kind: enqueues}
		for i := 3; i < len(args); i += storedWith {
			call.tasks = append(call.tasks, args[i])
		}
		return call
	}
	return wireCall{kind: "script"}
}

func match(keys, shape []string) bool {
	if len(keys) < len(shape) {
		return false
	}
	for i, suffix := range shape {
		if suffix == "t:" && !strings.Contains(keys[i], "}:t:") || suffix != "t:" && suffix != "" && !strings.HasSuffix(keys[i], "}:"+suffix) {
			return false
		}
	}
	return true
}

// tasksIn returns the IDs of the tasks whose messages are in the reply to a dequeue.
func tasksIn(reply []byte) (ids []string) {
	values, err := parts(reply)
	if err != nil {
		return nil
	}
	for _, value := range values {
		if message, ok := text(value); ok {
			if id, ok := idOf([]byte(message)); ok {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// idOf returns the ID of a task by its message.
func idOf(message []byte) (id string, ok bool) {
	const fieldID = 3 // in asynq's internal/proto/asynq.proto
	for len(message) > 0 {
		number, kind, size := protowire.ConsumeField(message)
		if size < 0 {
			return "", false
		}
		if number == fieldID && kind == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(message)
			id, _ := protowire.ConsumeBytes(message[tag:])
			return string(id), true
		}
		message = message[size:]
	}
	return "", false
}

// A take is a ticket that a worker got from the line, and was charged for.
type take struct {
	Granted time.Time // by the clock of Redis
	Holder  string
	Seen    time.Time
	Task    string
}

// takesIn returns what the reply to a call of the limiter took from the line, by the ID of the grant.
func takesIn(reply []byte) map[string]take {
	values, err := parts(reply)
	const first = 3 // behind two times and what the IDs begin with
	if err != nil || len(values) <= first+1 {
		return nil
	}
	base, ok := text(values[first-1])
	if !ok {
		return nil // it decides, and does not take
	}
	takes := map[string]take{}
	for i := first; i+1 < len(values); i++ {
		ticket, ok := text(values[i])
		if !ok {
			continue
		}
		// "ticket costs rank flow key tenant status", then when it was granted: take.lua in
		// throttle/internal/script/lua.
		fields := strings.Fields(ticket)
		granted, err := strconv.ParseInt(strings.TrimSpace(strings.TrimPrefix(string(values[i+1]), ":")), 10, 64)
		if err != nil || len(fields) != 7 || fields[6] != "1" {
			continue
		}
		id, ok := taskOf(fields[0])
		if !ok {
			continue
		}
		takes[base+"/"+strconv.Itoa(len(takes))] = take{Granted: time.UnixMicro(granted), Task: id}
	}
	return takes
}

// A hold is one attempt as seen on the wire: from the reply to a worker's dequeue to the call
// that puts the task down.
type hold struct {
	At      time.Time
	Call    string    // of Sluice, which repeats it or undoes it if it gets no reply
	Ended   time.Time // zero while it goes on
	EndedBy string
	Holder  string // which process of a worker
	Lost    bool   // the worker never got a reply
	Taken   bool   // from the line, and charged then
	Task    string
}

// A witness keeps what was seen on the wire of one stack.
type witness struct {
	mu     sync.Mutex
	faults map[fate]int
	holds  map[string][]*hold   // by task
	killed map[string]time.Time // processes
	again  map[string]bool      // tasks whose enqueue was repeated after a lost reply
	lost   map[string]int       // replies, by kind of call; of dequeues, those that held a task
	takes  map[string]take      // by the ID of the grant
}

func newWitness() *witness {
	return &witness{
		faults: map[fate]int{}, holds: map[string][]*hold{}, killed: map[string]time.Time{}, again: map[string]bool{}, lost: map[string]int{},
		takes: map[string]take{},
	}
}

func (w *witness) died(holder string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.killed[holder] = time.Now()
}

// saw notes a call and its reply, which its client has got or not.
func (w *witness) saw(call wireCall, reply []byte, holder string, delivered bool) {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
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
			w.pickedUp(hold{At: now, Call: call.call, Holder: holder, Lost: !delivered, Taken: call.taken, Task: id})
		}
	case enqueues:
		if !delivered && (reply[0] == ':' || reply[0] == '*') {
			for _, id := range call.tasks {
				w.again[id] = true
			}
		}
	case finishes:
		if reply[0] == '+' {
			w.putDown(call, holder, now)
		}
	case restores:
		if reply[0] == ':' {
			w.putDown(call, holder, now)
		}
	case limiterCalls:
		for id, t := range takesIn(reply) {
			if _, known := w.takes[id]; !known { // or else it is told again
				t.Holder, t.Seen = holder, now
				w.takes[id] = t
			}
		}
	}
}

// pickedUp notes an attempt, or that a call was repeated which began it. The lock is held.
func (w *witness) pickedUp(h hold) {
	for _, before := range w.holds[h.Task] {
		if h.Call != "" && before.Call == h.Call {
			before.Lost = before.Lost && h.Lost
			return
		}
	}
	w.holds[h.Task] = append(w.holds[h.Task], &h)
}

// putDown ends attempts: what a call gives back are those of that call alone. The lock is held.
func (w *witness) putDown(call wireCall, holder string, now time.Time) {
	for _, id := range call.tasks {
		for _, h := range w.holds[id] {
			if h.Ended.IsZero() && (call.call == "" || call.call == h.Call) {
				h.Ended, h.EndedBy = now, holder
			}
		}
	}
}

// isExcused reports whether a fault ended the attempt: its worker was killed, or never knew, and has no
// way to ask again. The lock is held.
func (w *witness) isExcused(h *hold) bool {
	return h.Lost && h.Call == "" || !w.killed[h.Holder].IsZero() && h.EndedBy != h.Holder
}

// excused are the attempts of a task that a fault ended. Each may cost a retry and a further run, with or
// without Sluice.
func (w *witness) excused(task string) []*hold {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(w.holds[task]), func(h *hold) bool { return !w.isExcused(h) })
}

// orphans are tasks that are held by nobody who could put them down.
func (w *witness) orphans() (tasks []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for task, holds := range w.holds {
		if h := holds[len(holds)-1]; h.Ended.IsZero() && w.isExcused(h) {
			tasks = append(tasks, task)
		}
	}
	return tasks
}

// killedTakes are what processes had taken not long before they were killed.
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

// story are all attempts of a task.
func (w *witness) story(task string) (holds []hold) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, h := range w.holds[task] {
		holds = append(holds, *h)
	}
	return holds
}

// pickUps is how many tasks Redis has handed out.
func (w *witness) pickUps() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, holds := range w.holds {
		n += len(holds)
	}
	return n
}
