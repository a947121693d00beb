package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

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

// A Client is an asynq.Client that gives every task its place in line when it is enqueued, and
// refuses tasks which no worker could ever run. It is safe for concurrent use.
type Client struct {
	client   *asynq.Client
	identify identify
	limiter  *throttle.Limiter
	lines    *lines
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
	lines := newLines(c.Limiter, false)
	lines.use(client)
	client.AddHook(&planner{client, c.Limiter, lines, redis.NewScript(placeLua)})
	return &Client{
		client:   asynq.NewClient(connection{client}),
		identify: identify{c.Attributes, c.Cost, c.Tenant},
		limiter:  c.Limiter,
		lines:    lines,
	}, nil
}

// EnqueueContext enqueues as asynq.Client does, with asynq's options and ours, MaxWait and
// Backlog. A task that a policy matches takes its place in line: if it fits now it is pending,
// else it is scheduled, and called when its turn comes. Tasks with ProcessAt or ProcessIn in the
// future or a Group, and all tasks while the limiter's Redis does not answer, are enqueued as
// asynq does, and take their place when they are denied.
//
// Before anything is written it returns an error for a task that a policy matches and that has
// no tenant, a wrapped *throttle.RequestError or *throttle.NeverFitsError for one whose
// attributes or cost that policy can never grant, a *TooLateError for one that is expected to
// start only after its asynq.Deadline, and a *throttle.RefusedError for one that MaxWait or Backlog
// refuse. What may be otherwise later, such as a tenant that cannot be looked up, is left to the
// workers.
func (c *Client) EnqueueContext(ctx context.Context, task *asynq.Task, opts ...asynq.Option) (*TaskInfo, error) {
	var p *placing
	if task != nil {
		var err error
		if p, err = c.placing(ctx, task, opts); err != nil {
			return nil, err
		}
	}
	if p != nil {
		ctx = context.WithValue(ctx, placingKey{}, p)
	}
	info, err := c.client.EnqueueContext(ctx, task, opts...)
	switch {
	case p != nil && p.refused != nil:
		return nil, fmt.Errorf("worker: task type %q: %w", task.Type(), p.refused)
	case err != nil:
		return nil, err
	case p != nil && !p.processAt.IsZero():
		info.State, info.NextProcessAt = asynq.TaskStateScheduled, p.processAt
		return &TaskInfo{info, p.startsAt}, nil
	}
	return &TaskInfo{info, info.NextProcessAt}, nil
}

// placing returns what the planner has to know, or nil if the task is not to stand in line.
func (c *Client) placing(ctx context.Context, task *asynq.Task, opts []asynq.Option) (*placing, error) {
	policy, ok := c.limiter.PolicyFor(task.Type())
	if !ok {
		return nil, nil
	}
	request, err := c.identify.request(policy.Name, task)
	if err != nil {
		return nil, err
	}
	if err := c.limiter.Check(ctx, request); isRefusal(err) {
		return nil, fmt.Errorf("worker: task type %q: %w", task.Type(), err)
	}
	if policy.Requeue == throttle.RequeueEarliestReset {
		return nil, nil
	}
	p := &placing{request: request}
	for _, o := range opts {
		switch o := o.(type) {
		case maxWait:
			p.maxWait = o.value.(time.Duration)
		case backlog:
			p.backlog = o.value.(int)
		}
	}
	return p, nil
}

// Close closes the connection.
func (c *Client) Close() error {
	c.lines.close()
	return c.client.Close()
}
