package asynqredis

import (
	"cmp"
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Recover puts back a task whose server died, once asynq's recoverer has found it. It returns false if asynq is to end
// the task, or if this process runs it by the call `running`. A task put back uses no retry, and joins its line in front.
//
// A task without retries left goes back if it has not started: CheckActive notes that. Any other task goes back once in
// its life, unless its lease was renewed: by asynq, every five seconds for started tasks, or by a pick-up that was
// repeated after 2 s. So a task that kills its server does not come back for ever.
func (c *Client) Recover(ctx context.Context, task Ref, running string) (bool, error) {
	found, err := c.redis.HGetAll(ctx, prefix(task.Queue)+"t:"+task.ID).Result()
	leaseEnd, leaseErr := c.redis.ZScore(ctx, prefix(task.Queue)+"lease", task.ID).Result()
	if leaseErr != redis.Nil {
		err = cmp.Or(err, leaseErr)
	}
	if err != nil || int64(leaseEnd) > time.Now().Unix()-30 {
		return err == nil, err // asynq looks for leases that ended 30 s ago: since then another server recovered the task
	}
	call, noted := found["sluice_call"], found["sluice_started"] // noted: the call by which it started or went back
	parts := strings.Split(call, "/")                            // as NewCall joins them
	wasPutBack := found["sluice_restored"] == call               // it went back to its queue
	activeByAsynq := len(parts) != 3 || wasPutBack && found["state"] == "active"
	if activeByAsynq || call == running {
		return false, nil
	}
	if Message(found["msg"]).IsLastAttempt() {
		if noted == call { // it has started: asynq archives it
			return false, nil
		}
	} else {
		calledAt, _ := strconv.ParseInt(parts[1], 36, 64)
		wasRenewed := int64(leaseEnd) > calledAt+int64((LeaseFor+time.Second)/time.Second)
		wentBack := noted != "" && noted != call // before; if it is this call, it started, or a Restore below failed
		if wasRenewed || wentBack {
			return false, nil
		}
		if _, err := c.CheckActive(ctx, task, call, NoteStart); err != nil { // notes that it goes back
			return false, err
		}
	}
	_, err = c.Restore(ctx, RestoreOptions{Ref: task, CallKey: call, At: time.Now().Truncate(time.Second), Mark: FrontMark})
	return err == nil, err
}
