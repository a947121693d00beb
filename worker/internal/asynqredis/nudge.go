package asynqredis

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	awaitFor = 2 * time.Second // of AwaitNudge
	nudges   = "sluice:nudge"  // the list of lines that an idle server is to ask
	lines    = "sluice:lines"  // the lines in which tasks of a queue wait: see dequeue.lua
)

// Nudge makes an idle server of the queue ask each of these lines now.
func (c *Client) Nudge(ctx context.Context, queue string, names ...any) error {
	return c.run(ctx, "nudge", queue, keys(queue, nudges, lines), names...).Err()
}

// AwaitNudge waits for a nudge of one of the queues. Without OneSlot there must be only one queue. The line
// is "" if no nudge came within awaitFor.
func (c *Client) AwaitNudge(ctx context.Context, queues []string) (queue, line string, err error) {
	var lists []string
	for _, queue := range queues {
		lists = append(lists, prefix(queue)+nudges)
	}
	reply, err := c.redis.BLPop(ctx, awaitFor, lists...).Result()
	if errors.Is(err, redis.Nil) {
		return "", "", nil
	}
	if err != nil || len(reply) < 2 {
		return "", "", err
	}
	return queues[slices.Index(lists, reply[0])], reply[1], nil
}
