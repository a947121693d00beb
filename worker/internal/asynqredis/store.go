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

// A task's hash keeps a mark of its join. When the task is due, forward makes it join its line, as the mark tells:
//
//	""            it waited in no line
//	JOINKEY.CALL  a call was to make it join: if it is in no line when it is due, its ticket counts as lost
//	JOINKEY.      its join may have failed
//	front         it has had its turn: it joins at the front
//	set_aside     a batch has set it aside: it is due in ten years
const (
	FrontMark = "front"
	KeptMark  = "keep" // is no mark: tells Restore that the task keeps the mark that it has
)

// Mark returns JOINKEY.CALL, such as 9f86d081884c7d65.K3J5QXWAY7M2ZB4T/t5k0c0/1f. The call may be "".
func Mark(joinKey, call string) string { return joinKey + "." + call }

// Store stores tasks of one queue, before they join a line, as scheduled and ready to be picked. At forwardAt
// forward looks at tasks that are still scheduled. It returns a result for each task, in order.
func (c *Client) Store(ctx context.Context, queue, line string, tasks []EnqueueCall, forwardAt time.Time) ([]int64, error) {
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
