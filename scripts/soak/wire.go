package main

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// A wireCall is one command on its way to Redis.
type wireCall struct {
	kind  string   // faults are drawn by kind: what it does to tasks, or the name of the command
	tasks []string // IDs, for enqueues and for what ends attempts
	call  string   // the ID by which Sluice repeats or undoes it if it gets no reply; "" for asynq
	taken bool     // its tasks were taken from the line
	fate  fate
}

// The kinds of calls that matter here: asynq's own, and Sluice's in their place.
const (
	dequeues     = "dequeue" // also Sluice's pick
	enqueues     = "enqueue"
	finishes     = "finish"  // whatever ends an attempt, with Sluice's requeue of a denied task
	restores     = "restore" // Sluice's, of tasks for which no handler slot was free
	limiterCalls = "limiter" // Sluice's own
	waiting      = "blpop"   // for a nudge
)

// handshake lists the commands of a new connection. They meet no faults.
var handshake = []string{"hello", "auth", "client", "select", "subscribe", "psubscribe", "ping"}

// scripts describes the scripts that matter by the last parts of their keys. The first match
// counts. "t:" stands for a task's own key.
var scripts = []struct {
	keys []string
	call func(args []string) wireCall
}{
	{[]string{"pending", "paused", "active", "lease"}, func([]string) wireCall { return wireCall{kind: dequeues} }},
	{[]string{"", "sluice:lines", "pending", "paused", "active", "scheduled", "lease"}, func(args []string) wireCall {
		return wireCall{kind: dequeues, call: wordAt(args, 3)}
	}},
	{[]string{"scheduled", "active", "lease", "paused"}, func(args []string) wireCall {
		return wireCall{kind: dequeues, call: wordAt(args, 2), taken: true}
	}},
	{[]string{"active", "lease", "scheduled", "pending", "sluice:lines", "t:"}, func(args []string) wireCall {
		call := wireCall{kind: restores, call: wordAt(args, 1), tasks: args[:min(1, len(args))]}
		if wordAt(args, 6) != "" { // the message of a task that was denied
			call.kind, call.call = finishes, ""
		}
		return call
	}},
	{[]string{"active", "lease"}, finish},
	{[]string{"t:", "active", "lease"}, finish},
	{[]string{"t:", "pending"}, nil}, // an enqueue: its key has the task's ID
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

func wordAt(words []string, i int) string {
	if i < len(words) {
		return words[i]
	}
	return ""
}

// callOf returns what a command is, by its keys.
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
	if match(keys, []string{"scheduled", "sluice:lines"}) { // store: five values a task
		call := wireCall{kind: enqueues}
		for i := 4; i < len(args); i += 5 {
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
		fits := suffix == "" || strings.HasSuffix(keys[i], "}:"+suffix)
		if suffix == "t:" {
			fits = strings.Contains(keys[i], "}:t:")
		}
		if !fits {
			return false
		}
	}
	return true
}

// tasksIn returns the IDs of the tasks whose messages are in the reply to a dequeue, or in its lists.
func tasksIn(reply []byte) (ids []string) {
	values, err := parts(reply)
	if err != nil {
		return nil
	}
	for _, value := range values {
		if len(value) > 0 && value[0] == '*' {
			ids = append(ids, tasksIn(value)...)
		} else if message, ok := text(value); ok {
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

// A take is a ticket that a worker took from the line. Its units were charged then.
type take struct {
	Granted time.Time // by the clock of Redis
	Holder  string
	Seen    time.Time
	Task    string
}

// takesIn returns what a call of the limiter took from the line, by the ID of the grant. The reply
// is that of take.lua; replies to other scripts have no takes.
func takesIn(reply []byte) map[string]take {
	values, err := parts(reply)
	const first = 3 // after two times and what the IDs begin with
	if err != nil || len(values) <= first+1 {
		return nil
	}
	base, ok := text(values[first-1])
	if !ok {
		return nil // another script's
	}
	takes := map[string]take{}
	for i := first; i+1 < len(values); i++ {
		ticket, ok := text(values[i])
		if !ok {
			continue
		}
		// "ticket RECORD tenant status", six words, then when it was granted: take.lua in
		// throttle/internal/script/lua.
		fields := strings.Fields(ticket)
		granted, err := strconv.ParseInt(strings.TrimSpace(strings.TrimPrefix(string(values[i+1]), ":")), 10, 64)
		if err != nil || len(fields) != 6 || fields[5] != "granted" {
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
