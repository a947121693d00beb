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

	ForwardScheduled = "forward scheduled"
	ForwardRetry     = "forward retry"
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
	return Call{}
}

// IsGoodbye reports whether a command is one of the last of a server that shuts down. No handler
// runs then.
func IsGoodbye(args []any) bool {
	return len(args) > 1 && args[0] == "zrem" && args[1] == "asynq:servers"
}

func scriptCall(args []any) (keys, rest []any, ok bool) {
	if len(args) < 3 || args[0] != "evalsha" && args[0] != "eval" {
		return nil, nil, false
	}
	n, _ := args[2].(int)
	if n < 2 || len(args) <= 3+n {
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

// An EnqueueCall is a call by which asynq's client makes a task pending.
type EnqueueCall struct {
	Ref
	Lock    string // of a unique task
	LockFor int    // seconds
	messageOf
}

// A messageOf is the message in a call.
type messageOf struct {
	Message  Message
	argument *any // that is the message
}

// SetHeader sets a header of the task.
func (c *messageOf) SetHeader(name, value string) {
	c.Message = c.Message.withHeader(name, value)
	*c.argument = []byte(c.Message)
}

// EnqueueOf recognises asynq's enqueue and enqueueUnique. TestCallsOfAsynqsClient holds it to what
// the asynq in use does.
func EnqueueOf(args []any) (EnqueueCall, bool) {
	keys, rest, ok := scriptCall(args)
	if !ok || len(rest) != len(keys)+1 {
		return EnqueueCall{}, false
	}
	switch len(keys) {
	case 2: // task, pending; message, ID, now
		id := fmt.Sprint(rest[1])
		if queue, ok := queueOf(keys, []string{"t:", "pending"}, id); ok {
			message, ok := rest[0].([]byte)
			return EnqueueCall{Ref: Ref{queue, id}, messageOf: messageOf{message, &rest[0]}}, ok
		}
	case 3: // lock, task, pending; ID, seconds, message, now
		id := fmt.Sprint(rest[0])
		lock, _ := keys[0].(string)
		seconds, ok := rest[1].(int)
		message, isMessage := rest[2].([]byte)
		if queue, shaped := queueOf(keys[1:], []string{"t:", "pending"}, id); ok && isMessage && shaped && strings.Contains(lock, ":unique:") {
			return EnqueueCall{Ref{queue, id}, lock, seconds, messageOf{message, &rest[2]}}, true
		}
	}
	return EnqueueCall{}, false
}

// A ScheduleCall is a call by which asynq's client makes a task scheduled.
type ScheduleCall struct {
	At time.Time // when it is to be processed
	messageOf
}

// ScheduleOf recognises asynq's schedule and scheduleUnique. TestCallsOfAsynqsClient holds it to
// what the asynq in use does.
func ScheduleOf(args []any) (ScheduleCall, bool) {
	keys, rest, ok := scriptCall(args)
	if !ok || len(rest) != len(keys)+1 {
		return ScheduleCall{}, false
	}
	var score any
	var argument *any
	switch len(keys) {
	case 2: // task, scheduled; message, time, ID
		_, ok = queueOf(keys, []string{"t:", "scheduled"}, fmt.Sprint(rest[2]))
		argument, score = &rest[0], rest[1]
	case 3: // lock, task, scheduled; ID, seconds, time, message
		_, ok = queueOf(keys[1:], []string{"t:", "scheduled"}, fmt.Sprint(rest[0]))
		argument, score = &rest[3], rest[2]
	default:
		return ScheduleCall{}, false
	}
	seconds, isTime := score.(int64)
	message, isMessage := (*argument).([]byte)
	if !ok || !isTime || !isMessage {
		return ScheduleCall{}, false
	}
	return ScheduleCall{time.Unix(seconds, 0), messageOf{message, argument}}, true
}
