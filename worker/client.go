package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// ClientConfig is how a client knows what it enqueues. Its functions are those of the Config
// of the workers, and have the same defaults.
type ClientConfig struct {
	Attributes func(*asynq.Task) map[string]string
	Cost       func(*asynq.Task) map[string]int64

	// Limiter tells which policy guards a task, and has the line that the task joins. It is required.
	Limiter *throttle.Limiter

	Tenant func(*asynq.Task) string
}

// A Client is an asynq.Client that has every task join its line when it is enqueued, and refuses tasks
// which no worker could ever run. It is safe for concurrent use.
type Client struct {
	asynq    *asynqredis.Client
	client   *asynq.Client
	gather   gatherer // of single tasks
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
	client.AddHook(capture{})
	made := &Client{
		asynq:    asynqredis.New(client),
		client:   asynq.NewClient(connection{client}),
		identify: identify{c.Attributes, c.Cost, c.Tenant},
		limiter:  c.Limiter,
	}
	made.gather.commit = made.commit
	return made, nil
}

// EnqueueContext enqueues as asynq.Client does, with asynq's options and ours, MaxWait and Backlog. A task that a
// policy matches is stored as scheduled and joins the policy's line: a worker takes it when it fits, which may be at once.
//
// Tasks with a Group are enqueued as asynq does, and are throttled by the type of what they are aggregated to. Tasks with
// ProcessAt or ProcessIn in the future join when that comes. While the limiter's Redis does not answer, all tasks are
// enqueued as asynq does, and join when they are denied.
//
// Before anything is written it returns an error for a task that a policy matches and that has no tenant, and a wrapped
// *throttle.RequestError or *throttle.NeverFitsError for one whose attributes or cost that policy can never grant. It returns a
// *throttle.TooLateError for a task that is expected to start only after its asynq.Deadline, and for one that MaxWait refuses, and a *throttle.BacklogError
// for one that Backlog refuses; neither is enqueued. What may be otherwise later, such as a tenant that cannot be looked
// up, is left to the workers.
//
// Tasks that are enqueued at the same time, by many goroutines, go to Redis together.
func (c *Client) EnqueueContext(ctx context.Context, task *asynq.Task, opts ...asynq.Option) (*TaskInfo, error) {
	e := &enqueuing{task: task}
	if c.message(ctx, e, opts) {
		c.gather.do(ctx, e)
	}
	return e.Info, e.Err
}

// Enqueue is EnqueueContext without a context.
func (c *Client) Enqueue(task *asynq.Task, opts ...asynq.Option) (*TaskInfo, error) {
	return c.EnqueueContext(context.Background(), task, opts...)
}

// An Enqueued is what became of one task of a batch: one of both is set.
type Enqueued struct {
	Info *TaskInfo
	Err  error
}

// batchMost is how many tasks of a batch are on their way to Redis at once.
const batchMost = 500

// EnqueueBatch enqueues many tasks with the same options in few calls to Redis. It differs from EnqueueContext
// for each of them in nothing but the cost: every task has a result of its own, in order.
func (c *Client) EnqueueBatch(ctx context.Context, tasks []*asynq.Task, opts ...asynq.Option) []Enqueued {
	results := make([]Enqueued, 0, len(tasks))
	for i := 0; i < len(tasks); i += batchMost {
		results = append(results, c.enqueue(ctx, tasks[i:min(i+batchMost, len(tasks))], opts)...)
	}
	return results
}

// Ping asks asynq's Redis whether it is there.
func (c *Client) Ping() error { return c.client.Ping() }

// Close closes the connection.
func (c *Client) Close() error { return c.client.Close() }

// TaskInfo is asynq's, and when the task is expected to start.
type TaskInfo struct {
	*asynq.TaskInfo

	// StartsAt is when the task is expected to start, by this machine's clock: now if it fits now.
	// NextProcessAt of a task in line is later: that is when workers look whether it still stands there.
	StartsAt time.Time

	// StartsAtMost is an upper bound of the same, under the same conditions. It equals StartsAt where that is exact, and is
	// zero where nothing is known: for a task that has joined no line yet.
	StartsAtMost time.Time
}

// An option is one of ours among asynq's, which ignores it.
type option struct {
	name  string
	value any
}

func (o option) String() string         { return fmt.Sprintf("%s(%v)", o.name, o.value) }
func (o option) Type() asynq.OptionType { return -1 }
func (o option) Value() any             { return o.value }

type maxWait struct{ option }
type backlog struct{ option }

// MaxWait is an option of a call to Client: a task that may have to wait longer before it starts is refused
// with a *throttle.TooLateError, and nothing is enqueued. 0 is no limit. Among the options of asynq.NewTask it does nothing.
func MaxWait(d time.Duration) asynq.Option { return maxWait{option{"MaxWait", d}} }

// Backlog is an option of a call to Client: a task of which that many with the same tenant and attributes are in line
// already is refused with a *throttle.BacklogError, and nothing is enqueued. 0 is no limit. Among the options of
// asynq.NewTask it does nothing.
func Backlog(n int) asynq.Option { return backlog{option{"Backlog", n}} }

// A captured is where capture puts what asynq's client was about to enqueue.
type captured struct {
	call asynqredis.EnqueueCall
	ok   bool
}

type capturedKey struct{}

// capture is the hook in a client's connection that keeps asynq's enqueue from being sent, if the context says so:
// asynq's client alone knows how a task becomes a message.
type capture struct{}

func (capture) DialHook(next redis.DialHook) redis.DialHook { return next }

func (capture) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next // asynq's client enqueues nothing in a pipeline
}

func (capture) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		c, _ := ctx.Value(capturedKey{}).(*captured)
		if !ok || c == nil {
			return next(ctx, cmd)
		}
		if c.call, c.ok = asynqredis.EnqueueOf(script.Args()); !c.ok {
			return next(ctx, cmd)
		}
		script.SetVal(int64(1)) // enqueued, as far as asynq's client knows
		return nil
	}
}
