package asynqredis

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Due is a task whose time has come.
type Due struct {
	ID      string
	Message Message
	Mark    string // of its join, "" if it has joined no line
}

// Due returns up to n tasks of a queue that are due, either scheduled ones or those to retry.
func (c *Client) Due(ctx context.Context, queue string, retried bool, n int) ([]Due, error) {
	from := prefix(queue) + source(retried)
	until := strconv.FormatInt(time.Now().Unix(), 10)
	by := &redis.ZRangeBy{Min: "-inf", Max: until, Count: int64(n)}
	ids, err := c.redis.ZRangeByScore(ctx, from, by).Result()
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	found, err := c.fields(ctx, queue, ids, "msg", "sluice_join")
	var due []Due
	var gone []any
	for i, task := range found {
		if task[0] == "" {
			gone = append(gone, ids[i])
		} else {
			due = append(due, Due{ids[i], Message(task[0]), task[1]})
		}
	}
	if len(gone) > 0 {
		err = c.redis.ZRem(ctx, from, gone...).Err()
	}
	return due, err
}

// A Move is the destination of a due task: to wait in a line with a mark until a time, or without a
// mark to where asynq forwards it.
type Move struct {
	ID   string
	At   time.Time
	Line string
	Mark string
}

// Forward moves due tasks of a queue, and reports for each whether it was still due.
func (c *Client) Forward(ctx context.Context, queue string, retried bool, moves []Move) ([]bool, error) {
	now := time.Now()
	args := []any{prefix(queue) + "t:", prefix(queue) + "g:", now.Unix(), now.UnixNano()}
	for _, move := range moves {
		at := ""
		if !move.At.IsZero() {
			at = strconv.FormatInt(score(move.At), 10)
		}
		args = append(args, move.ID, at, move.Mark, move.Line)
	}
	all := keys(queue, source(retried), "scheduled", "pending", lines)
	reply, err := c.run(ctx, "forward", queue, all, args...).Int64Slice()
	if err != nil {
		return nil, err
	}
	if len(reply) != len(moves) {
		return nil, fmt.Errorf("%w: forward of %d tasks: %v", errReply, len(moves), reply)
	}
	moved := make([]bool, len(reply))
	for i, n := range reply {
		moved[i] = n == 1
	}
	return moved, nil
}

func source(retried bool) string {
	if retried {
		return "retry"
	}
	return "scheduled"
}
