package asynqredis

import (
	"context"
	"strconv"
	"strings"
	"time"
)

// Recover puts back a task whose server died, once asynq's recoverer has found it, and reports whether it did.
// So asynq neither counts a retry for it nor archives it: it becomes due, and joins its line at the front.
//
// A task without retries left goes back if it has not started: CheckActive notes that. Any other task goes back once in
// its life, unless its lease was renewed: by asynq, every five seconds for started tasks, or by a pick-up that was
// repeated after 2 s. So a task that kills its server does not come back for ever.
func (c *Client) Recover(ctx context.Context, task Ref) (bool, error) {
	found, err := c.redis.HGetAll(ctx, prefix(task.Queue)+"t:"+task.ID).Result()
	leaseEnd := int64(c.redis.ZScore(ctx, prefix(task.Queue)+"lease", task.ID).Val()) // 0 if there is none
	if taken := leaseEnd > time.Now().Unix(); err != nil || taken {                   // since asynq looked, by another server
		return taken && err == nil, err
	}
	call, noted := found["sluice_call"], found["sluice_started"]
	parts := strings.Split(call, "/")
	if len(parts) != 3 || parts[0] == c.process { // asynq made it active, or this process did, which lives
		return false, nil
	}
	toAsynq := noted == call // of a last attempt: it has started, and asynq archives it
	if !Message(found["msg"]).IsLastAttempt() {
		calledAt, _ := strconv.ParseInt(parts[1], 36, 64)
		wentBack := noted != "" && noted != call // by an earlier call
		if toAsynq = wentBack || leaseEnd > calledAt+int64((LeaseFor+time.Second)/time.Second); !toAsynq {
			_, err = c.CheckActive(ctx, task, call, true) // for its note: the task goes back this once
		}
	}
	if err != nil || toAsynq {
		return false, err
	}
	r := RestoreOptions{Ref: task, CallKey: call, At: time.Now().Truncate(time.Second), Mark: FrontMark}
	_, err = c.Restore(ctx, r)
	return err == nil, err
}
