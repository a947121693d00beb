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

// Mark returns what a task's hash keeps of its join: the join key, and the call.
func Mark(joinKey, call string) string { return joinKey + "." + call }

// FrontMark is the mark of a task that is to join at the front, as it has had its turn.
const FrontMark = "front"

// Store stores tasks of one queue as scheduled, ready to be picked. At forwardAt forward looks at the ones
// that are still there. It returns a result for each task, in order.
func (c *Client) Store(
	ctx context.Context, queue string, tasks []EnqueueCall, forwardAt time.Time,
) ([]Result, error) {
	results := make([]Result, 0, len(tasks))
	call := c.NewCall()
	into := keys(queue, "scheduled", lines)
	if m, ok := MembersOf(ctx); ok {
		into = append(into, m.keys("", ":stored", ":ended")...)
	}
	err := inBulk(tasks, func(some []EnqueueCall) error {
		var named []any
		args := append(make([]any, 0, 5+4*len(some)), prefix(queue)+"t:", score(forwardAt), until(forwardAt), len(some))
		for i, task := range some {
			if !slices.Contains(named, any(task.Line)) {
				named = append(named, task.Line)
			}
			lock := ""
			if task.Lock != "" {
				lock = strconv.Itoa(task.LockFor) + ":" + task.Lock
			}
			mark := Mark(task.Message.JoinKey(), call+"."+strconv.Itoa(len(results)+i))
			args = append(args, task.ID, []byte(task.Message), mark, lock)
		}
		reply, err := c.run(ctx, "store", queue, into, append(args, named...)...).Int64Slice()
		if err == nil && len(reply) != len(some) {
			err = fmt.Errorf("%w: store of %d tasks: %v", errReply, len(some), reply)
		}
		for _, n := range reply {
			results = append(results, Result(n))
		}
		return err
	})
	return results, err
}

// A WaitingTask names a task that is scheduled and can be picked by its join key.
type WaitingTask struct{ ID, JoinKey string }

func inBulk[T any](all []T, do func(some []T) error) error {
	for some := range slices.Chunk(all, maxBulk) {
		if err := do(some); err != nil {
			return err
		}
	}
	return nil
}
