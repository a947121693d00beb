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
	fields, err := c.redis.HGetAll(ctx, prefix(task.Queue)+"t:"+task.ID).Result()
	leaseEnd, leaseErr := c.redis.ZScore(ctx, prefix(task.Queue)+"lease", task.ID).Result()
	if leaseErr != redis.Nil {
		err = cmp.Or(err, leaseErr)
	}
	if err != nil {
		return false, err
	}
	if int64(leaseEnd) > time.Now().Unix()-30 { // asynq found a lease that had ended 30 s before: it was recovered since
		return true, nil
	}
	call := fields["sluice_call"]     // the last call of ours that made it active
	parts := strings.Split(call, "/") // as NewCall joins them
	hasGoneBack := fields["sluice_restored"] == call
	isActiveByAsynq := len(parts) != 3 || hasGoneBack && fields["state"] == "active"
	if isActiveByAsynq || call == running {
		return false, nil
	}
	noted := fields["sluice_started"] // the last call by which it started, or from which it went back here; or ""
	calledAt, _ := strconv.ParseInt(parts[1], 36, 64)
	wasRenewed := int64(leaseEnd) > calledAt+int64((LeaseFor+time.Second)/time.Second)
	wentBack := noted != "" && noted != call // in an earlier call; noted == call: it started now, or a Restore below failed
	switch isLast := Message(fields["msg"]).IsLastAttempt(); {
	case isLast && noted == call: // it has started: asynq archives it
		return false, nil
	case !isLast && (wasRenewed || wentBack):
		return false, nil
	case !isLast: // note that it goes back
		if _, err := c.CheckActive(ctx, task, call, NoteStart); err != nil {
			return false, err
		}
	}
	_, err = c.Restore(ctx, RestoreOptions{Ref: task, CallKey: call, At: time.Now().Truncate(time.Second), Mark: FrontMark})
	return err == nil, err
}
