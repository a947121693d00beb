package asynqredis

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"
)

type DueTask struct {
	ID      string
	Message Message
	Mark    string // see FrontMark
}

// Due returns up to n due tasks of a queue: tasks to retry if retried is true, scheduled tasks otherwise.
func (c *Client) Due(ctx context.Context, queue string, retried bool, n int) (due []DueTask, err error) {
	set := "scheduled"
	if retried {
		set = "retry"
	}
	args := []any{prefix(queue) + "t:", time.Now().Unix(), n}
	reply, err := c.run(ctx, "due", queue, keys(queue, set), args...).StringSlice()
	for task := range slices.Chunk(reply, 3) {
		due = append(due, DueTask{task[0], Message(task[1]), task[2]})
	}
	return due, err
}

// A Move tells what to do with a waiting task.
type Move struct {
	ID         string
	JoinKey    string    // the task moves if it is scheduled by a join with this key; "": if it is due; or AnyKey
	To         string    // Archive, Delete or Look; "": it goes to At
	At         time.Time // when forward looks at it; zero: it becomes pending, as asynq enqueues or forwards it
	Line, Mark string    // of its join, if it joins a line now

	// With a Reason, valid UTF-8, the Message is stored with the reason as its last error, which asynq's tools show.
	Message Message
	Reason  string
}

const (
	AnyKey = "any"  // matches a task that is scheduled or to be retried
	Look   = "look" // leaves the task where it is; for AnyKey alone
)

// What became of a task.
const (
	Moved    = int64(1)
	MayRun   = int64(0)  // it is elsewhere, or was looked at
	NotThere = int64(-1) // it is gone, archived or completed
)

// Apply moves tasks of a queue that are scheduled, or wait to be retried, as asynq's tools and its forward
// do. It returns what became of each. Tasks that are elsewhere are left alone.
func (c *Client) Apply(ctx context.Context, queue string, moves []Move) ([]int64, error) {
	now := time.Now()
	first := []any{prefix(queue) + "t:", prefix(queue) + "g:", now.Unix(), now.UnixNano()}
	all := keys(queue, "scheduled", "retry", "archived", "pending", lines)
	return forTasks[int64](ctx, c, "move", queue, all, first, moves, func(args []any, move Move) []any {
		which, to, message := cmp.Or(move.JoinKey, "due"), cmp.Or(move.To, "pending"), Message(nil)
		if !move.At.IsZero() {
			to = strconv.FormatInt(score(move.At), 10)
		}
		if move.Reason != "" {
			message = move.Message.WithDenial(move.Reason, now)
		}
		return append(args, move.ID, which, to, move.Mark, move.Line, []byte(message), len(move.Message)) // which move.lua compares
	})
}
