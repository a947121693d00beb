package asynqredis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	nudges = "sluice:nudge" // the list in which they wait
	lines  = "sluice:lines" // those in which tasks of a queue wait: see dequeue.lua
)

// Nudge has one idle server of the queue ask each of these lines now.
func (c *Client) Nudge(ctx context.Context, queue string, names ...any) error {
	return c.run(ctx, "nudge", queue, keys(queue, nudges, lines), names...).Err()
}

// AwaitNudge waits for a nudge of one of the queues, for less than ReadTimeout. Unless OneSlot there
// must be one queue. The line is "" if no nudge came. The end of the context does not end the wait.
func (c *Client) AwaitNudge(
	ctx context.Context, queues []string, wait time.Duration,
) (queue, line string, err error) {
	args := []any{"blpop"}
	for _, queue := range queues {
		args = append(args, prefix(queue)+nudges)
	}
	// Not by client.BLPop, which rounds fractions of a second up.
	seconds := max(wait, time.Millisecond).Seconds()
	reply, err := c.redis.Do(ctx, append(args, fmt.Sprintf("%.3f", seconds))...).StringSlice()
	if errors.Is(err, redis.Nil) {
		return "", "", nil
	}
	if err != nil || len(reply) < 2 {
		return "", "", err
	}
	queue, _ = strings.CutPrefix(reply[0], "asynq:{")
	return strings.TrimSuffix(queue, "}:"+nudges), reply[1], nil
}
