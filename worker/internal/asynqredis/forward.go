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
	from, now := keys(queue, source(retried)), time.Now().Unix()
	first := &redis.ZRangeBy{Min: "-inf", Max: strconv.FormatInt(now, 10), Count: 1}
	if ids, err := c.redis.ZRangeByScore(ctx, from[0], first).Result(); err != nil || len(ids) == 0 {
		return nil, err // mostly: a script would cost more
	}
	reply, err := c.run(ctx, "due", queue, from, prefix(queue)+"t:", now, n).StringSlice()
	if err != nil {
		return nil, err
	}
	due := make([]Due, 0, len(reply)/3)
	for i := 0; i+2 < len(reply); i += 3 {
		due = append(due, Due{reply[i], Message(reply[i+1]), reply[i+2]})
	}
	return due, nil
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
