package worker

import (
	"context"
	"errors"

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
	how := asynqredis.Archive
	if o.Delete {
		how = asynqredis.Delete
	}
	dropped, line := 0, limiter.Line(limiter.LineOf(o.Policy, o.Tenant))
	err = eachQueue(ctx, line, o.Tenant, asynqredis.New(client), how, func(found []int64) error {
		for _, n := range found {
			dropped += int(max(0, n))
		}
		return nil
	})
	return dropped, err
}
