package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
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
	// calls. A task that has not joined by then is enqueued as a plain one (one of a batch stays scheduled), and
	// joins its line when a worker denies it. For the next 100 ms to 1 s no enqueue asks. The default is 250 ms.
	LimiterTimeout time.Duration
}

// A Client is an asynq.Client whose tasks join their policy's line when they are enqueued. It
// refuses tasks that no worker could ever run. It is safe for concurrent use.
type Client struct {
	link
	asking      chan struct{} // has an entry for each call of ask to the limiter
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

// EnqueueContext enqueues like asynq.Client, with asynq's options and ours: MaxWait, Backlog and ReportStart. A task
// that a policy matches is stored as scheduled, and joins the policy's line: a worker takes it when it fits, which may
// be at once. If the policy has EarliestReset, the task is enqueued as by asynq.Client, and joins no line.
//
// A task with a Group joins no line either: the task into which it is aggregated is throttled, by its type. A task with
// ProcessAt or ProcessIn in the future joins at that time. While the limiter's Redis does not answer, all tasks
// are enqueued as by asynq.Client, and join when a worker denies them.
//
// For a task that an enforcing policy matches it returns an error, and does not enqueue, if the task
//   - has no tenant,
//   - has attributes or a cost that its policy can never grant: a wrapped *throttle.RequestError,
//   - is to start after its asynq.Deadline, or is refused by MaxWait or Backlog: a wrapped *throttle.DeniedError.
//     Unless the Deadline is past, or before its ProcessAt, the task and its unique lock were stored for a moment.
//
// Before a task is refused because of tasks that wait, tickets of deleted tasks leave the line. A Client
// looks for them at most once a second in each line.
//
// Tasks that many goroutines enqueue at the same time go to Redis together.
func (c *Client) EnqueueContext(ctx context.Context, task *asynq.Task, opts ...asynq.Option) (*asynq.TaskInfo, error) {
	e := &enqueueTask{task: task, reportTo: new(ExpectedStart)}
	if c.message(ctx, e, opts) {
		c.gather.do(ctx, e)
	}
	*e.reportTo = e.Start
	return e.Info, e.Err
}

// Enqueue is EnqueueContext with context.Background().
func (c *Client) Enqueue(task *asynq.Task, opts ...asynq.Option) (*asynq.TaskInfo, error) {
	return c.EnqueueContext(context.Background(), task, opts...)
}

// An EnqueueResult is the result of one task of EnqueueBulk: Info, or Err.
type EnqueueResult struct {
	Info  *asynq.TaskInfo
	Start ExpectedStart
	Err   error
}

// maxCommit is the most tasks that are enqueued together. A call to Redis has fewer.
const maxCommit = 500

// EnqueueBulk does for many tasks, with the same options, what EnqueueContext does for one. Tasks that join a line
// take few calls to Redis together, others one each. It returns a result for each task, in their order.
func (c *Client) EnqueueBulk(ctx context.Context, tasks []*asynq.Task, opts ...asynq.Option) []EnqueueResult {
	results := make([]EnqueueResult, 0, len(tasks))
	members, firing := asynqredis.MembersOf(ctx)
	for chunk := range slices.Chunk(tasks, maxCommit) {
		all := make([]enqueueTask, len(chunk))
		var joining []*enqueueTask
		for i, task := range chunk {
			e, options := &all[i], opts
			e.task, e.reportTo = task, new(ExpectedStart)
			if firing {
				id := members.ID(members.From + len(results) + i)
				options = append(slices.Clip(opts), asynq.Queue(members.Queue), asynq.TaskID(id))
			}
			if c.message(ctx, e, options) {
				joining = append(joining, e)
			}
		}
		c.commit(ctx, joining)
		for i := range all {
			*all[i].reportTo = all[i].Start
			results = append(results, all[i].EnqueueResult)
		}
	}
	return results
}

// Close closes the connection.
func (c *Client) Close() error { return c.tasks.Redis().Close() }
