package asynqredis

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
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
	text, _, _ := strings.Cut(mark[joinKeyBytes+1:], ".")
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
	into := keys(queue, "scheduled")
	if m, ok := MembersOf(ctx); ok {
		into = append(into, m.keys("", ":stored")...)
	}
	for some := range slices.Chunk(tasks, maxBatch) {
		args := make([]any, 0, 3+4*len(some))
		args = append(args, prefix(queue)+"t:", score(at), until(at))
		for i, task := range some {
			lock := ""
			if task.Lock != "" {
				lock = strconv.Itoa(task.LockFor) + ":" + task.Lock
			}
			mark := Mark(task.Message.JoinKey(), now, call+"."+strconv.Itoa(len(results)+i))
			args = append(args, task.ID, []byte(task.Message), mark, lock)
		}
		reply, err := c.run(ctx, "store", queue, into, args...).Int64Slice()
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
		return c.run(ctx, "unstore", queue, keys(queue, "scheduled"), args...).Err()
	})
}

// Activate makes stored tasks of one queue pending, as asynq enqueues them.
func (c *Client) Activate(ctx context.Context, queue string, tasks []Waiting) error {
	return inBatches(tasks, func(batch []Waiting) error {
		args := []any{prefix(queue) + "t:", time.Now().UnixNano()}
		for _, task := range batch {
			args = append(args, task.ID, task.JoinKey)
		}
		return c.run(ctx, "activate", queue, keys(queue, "pending", "scheduled"), args...).Err()
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

// Rescore changes when forward looks at stored tasks of one queue.
func (c *Client) Rescore(ctx context.Context, queue string, tasks []Rescored) error {
	return inBatches(tasks, func(batch []Rescored) error {
		now := time.Now()
		args := []any{prefix(queue) + "t:", now.Unix()}
		for _, task := range batch {
			var message []byte
			if task.Reason != "" {
				message = task.Message.WithDenial(task.Reason, now)
			}
			args = append(args, task.ID, task.JoinKey, score(task.At), message, len(task.Message))
		}
		return c.run(ctx, "rescore", queue, keys(queue, "scheduled"), args...).Err()
	})
}

func inBatches[T any](all []T, do func(batch []T) error) error {
	for some := range slices.Chunk(all, maxBatch) {
		if err := do(some); err != nil {
			return err
		}
	}
	return nil
}
