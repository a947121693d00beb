package asynqredis

import (
	"fmt"
	"strings"
	"time"
)

// The verbs of asynq's calls.
const (
	Dequeue  = "dequeue"
	Retry    = "retry"
	Archive  = "archive"
	Done     = "done"
	Complete = "complete"
	Requeue  = "requeue"
	Recover  = "recover" // it lists what has expired

	ForwardScheduled = "forward scheduled"
	ForwardRetry     = "forward retry"

	Other = "other" // a script that names a task and the active ones, and is none of these
)

// A Call is what asynq does to a task or a queue by one of its scripts.
type Call struct {
	Verb string // empty for anything else
	Ref
	Args []any // after the keys: for most verbs the task's ID, and its message
}

// shapes are the first keys of asynq's calls, without the prefix "asynq:{QUEUE}:". "t:" is the
// task's own key, whose ID is the first argument. TestCallsOfAsynq holds them to what the asynq in
// use does.
var shapes = []struct {
	verb string
	keys []string
}{
	{Recover, []string{"lease"}},
	{Dequeue, []string{"pending", "paused", "active", "lease"}},
	{Done, []string{"active", "lease", "t:"}},
	{ForwardScheduled, []string{"scheduled", "pending"}},
	{ForwardRetry, []string{"retry", "pending"}},
	{Retry, []string{"t:", "active", "lease", "retry"}},
	{Archive, []string{"t:", "active", "lease", "archived"}},
	{Complete, []string{"active", "lease", "completed", "t:"}},
	{Requeue, []string{"active", "lease", "pending", "t:"}},
}

// CallOf recognises a call of asynq's server by its command: EVALSHA, script, number of keys, keys,
// arguments.
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
	return otherCall(keys, rest)
}

// otherCall recognises a script, not one of ours, that may move an active task.
func otherCall(keys, rest []any) (call Call) {
	active := false
	for _, key := range keys {
		name, _ := key.(string)
		queue, name, _ := strings.Cut(strings.TrimPrefix(name, "asynq:{"), "}:")
		if id, ok := strings.CutPrefix(name, "t:"); ok {
			call = Call{Other, Ref{queue, id}, rest}
		}
		if strings.HasPrefix(name, "sluice:") {
			return Call{}
		}
		active = active || name == "active"
	}
	if !active {
		return Call{}
	}
	return call
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

// queueOf returns the queue whose keys these are, if they have the shape.
func queueOf(keys []any, shape []string, id string) (queue string, ok bool) {
	if len(keys) < len(shape) {
		return "", false
	}
	prefix := ""
	for i, suffix := range shape {
		key, _ := keys[i].(string)
		rest, ok := strings.CutSuffix(key, suffix)
		if suffix == "t:" {
			rest, ok = strings.CutSuffix(key, id)
			if ok {
				rest, ok = strings.CutSuffix(rest, suffix)
			}
		}
		if !ok || i > 0 && rest != prefix {
			return "", false
		}
		prefix = rest
	}
	queue, opened := strings.CutPrefix(prefix, "asynq:{")
	queue, closed := strings.CutSuffix(queue, "}:")
	return queue, opened && closed
}

// An EnqueueCall is a call by which asynq's client makes a task pending, or scheduled.
type EnqueueCall struct {
	Ref
	At       time.Time // when it is to be processed; zero: now, it becomes pending
	Line     string    // that the task joins
	Lock     string    // of a unique task
	LockFor  int       // seconds
	Message  Message
	argument *any // that is the message
}

// SetHeader sets a header of the task.
func (c *EnqueueCall) SetHeader(name, value string) {
	c.Message = c.Message.withHeader(name, value)
	*c.argument = []byte(c.Message)
}

// enqueues are the keys of asynq's enqueue, enqueueUnique, schedule and scheduleUnique, and which
// of their arguments are the ID, the message and the time. TestCallsOfAsynqsClient holds them to
// what the asynq in use does.
var enqueues = []struct {
	unique          bool // the lock is the first key, and its seconds are the second argument
	keys            []string
	id, message, at int
}{
	{false, []string{"t:", "pending"}, 1, 0, -1},
	{true, []string{"t:", "pending"}, 0, 2, -1},
	{false, []string{"t:", "scheduled"}, 2, 0, 1},
	{true, []string{"t:", "scheduled"}, 0, 3, 2},
}

// EnqueueOf recognises a call by which asynq's client enqueues a task.
func EnqueueOf(args []any) (call EnqueueCall, ok bool) {
	keys, rest, ok := scriptCall(args)
	unique := len(keys) == 3
	if !ok || len(keys) < 2 || len(keys) > 3 || len(rest) != len(keys)+1 {
		return EnqueueCall{}, false
	}
	if unique {
		call.Lock, _ = keys[0].(string)
		call.LockFor, _ = rest[1].(int)
		keys = keys[1:]
	}
	for _, shape := range enqueues {
		if unique != shape.unique {
			continue
		}
		id := fmt.Sprint(rest[shape.id])
		queue, shaped := queueOf(keys, shape.keys, id)
		message, isMessage := rest[shape.message].([]byte)
		if !shaped || !isMessage {
			continue
		}
		call.Ref, call.Message, call.argument = Ref{queue, id}, message, &rest[shape.message]
		if shape.at >= 0 {
			seconds, isTime := rest[shape.at].(int64)
			call.At = time.Unix(seconds, 0)
			return call, isTime
		}
		return call, true
	}
	return EnqueueCall{}, false
}
