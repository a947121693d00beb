package asynqredis

import (
	"context"
	"errors"
	"time"
)

type Pick struct {
	Message Message // nil if it was not picked
	Paused  bool    // whether that is because its queue is paused, and the task could be picked otherwise
}

// Pick makes waiting tasks of one queue active. `call` is the call's key: repeat the call with the same key
// and tasks until it is answered, or put the tasks back by Restore.
func (c *Client) Pick(ctx context.Context, queue, call string, tasks []WaitingTask) ([]Pick, error) {
	first := []any{prefix(queue) + "t:", time.Now().Add(LeaseFor).Unix(), call}
	all := keys(queue, "scheduled", "active", "lease", "paused")
	answers, err := forTasks[any](ctx, c, "pick", queue, all, first, tasks, func(args []any, task WaitingTask) []any {
		return append(args, task.ID, task.JoinKey)
	})
	picks := make([]Pick, len(answers))
	for i, answer := range answers {
		picks[i].Paused = answer == int64(1)
		if message, ok := answer.(string); ok {
			picks[i].Message = Message(message)
		}
	}
	return picks, err
}

type DequeueReply struct {
	Messages  []Message
	Paused    bool
	Unwatched []any // lines that nobody watched: this server is to ask them
}

// DequeuePending makes up to n pending tasks of one queue active. `call` is its key, as with
// Pick. watched are lines that this server goes on asking, as tasks of this or another of its queues wait there.
func (c *Client) DequeuePending(ctx context.Context, queue, call string, n int, watched ...any) (d DequeueReply, err error) {
	all := keys(queue, "sluice:dequeued:"+c.process, lines, "pending", "paused", "active", "scheduled", "lease")
	args := append([]any{prefix(queue) + "t:", time.Now().Add(LeaseFor).Unix(), n, call}, watched...)
	reply, err := c.run(ctx, "dequeue", queue, all, args...).Slice()
	if err != nil || len(reply) < 3 {
		return d, err
	}
	d.Paused = reply[0] == int64(1)
	d.Unwatched, _ = reply[1].([]any)
	messages, _ := reply[2].([]any)
	for _, message := range messages {
		text, _ := message.(string)
		d.Messages = append(d.Messages, Message(text))
	}
	return d, nil
}

// RestoreOptions say how a task that a call made active goes back to wait.
type RestoreOptions struct {
	Ref
	CallKey string    // of the call that made it active
	At      time.Time // when forward finds it; zero: it becomes pending
	Mark    string    // of its join, "" if it waits in no line; or FrontMark, or KeptMark
	Line    string    // in which it waits, or ""
	Message Message   // stored instead of its own if not empty
}

// Restore puts back a task that a call of Pick or DequeuePending made active. It reports whether the task is due now,
// to join its line once more. The error is IsNotFound if the task is not active, or not by that call: it stays as it is.
func (c *Client) Restore(ctx context.Context, r RestoreOptions) (due bool, err error) {
	args := []any{r.ID, r.CallKey, "", time.Now().Unix(), r.Mark, r.Line, []byte(r.Message)}
	if !r.At.IsZero() {
		args[2] = score(r.At)
	}
	all := keys(r.Queue, "active", "lease", "scheduled", "pending", lines, "t:"+r.ID)
	n, err := c.run(ctx, "restore", r.Queue, all, args...).Int()
	if err == nil && n == 0 {
		err = errors.New("NOT FOUND")
	}
	return n == 2, err
}

const NoteStart = true // for CheckActive

// CheckActive reports whether a task is still active by a call. If so, with NoteStart, it notes that the task may start
// from now on. Recover uses the same note for a task that goes back.
func (c *Client) CheckActive(ctx context.Context, task Ref, call string, noteStart bool) (bool, error) {
	return c.run(ctx, "start", task.Queue, keys(task.Queue, "t:"+task.ID), call, noteStart).Bool()
}

func (c *Client) IsPaused(ctx context.Context, queue string) (bool, error) {
	n, err := c.redis.Exists(ctx, prefix(queue)+"paused").Result()
	return n > 0, err
}
