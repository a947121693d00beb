package asynqredis

import (
	"context"
	"strconv"
	"strings"
	"time"
)

// recoverMost is the most tasks of a queue that Recover looks at.
const recoverMost = 10_000

// Recover puts back tasks of servers that died, so that asynq's recoverer neither counts a retry for them
// nor archives them. They become due, and join their lines in front. It leaves the rest of those whose
// leases have expired by the given time to asynq.
//
// A task without retries left goes back if it has not started: Start notes that. Any other one goes back
// once in its life, unless asynq has renewed its lease: it does so every five seconds for all that have
// started. So a task that kills its server does not come back for ever.
func (c *Client) Recover(ctx context.Context, queues []string, expired time.Time) error {
	for _, queue := range queues {
		lapsed, err := c.due(ctx, queue, "lease", expired, recoverMost, "msg", "sluice_call", "sluice_started")
		if err != nil {
			return err
		}
		for _, task := range lapsed {
			ref, last, call, noted := Ref{queue, task[0]}, Message(task[2]).IsLast(), task[3], task[4]
			parts := strings.Split(call, "/")
			if len(parts) != 3 || parts[0] == c.process { // asynq's, or alive
				continue
			}
			ends, _ := strconv.ParseInt(task[1], 10, 64)
			made, _ := strconv.ParseInt(parts[1], 36, 64)
			renewed := ends > made+int64((LeaseFor+time.Second)/time.Second)
			if last && noted == call || !last && (renewed || noted != "" && noted != call) {
				continue
			}
			if !last {
				if _, err := c.Start(ctx, ref, call); err != nil {
					return err
				}
			}
			r := RestoreOptions{Ref: ref, Call: call, At: time.Now().Truncate(time.Second), Mark: FrontMark}
			if _, err := c.Restore(ctx, r); err != nil && !IsNotFound(err) {
				return err
			}
		}
	}
	return nil
}
