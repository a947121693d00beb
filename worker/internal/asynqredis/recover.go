package asynqredis

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Recover puts back tasks whose server died before they started, so that asynq's recoverer neither
// counts a retry for them nor archives them. They become due, and join their lines in front. Other tasks
// whose leases have expired by the given time are left to asynq.
//
// Start has noted of a task without retries left that it may have started. The others start in the order
// in which their server made them active, as many at once as it has slots. So of those that are active
// still, the first may have started, as many as it has slots.
func (c *Client) Recover(ctx context.Context, queues []string, expired time.Time) error {
	type task struct {
		Ref
		call, process string
		number        uint64 // of the call, in the order of its process
		slots         int    // of the process
		lapsed        bool
		last, started bool
	}
	var tasks []task
	for _, queue := range queues {
		all := keys(queue, "active", "lease")
		by := &redis.ZRangeBy{Min: "-inf", Max: strconv.FormatInt(expired.Unix(), 10)}
		lapsed, err := c.redis.ZRangeByScore(ctx, all[1], by).Result()
		if err != nil {
			return err
		}
		ids, err := c.redis.LRange(ctx, all[0], 0, -1).Result()
		if err != nil {
			return err
		}
		slices.Reverse(ids) // the oldest first
		found, err := c.fields(ctx, queue, ids, "sluice_call", "sluice_started", "msg")
		if err != nil {
			return err
		}
		for i, f := range found {
			t := task{Ref: Ref{queue, ids[i]}, call: f[0], started: f[0] == f[1], last: Message(f[2]).IsLast()}
			t.lapsed = slices.Contains(lapsed, t.ID)
			parts := strings.Split(t.call, "/")
			if t.process = parts[0]; len(parts) != 3 || t.process == c.process { // asynq's, or alive
				continue
			}
			t.slots, _ = strconv.Atoi(parts[1])
			t.number, _ = strconv.ParseUint(parts[2], 36, 64)
			tasks = append(tasks, t)
		}
	}
	slices.SortStableFunc(tasks, func(a, b task) int { return cmp.Compare(a.number, b.number) })
	active := map[string]int{} // by process
	for _, t := range tasks {
		active[t.process]++
		if !t.lapsed || t.last && t.started || !t.last && active[t.process] <= t.slots {
			continue
		}
		r := Restored{Queue: t.Queue, Call: t.call, At: time.Now().Truncate(time.Second), Mark: FrontMark}
		if err := c.Restore(ctx, r, t.ID); err != nil {
			return err
		}
	}
	return nil
}
