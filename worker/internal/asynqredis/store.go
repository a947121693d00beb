package asynqredis

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// The results of Store for a task.
const (
	Stored    = int64(1)
	IDTaken   = int64(0)
	LockTaken = int64(-1)
)

// Mark returns what a task's hash keeps of its join: JOINKEY.CALL. CALL is "" if it perhaps did not join.
func Mark(joinKey, call string) string { return joinKey + "." + call }

// Other marks. A task that waits in no line has "", and one that a batch has set aside has "set_aside".
const (
	FrontMark = "front" // of a task that is to join at the front, as it has had its turn
	KeptMark  = "keep"  // tells Restore that the task keeps the mark that it has
)

// Store stores tasks of one queue, before they join a line, as scheduled and ready to be picked. At forwardAt
// forward looks at tasks that are still scheduled. It returns a result for each task, in order.
func (c *Client) Store(
	ctx context.Context, queue, line string, tasks []EnqueueCall, forwardAt time.Time,
) ([]int64, error) {
	into := keys(queue, "scheduled", lines)
	if m, ok := MembersOf(ctx); ok {
		into = append(into, m.counts()...)
	}
	first := []any{prefix(queue) + "t:", score(forwardAt), time.Now().Unix(), line}
	return forTasks[int64](ctx, c, "store", queue, into, first, tasks, func(args []any, task EnqueueCall) []any {
		mark := Mark(task.Message.JoinKey(), c.NewCall())
		return append(args, task.ID, []byte(task.Message), mark, task.Lock, task.LockFor)
	})
}

// A WaitingTask names a task that is scheduled and can be picked by its join key.
type WaitingTask struct{ ID, JoinKey string }

// forTasks runs a script for tasks of one queue, maxBulk a call, and returns its answer for each. The
// arguments of a call are `first`, and what add appends for each task.
func forTasks[A, T any](
	ctx context.Context, c *Client, script, queue string, keys []string, first []any, tasks []T,
	add func(args []any, task T) []any,
) (answers []A, err error) {
	for some := range slices.Chunk(tasks, maxBulk) {
		args := slices.Clone(first)
		for _, task := range some {
			args = add(args, task)
		}
		reply, err := c.run(ctx, script, queue, keys, args...).Slice()
		if err == nil && len(reply) != len(some) {
			err = fmt.Errorf("worker: the script %s on asynq's Redis has %d answers for %d tasks", script, len(reply), len(some))
		}
		if err != nil {
			return answers, err
		}
		for _, value := range reply {
			answer, _ := value.(A)
			answers = append(answers, answer)
		}
	}
	return answers, nil
}
