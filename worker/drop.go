package worker

import (
	"context"
	"errors"
	"fmt"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// DropOptions are the options of Drop.
type DropOptions struct {
	// Delete deletes the tasks. The default archives them: asynq keeps them for 90 days, and of a
	// queue the last 10,000.
	Delete bool

	// Policy and Tenant say whose tasks are dropped. They are required.
	Policy, Tenant string
}

// Drop takes the tasks of a tenant that wait in a policy's line off it, and archives or deletes them.
// It returns how many. Tasks that run, that wait for their ProcessAt, or that come meanwhile stay.
// asynq's counters of failures and retries do not change.
//
// It works page by page. If it fails, or ctx ends, the rest waits on: repeat it. No task is off the
// line that is not dropped. The limiter needs the policy. Errors are throttle.ErrUnknownPolicy,
// throttle.ErrUnavailable, the context's, or of asynq's Redis.
func Drop(
	ctx context.Context, opt asynq.RedisConnOpt, limiter *throttle.Limiter, o DropOptions,
) (int, error) {
	if limiter == nil {
		return 0, errors.New("worker: Drop: the limiter is nil: must be what throttle.New returns")
	}
	if o.Tenant == "" {
		return 0, errors.New("worker: DropOptions.Tenant is empty: must be the name of a tenant")
	}
	client, err := asynqredis.Connect(opt)
	if err != nil {
		return 0, err
	}
	defer client.Close()
	inspector := asynq.NewInspectorFromRedisClient(client)
	drop := inspector.ArchiveTask
	if o.Delete {
		drop = inspector.DeleteTask
	}
	dropped, line := 0, limiter.Line(limiter.LineOf(o.Policy, o.Tenant))
	visit := func(queue string, tickets []throttle.Ticket) (gone []throttle.Ticket, err error) {
		for _, t := range tickets {
			if err := ctx.Err(); err != nil {
				return gone, err
			}
			info, err := inspector.GetTaskInfo(queue, t.ID)
			missing := errors.Is(err, asynq.ErrTaskNotFound) || errors.Is(err, asynq.ErrQueueNotFound)
			switch {
			case err != nil && !missing:
				return gone, fmt.Errorf("worker: task %q of queue %q: %w", t.ID, queue, err)
			case missing || info.State == asynq.TaskStateArchived: // such as by a Drop before
				gone = append(gone, t)
			case info.State != asynq.TaskStateScheduled && info.State != asynq.TaskStateRetry: // it was taken since
			case drop(queue, t.ID) == nil: // else it was taken since
				dropped++
				gone = append(gone, t)
			}
		}
		return gone, nil
	}
	err = eachQueue(ctx, line, o.Tenant, asynqredis.New(client), visit)
	return dropped, err
}
