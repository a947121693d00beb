package asynqredis

import (
	"slices"
	"strings"
	"time"
)

const (
	Dequeue          = "dequeue"
	Retry            = "retry"
	Archive          = "archive"
	Done             = "done"
	Complete         = "complete"
	Requeue          = "requeue"
	ForwardScheduled = "forward scheduled"
	ForwardRetry     = "forward retry"
	Other            = "other" // another script of asynq's on a task and the active list
)

// A Call is one call of asynq's scripts on a task or a queue.
type Call struct {
	Verb string // a constant such as Dequeue; empty if the command is no such call
	Ref
	Args []any // the arguments after the keys: for Retry and Archive they begin with the task's ID and its message
}

// shapes lists the first keys of asynq's calls, without the prefix "asynq:{QUEUE}:". "t:" stands for the key of the
// task whose ID is the first argument. TestCallsOfAsynq compares them with the asynq in use.
var shapes = []struct {
	verb string
	keys []string
}{
	{Dequeue, []string{"pending", "paused", "active", "lease"}},
	{Done, []string{"active", "lease", "t:"}},
	{ForwardScheduled, []string{"scheduled", "pending"}},
	{ForwardRetry, []string{"retry", "pending"}},
	{Retry, []string{"t:", "active", "lease", "retry"}},
	{Archive, []string{"t:", "active", "lease", "archived"}},
	{Complete, []string{"active", "lease", "completed", "t:"}},
	{Requeue, []string{"active", "lease", "pending", "t:"}},
}

// CallOf recognises a call of asynq's server by its command: EVALSHA, script, number of keys, keys, arguments.
func CallOf(args []any) Call {
	keys, rest, ok := scriptCall(args)
	if !ok {
		return Call{}
	}
	id, _ := rest[0].(string)
	for _, shape := range shapes {
		if queue, ok := queueOf(keys, shape.keys, id); ok {
			return Call{shape.verb, Ref{queue, id}, rest}
		}
	}
	for _, key := range keys {
		name, _ := key.(string)
		queue, id, ok := strings.Cut(strings.TrimPrefix(name, "asynq:{"), "}:t:")
		has := func(name string) bool { return slices.Contains(keys, any(prefix(queue)+name)) }
		if ok && has("active") && !has(lines) { // our own scripts on a task have the key `lines`, too
			return Call{Other, Ref{queue, id}, rest}
		}
	}
	return Call{}
}

func scriptCall(args []any) (keys, rest []any, ok bool) {
	if len(args) < 3 || args[0] != "evalsha" && args[0] != "eval" {
		return nil, nil, false
	}
	n, _ := args[2].(int)
	if n < 1 || len(args) <= 3+n {
		return nil, nil, false
	}
	return args[3 : 3+n], args[3+n:], true
}

// queueOf returns the queue of a call whose first keys have the shape.
func queueOf(all []any, shape []string, id string) (queue string, ok bool) {
	names := slices.Clone(shape)
	if i := slices.Index(names, "t:"); i >= 0 {
		names[i] += id
	}
	first, _ := all[0].(string)
	queue, opened := strings.CutPrefix(first, "asynq:{")
	queue, closed := strings.CutSuffix(queue, "}:"+names[0])
	if !opened || !closed || len(all) < len(names) {
		return "", false
	}
	return queue, slices.EqualFunc(keys(queue, names...), all[:len(names)], func(want string, key any) bool { return key == want })
}

// An EnqueueCall is a call of asynq's client that makes a task pending or scheduled.
type EnqueueCall struct {
	Ref
	At       time.Time // when the task is to start; zero: at once, it becomes pending
	Lock     string    // the key of a unique task's lock
	LockFor  int       // seconds
	Message  Message
	argument *any // the message among the call's arguments
}

// SetHeader sets a header of the task. Of two headers of one name the last counts.
func (c *EnqueueCall) SetHeader(name, value string) {
	entry := slices.Concat(textOf(1, name).whole, textOf(2, value).whole)
	c.Message = slices.Concat(c.Message, textOf(fieldHeaders, string(entry)).whole)
	*c.argument = []byte(c.Message)
}

// EnqueueOf recognises a call by which asynq's client enqueues a task: its enqueue, enqueueUnique,
// schedule or scheduleUnique. Its arguments are told apart by their types: the message, a time, and the seconds of
// a lock. TestCallsOfAsynqsClient compares this with the asynq in use.
func EnqueueOf(args []any) (call EnqueueCall, ok bool) {
	keys, rest, ok := scriptCall(args)
	if !ok {
		return EnqueueCall{}, false
	}
	for i, arg := range rest {
		switch arg := arg.(type) {
		case []byte:
			call.Message, call.argument = arg, &rest[i]
		case int64:
			call.At = time.Unix(arg, 0)
		case int:
			call.LockFor = arg
		}
	}
	if call.Lock = call.Message.UniqueKey(); call.Lock != "" && keys[0] == call.Lock {
		keys = keys[1:]
	}
	call.ID = call.Message.ID()
	if len(keys) != 2 || call.ID == "" {
		return EnqueueCall{}, false
	}
	if call.Queue, ok = queueOf(keys, []string{"t:", "scheduled"}, call.ID); !ok {
		call.Queue, ok = queueOf(keys, []string{"t:", "pending"}, call.ID)
		call.At = time.Time{} // the argument was when the call was made
	}
	return call, ok
}
