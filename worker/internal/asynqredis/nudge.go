package asynqredis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const nudges = "sluice:nudge" // the list in which they wait

// Nudge has one idle server of the queue ask the lines of these policies now.
func (c *Client) Nudge(ctx context.Context, queue string, policies ...string) error {
	args := make([]any, len(policies))
	for i, policy := range policies {
		args[i] = policy
	}
	return c.run(ctx, "nudge", queue, keys(queue, nudges), args...).Err()
}

// AwaitNudge waits for a nudge of one of the queues, for less than ReadTimeout. Unless
// OneSlot there must be one queue. The policy is "" if no nudge came. The end of the context does
// not end the wait.
func (c *Client) AwaitNudge(
	ctx context.Context, queues []string, wait time.Duration,
) (queue, policy string, err error) {
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
	if err != nil {
		return "", "", err
	}
	if len(reply) != 2 {
		return "", "", fmt.Errorf("%w: BLPOP: %d values", errReply, len(reply))
	}
	queue, _ = strings.CutPrefix(reply[0], "asynq:{")
	return strings.TrimSuffix(queue, "}:"+nudges), reply[1], nil
}
