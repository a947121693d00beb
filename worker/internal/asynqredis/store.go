package asynqredis

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// A Result is what became of a task that was to be stored.
type Result int64

const (
	Stored    Result = 1
	IDTaken   Result = 0
	LockTaken Result = -1
)

// Mark is what a task's hash holds of its join: the join key, when it joined, and by which call.
func Mark(joinKey string, at time.Time, call string) string {
	return joinKey + "." + strconv.FormatInt(at.Unix(), 36) + "." + call
}

// FrontMark is the mark of a task that has joined no line yet, and has had its turn before.
const FrontMark = "front"

// JoinedAt is when the task joined by its mark, or the zero time.
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

// Store stores tasks of one queue as scheduled for a time at which forward finds those that are still there.
// They are ready to be picked. Of one result a task, in order.
func (c *Client) Store(ctx context.Context, queue string, tasks []EnqueueCall, at time.Time) ([]Result, error) {
	results := make([]Result, 0, len(tasks))
	now, call := time.Now(), c.Call()
	for i := 0; i < len(tasks); i += most {
		batch := tasks[i:min(i+most, len(tasks))]
		args := make([]any, 0, 3+4*len(batch))
		args = append(args, prefix(queue)+"t:", score(at), until(at))
		for j, task := range batch {
			lock := ""
			if task.Lock != "" {
				lock = strconv.Itoa(task.LockFor) + ":" + task.Lock
			}
			args = append(args, task.ID, []byte(task.Message), Mark(task.Message.JoinKey(), now, call+"."+strconv.Itoa(i+j)), lock)
		}
		reply, err := storeScript.Run(ctx, c.redis, []string{prefix(queue) + "scheduled"}, args...).Int64Slice()
		if err != nil {
			return results, err
		}
		if len(reply) != len(batch) {
			return results, fmt.Errorf("%w: store of %d tasks: %v", errReply, len(batch), reply)
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
		return unstoreScript.Run(ctx, c.redis, []string{prefix(queue) + "scheduled"}, args...).Err()
	})
}

// Activate makes stored tasks of one queue pending, as asynq enqueues them.
func (c *Client) Activate(ctx context.Context, queue string, tasks []Waiting) error {
	return inBatches(tasks, func(batch []Waiting) error {
		args := []any{prefix(queue) + "t:", time.Now().UnixNano()}
		for _, task := range batch {
			args = append(args, task.ID, task.JoinKey)
		}
		return activateScript.Run(ctx, c.redis, []string{prefix(queue) + "pending", prefix(queue) + "scheduled"}, args...).Err()
	})
}

// A Rescored is a stored task, and the time at which forward is to find it.
type Rescored struct {
	Waiting
	At time.Time
}

// Rescore moves the times at which forward finds stored tasks of one queue.
func (c *Client) Rescore(ctx context.Context, queue string, tasks []Rescored) error {
	return inBatches(tasks, func(batch []Rescored) error {
		args := []any{prefix(queue) + "t:", time.Now().Unix()}
		for _, task := range batch {
			args = append(args, task.ID, task.JoinKey, score(task.At))
		}
		return rescoreScript.Run(ctx, c.redis, []string{prefix(queue) + "scheduled"}, args...).Err()
	})
}

func inBatches[T any](all []T, do func(batch []T) error) error {
	for i := 0; i < len(all); i += most {
		if err := do(all[i:min(i+most, len(all))]); err != nil {
			return err
		}
	}
	return nil
}
