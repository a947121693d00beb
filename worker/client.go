package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// ClientConfig configures a Client.
type ClientConfig struct {
	// Headers, if not nil, returns headers to add to a task that is enqueued with this context, such as those of a
	// trace: see package tasktrace. Retries keep them. A task with a Group gets none. Invalid UTF-8 is replaced.
	Headers func(context.Context, *asynq.Task) map[string]string

	// Identify must be the same as in the workers' Config.
	Identify func(*asynq.Task) (Identity, error)

	// Limiter decides which policy matches a task, and has the policy's line. It is required.
	Limiter *throttle.Limiter

	// LimiterTimeout bounds a call by which tasks join. A task, or 128 tasks of EnqueueBulk, take up to three such
	// calls. A task that has not joined by then is enqueued as a plain one (one of a batch stays scheduled), and joins
	// its line when a worker denies it. After a call that fails so it asks no more for 100 ms to 1 s. The default is 250 ms.
	LimiterTimeout time.Duration
}

// A Client is an asynq.Client whose tasks join their policy's line when they are enqueued. It
// refuses tasks that no worker could ever run. It is safe for concurrent use.
type Client struct {
	link
	asking      chan struct{} // has a value for each call of ask to the limiter that is under way
	asynqClient *asynq.Client
	config      ClientConfig
	gather      gatherer // of single tasks
}

// NewClient returns a client for the queues in opt's Redis. It does not talk to Redis. Close closes opt's connection.
func NewClient(opt asynq.RedisConnOpt, c ClientConfig) (*Client, error) {
	if c.Limiter == nil {
		return nil, errors.New("worker: ClientConfig.Limiter is nil: must be what throttle.New returns")
	}
	if c.LimiterTimeout < 0 {
		return nil, fmt.Errorf("worker: ClientConfig.LimiterTimeout %v: must not be below 0", c.LimiterTimeout)
	}
	client, err := asynqredis.Connect(opt)
	if err != nil {
		return nil, err
	}
	client.AddHook(capture{headers: c.Headers})
	c.LimiterTimeout = cmp.Or(c.LimiterTimeout, 250*time.Millisecond)
	made := &Client{
		asking:      make(chan struct{}, askers),
		link:        link{tasks: asynqredis.New(client), limiter: c.Limiter},
		asynqClient: asynq.NewClientFromRedisClient(client),
		config:      c,
	}
	made.gather.commit = made.commit
	return made, nil
}

// Close closes the connection.
func (c *Client) Close() error { return c.tasks.Redis().Close() }
