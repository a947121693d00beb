package asynqredis

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Recover puts back tasks of servers that died, so that asynq's recoverer neither counts a retry for them
// nor archives them. They become due, and join their lines in front. It leaves the rest of those whose
// leases have expired by the given time to asynq.
//
// A task without retries left goes back if it has not started: Start notes that. Any other one goes back
// once in its life, unless asynq has renewed its lease: it does so every five seconds for all that have
// started. So a task that kills its server does not come back for ever.
func (c *Client) Recover(ctx context.Context, queues []string, expired time.Time) error {
	for _, queue := range queues {
		by := &redis.ZRangeBy{Min: "-inf", Max: strconv.FormatInt(expired.Unix(), 10)}
		lapsed, err := c.redis.ZRangeByScoreWithScores(ctx, prefix(queue)+"lease", by).Result()
		if err != nil {
			return err
		}
		ids := make([]string, len(lapsed))
		for i, lease := range lapsed {
			ids[i], _ = lease.Member.(string)
		}
		found, err := c.fields(ctx, queue, ids, "sluice_call", "sluice_started", "msg")
		if err != nil {
			return err
		}
		for i, f := range found {
			call, noted, last := f[0], f[1], Message(f[2]).IsLast()
			parts := strings.Split(call, "/")
			if len(parts) != 3 || parts[0] == c.process { // asynq's, or alive
				continue
			}
			made, _ := strconv.ParseInt(parts[1], 36, 64)
			renewed := int64(lapsed[i].Score) > made+int64((LeaseFor+time.Second)/time.Second)
			if last && noted == call || !last && (renewed || noted != "" && noted != call) {
				continue
			}
			if !last {
				if _, err := c.Start(ctx, Ref{queue, ids[i]}, call); err != nil {
					return err
				}
			}
			r := Restored{Queue: queue, Call: call, At: time.Now().Truncate(time.Second), Mark: FrontMark}
			if err := c.Restore(ctx, r, ids[i]); err != nil {
				return err
			}
		}
	}
	return nil
}
