package main

import (
	"bufio"
	"bytes"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// A wireCall is one command on its way to Redis.
type wireCall struct {
	kind string // what faults are drawn by: asynq's verb, or the name of the command
	task string // its ID, for enqueue and for the verbs that end an attempt
	fate fate
}

// Verbs of asynq that matter here. All that end an attempt are told by their keys, Sluice's
// requeue of a denied task as well.
const (
	dequeues     = "dequeue"
	enqueues     = "enqueue"
	finishes     = "finish"
	limiterCalls = "limiter" // Sluice's own
)

// handshake are commands of a new connection, which are left in peace.
var handshake = []string{"hello", "auth", "client", "select", "subscribe", "psubscribe", "ping"}

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
	ends := func(i int, suffix string) bool { return i < n && strings.HasSuffix(keys[i], suffix) }
	_, id, isTask := strings.Cut(keys[0], "}:t:")
	switch {
	case strings.HasPrefix(keys[0], "sluice:"):
		return wireCall{kind: limiterCalls}
	case ends(0, ":pending") && ends(1, ":paused"):
		return wireCall{kind: dequeues}
	case len(args) > 0 && (ends(0, ":active") && ends(1, ":lease") || ends(1, ":active") && ends(2, ":lease")):
		return wireCall{kind: finishes, task: args[0]}
	case isTask && (ends(1, ":pending") || ends(1, ":scheduled")):
		return wireCall{kind: enqueues, task: id}
	}
	return wireCall{kind: "script"}
}

// taskIn returns the ID of the task that the reply to a dequeue holds, if it holds one.
func taskIn(reply []byte) (id string, ok bool) {
	const fieldID = 3 // in asynq's internal/proto/asynq.proto
	text, ok := bulk(bufio.NewReader(bytes.NewReader(reply)))
	for message := []byte(text); ok && len(message) > 0; {
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

// A hold is one attempt as seen on the wire: from the reply to a worker's dequeue to the call
// that puts the task down.
type hold struct {
	At      time.Time
	Ended   time.Time // zero while it goes on
	EndedBy string
	Holder  string // which process of a worker
	Lost    bool   // the worker never got the reply
	Task    string
}

// A witness keeps what was seen on the wire of one stack.
type witness struct {
	mu     sync.Mutex
	faults map[fate]int
	holds  map[string][]*hold // by task
	killed map[string]bool    // processes
	again  map[string]bool    // tasks whose enqueue was repeated after a lost reply
	lost   map[string]int     // replies, by kind of call; of dequeues, those that held a task
}

func newWitness() *witness {
	return &witness{faults: map[fate]int{}, holds: map[string][]*hold{}, killed: map[string]bool{}, again: map[string]bool{}, lost: map[string]int{}}
}

func (w *witness) died(holder string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.killed[holder] = true
}

// saw notes a call and its reply, which its client has got or not.
func (w *witness) saw(call wireCall, reply []byte, holder string, delivered bool) {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	id, picked := "", false
	if call.kind == dequeues {
		id, picked = taskIn(reply)
	}
	if !delivered && (picked || call.kind != dequeues) {
		w.lost[call.kind]++
	}
	switch call.kind {
	case dequeues:
		if picked {
			w.holds[id] = append(w.holds[id], &hold{At: now, Holder: holder, Lost: !delivered, Task: id})
		}
	case enqueues:
		if !delivered && reply[0] == ':' {
			w.again[call.task] = true
		}
	case finishes:
		if len(reply) == 0 || reply[0] != '+' {
			return
		}
		open := slices.DeleteFunc(slices.Clone(w.holds[call.task]), func(h *hold) bool { return !h.Ended.IsZero() })
		for _, h := range open {
			h.Ended, h.EndedBy = now, holder
		}
	}
}

// excused are the attempts of a task that a fault ended: their worker was killed, or never knew.
// Each may cost a retry and a further run, with or without Sluice.
func (w *witness) excused(task string) []*hold {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(w.holds[task]), func(h *hold) bool {
		return !h.Lost && !(w.killed[h.Holder] && h.EndedBy != h.Holder)
	})
}

// orphans are tasks that are held by nobody who could put them down.
func (w *witness) orphans() (tasks []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for task, holds := range w.holds {
		if h := holds[len(holds)-1]; h.Ended.IsZero() && (h.Lost || w.killed[h.Holder]) {
			tasks = append(tasks, task)
		}
	}
	return tasks
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
