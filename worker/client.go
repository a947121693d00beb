package worker

import (
	"context"
	"errors"
	"fmt"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// ClientConfig is how a client knows what it enqueues. Its functions are those of the Config
// of the workers, and have the same defaults.
type ClientConfig struct {
	Attributes func(*asynq.Task) map[string]string
	Cost       func(*asynq.Task) map[string]int64

	// Limiter tells which policy guards a task. It is required.
	Limiter *throttle.Limiter

	Tenant func(*asynq.Task) string
}

// A Client is an asynq.Client that refuses tasks which no worker could ever run. It is safe for
// concurrent use.
type Client struct {
	client   *asynq.Client
	identify identify
	limiter  *throttle.Limiter
}

// NewClient returns a client for the queues in opt's Redis. It does not talk to Redis.
func NewClient(opt asynq.RedisConnOpt, c ClientConfig) (*Client, error) {
	if c.Limiter == nil {
		return nil, errors.New("worker: ClientConfig.Limiter is nil: must be what throttle.New returns")
	}
	client, err := connect(opt)
	if err != nil {
		return nil, err
	}
	return &Client{
		client:   asynq.NewClient(connection{client}),
		identify: identify{c.Attributes, c.Cost, c.Tenant},
		limiter:  c.Limiter,
	}, nil
}

// EnqueueContext enqueues as asynq.Client does. Before anything is written it returns an error
// for a task that a policy matches and that has no tenant, and a wrapped *throttle.RequestError
// or *throttle.NeverFitsError for one whose attributes or cost that policy can never grant. What
// may be otherwise later, such as a tenant that cannot be looked up, is left to the workers.
func (c *Client) EnqueueContext(ctx context.Context, task *asynq.Task, opts ...asynq.Option) (*asynq.TaskInfo, error) {
	if task != nil {
		if err := c.check(ctx, task); err != nil {
			return nil, err
		}
	}
	return c.client.EnqueueContext(ctx, task, opts...)
}

func (c *Client) check(ctx context.Context, task *asynq.Task) error {
	policy, ok := c.limiter.PolicyFor(task.Type())
	if !ok {
		return nil
	}
	request, err := c.identify.request(policy.Name, task)
	if err != nil {
		return err
	}
	if err := c.limiter.Check(ctx, request); isRefusal(err) {
		return fmt.Errorf("worker: task type %q: %w", task.Type(), err)
	}
	return nil
}

// Close closes the connection.
func (c *Client) Close() error { return c.client.Close() }
