package asynqredis

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// A Result is the outcome of storing one task.
type Result int64

const (
	Stored    Result = 1
	IDTaken   Result = 0
	LockTaken Result = -1
)

// Mark returns what a task's hash keeps of its join: the join key, the time, and the call.
func Mark(joinKey string, at time.Time, call string) string {
	return joinKey + "." + strconv.FormatInt(at.Unix(), 36) + "." + call
}

// FrontMark is the mark of a task that is to join at the front, as it has had its turn.
const FrontMark = "front"

// JoinedAt returns when the task joined, by its mark, or the zero time.
func JoinedAt(mark string) time.Time {
	if len(mark) <= joinKeyBytes+1 {
		return time.Time{}
	}
	text := mark[joinKeyBytes+1:]
	for i := range text {
		if text[i] == '.' {
			text = text[:i]
			break
		}
	}
	seconds, err := strconv.ParseInt(text, 36, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(seconds, 0)
}

// Store stores tasks of one queue as scheduled, ready to be picked. At the given time forward looks
// at those that are still there. It returns a result for each task, in order.
func (c *Client) Store(ctx context.Context, queue string, tasks []EnqueueCall, at time.Time) ([]Result, error) {
	results := make([]Result, 0, len(tasks))
	now, call := time.Now(), c.Call()
	keys := []string{prefix(queue) + "scheduled"}
	if m, ok := ctx.Value(membersKey{}).(Members); ok {
		keys = append(keys, m.Firing.key(), m.Firing.key()+":stored")
	}
	for i := 0; i < len(tasks); i += maxBatch {
		some := tasks[i:min(i+maxBatch, len(tasks))]
		args := make([]any, 0, 3+4*len(some))
		args = append(args, prefix(queue)+"t:", score(at), until(at))
		for j, task := range some {
			lock := ""
			if task.Lock != "" {
				lock = strconv.Itoa(task.LockFor) + ":" + task.Lock
			}
			args = append(args, task.ID, []byte(task.Message), Mark(task.Message.JoinKey(), now, call+"."+strconv.Itoa(i+j)), lock)
		}
		reply, err := c.run(ctx, storeScript, queue, slices.Clone(keys), args...).Int64Slice()
		if err != nil {
			return results, err
		}
		if len(reply) != len(some) {
			return results, fmt.Errorf("%w: store of %d tasks: %v", errReply, len(some), reply)
		}
		for _, n := range reply {
			results = append(results, Result(n))
		}
	}
	return results, nil
}

// A Waiting names a task that is scheduled and can be picked by its join key.
type Waiting struct{ ID, JoinKey string }

// Unstore removes tasks of one queue that were refused a place in line.
func (c *Client) Unstore(ctx context.Context, queue string, tasks []Waiting) error {
	return inBatches(tasks, func(batch []Waiting) error {
		args := []any{prefix(queue) + "t:"}
		for _, task := range batch {
			args = append(args, task.ID, task.JoinKey)
		}
		return c.run(ctx, unstoreScript, queue, []string{prefix(queue) + "scheduled"}, args...).Err()
	})
}

// Activate makes stored tasks of one queue pending, as asynq enqueues them.
func (c *Client) Activate(ctx context.Context, queue string, tasks []Waiting) error {
	return inBatches(tasks, func(batch []Waiting) error {
		args := []any{prefix(queue) + "t:", time.Now().UnixNano()}
		for _, task := range batch {
			args = append(args, task.ID, task.JoinKey)
		}
		return c.run(ctx, activateScript, queue, []string{prefix(queue) + "pending", prefix(queue) + "scheduled"}, args...).Err()
	})
}

// A Rescored is a stored task, and when forward looks at it. With a Reason, its Message is stored
// again with that as its last error, which asynq's tools show.
type Rescored struct {
	Waiting
	At      time.Time
	Message Message
	Reason  string // valid UTF-8
}

// message returns the message to store, nothing without a Reason.
func (r Rescored) message(now time.Time) []byte {
	if r.Reason == "" {
		return nil
	}
	return r.Message.WithDenial(r.Reason, now)
}

// Rescore changes when forward looks at stored tasks of one queue.
func (c *Client) Rescore(ctx context.Context, queue string, tasks []Rescored) error {
	return inBatches(tasks, func(batch []Rescored) error {
		now := time.Now()
		args := []any{prefix(queue) + "t:", now.Unix()}
		for _, task := range batch {
			args = append(args, task.ID, task.JoinKey, score(task.At), task.message(now), len(task.Message))
		}
		return c.run(ctx, rescoreScript, queue, []string{prefix(queue) + "scheduled"}, args...).Err()
	})
}

func inBatches[T any](all []T, do func(batch []T) error) error {
	for i := 0; i < len(all); i += maxBatch {
		if err := do(all[i:min(i+maxBatch, len(all))]); err != nil {
			return err
		}
	}
	return nil
}
