package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A task is enqueued in three steps. First asynq's client makes its message (message, capture). Then the message is
// stored as scheduled (store). Then the task joins its line, and is moved or deleted as the answer demands (join).
// In this order a task that is taken always exists. If a step is lost, workers find the task two minutes later.

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

// An enqueueTask is one task on its way into a line.
type enqueueTask struct {
	EnqueueResult
	task      *asynq.Task
	reportTo  *ExpectedStart   // for ReportStart
	request   throttle.Request // see isMatched
	observed  bool             // by a policy that denies nothing
	ignored   error            // why the request is empty, if its policy only observes, or the task is a report
	isMember  bool             // of a batch
	joinsLine bool             // now, or when it is due

	call     asynqredis.EnqueueCall // of asynq's client, without a Message if it was sent: see capture
	decision throttle.LineDecision  // of its join
	done     chan struct{}          // closed when the task was committed with others; nil if it was alone
}

var (
	errJoinsLater = errors.New("MaxWait and Backlog need a task that joins a line when it is enqueued: " +
		"one with ProcessAt, ProcessIn or Group joins later, one of a policy with earliest_reset never")
	errMember = errors.New("a task of a batch must join a line when it is enqueued: " +
		"its type must match a policy, without earliest_reset, and it must have no ProcessAt, ProcessIn or Group")
	errNoTask = errors.New("worker: the task is nil")
)

// isMatched reports whether a policy matches the task, and the request is not ignored.
func (e *enqueueTask) isMatched() bool { return e.request.Policy != "" }

func (e *enqueueTask) refuse(err error) {
	e.Info, e.Err = nil, fmt.Errorf("worker: task type %q: %w", e.task.Type(), err)
}

// message has asynq's client make the task's message, and reports whether the task joins a line now. If not, e has the
// result: asynq has enqueued the task, or it was refused.
func (c *Client) message(ctx context.Context, e *enqueueTask, opts []asynq.Option) bool {
	if e.Err = c.prepare(ctx, e, opts); e.Err != nil {
		return false
	}
	info, err := c.asynqClient.EnqueueContext(context.WithValue(ctx, enqueueTaskKey{}, e), e.task, opts...)
	if e.Err = cmp.Or(e.Err, err); e.Err != nil { // capture or asynq refused the task
		return false
	}
	now := time.Now()
	e.Info = info
	if message := e.call.Message; message != nil { // the task joins a line
		e.request.Key, e.request.Deadline = message.JoinKey(), message.Deadline()
		return true
	}
	e.Start = ExpectedStart{At: now}
	if info.State == asynq.TaskStateScheduled {
		e.Start.At = info.NextProcessAt
	}
	return false
}

// prepare makes the task's request to the policy that matches it.
func (c *Client) prepare(ctx context.Context, e *enqueueTask, opts []asynq.Option) error {
	if e.task == nil {
		return errNoTask
	}
	policy, matched := c.limiter.Match(e.task.Type(), false)
	e.observed = policy.Observe
	var err error
	if matched {
		e.request, err = requestOf(c.config.Identify, policy.Name, e.task)
	}
	if _, e.isMember = asynqredis.MembersOf(ctx); e.isMember {
		e.request.Class = cmp.Or(e.request.Class, throttle.ClassBatch)
	}
	for _, o := range opts {
		if apply, ok := o.(option); ok {
			apply(e)
		}
	}
	if matched && err == nil {
		if never := c.limiter.Check(ctx, e.request); errors.As(never, new(*throttle.RequestError)) {
			err = fmt.Errorf("worker: task type %q: %w", e.task.Type(), never)
		}
	}
	if err != nil {
		e.request, e.ignored = throttle.Request{}, err
		if policy.Observe && !e.isMember || slices.ContainsFunc(opts, isReport) {
			return nil // a server logs the error, and runs the task
		}
		return err
	}
	e.joinsLine = matched && !policy.EarliestReset
	return nil
}

// isReport reports whether an option makes the task a report of a batch.
func isReport(o asynq.Option) bool {
	id, _ := o.Value().(string)
	return o.Type() == asynq.TaskIDOpt && asynqredis.IsReport(asynqredis.Ref{ID: id})
}

// RequestOf returns the task's request to the policy that matches it, such as for an inspect.Demand. It returns an error
// if no policy with a line matches, if the task has no tenant, or if the policy can never grant it: a wrapped
// *throttle.RequestError.
func (c *Client) RequestOf(task *asynq.Task) (throttle.Request, error) {
	e := &enqueueTask{task: task}
	err := c.prepare(context.Background(), e, nil)
	if err == nil && !e.joinsLine {
		err = cmp.Or(e.ignored, fmt.Errorf("worker: task type %q: must match a policy without earliest_reset", task.Type()))
	}
	return e.request, err
}

// capture is the hook in a client's connection that adds headers to a task, and keeps the call of asynq's client if
// the task joins a line. So asynq's client makes the message: only it knows how.
type capture struct {
	singleCalls
	headers func(context.Context, *asynq.Task) map[string]string // ClientConfig.Headers
}

// enqueueTaskKey is the key of the *enqueueTask in the context of asynq's client.
type enqueueTaskKey struct{}

func (c capture) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		e, _ := ctx.Value(enqueueTaskKey{}).(*enqueueTask)
		if !ok || e == nil {
			return next(ctx, cmd)
		}
		call, known := asynqredis.EnqueueOf(script.Args())
		joinsNow := known && e.joinsLine && call.At.IsZero()
		var late *throttle.DeniedError
		if known { // else asynq adds the task to a Group
			c.addHeaders(ctx, e, &call)
			late = e.late(call)
		}
		switch {
		case e.isMember && !joinsNow:
			e.refuse(errMember)
		case late != nil:
			e.refuse(late)
		case joinsNow:
			e.call = call
			script.SetVal(int64(1)) // tells asynq's client that the task is enqueued
			return nil
		case e.isMatched() && (e.request.MaxWait != 0 || e.request.Backlog != 0):
			e.refuse(errJoinsLater)
		default:
			return next(ctx, cmd)
		}
		script.SetErr(e.Err)
		return e.Err
	}
}

// late returns the denial of a task that would start after its asynq.Deadline; nil if a policy may let it start.
func (e *enqueueTask) late(call asynqredis.EnqueueCall) *throttle.DeniedError {
	r, deadline, startsAt := e.request, call.Message.Deadline(), cmp.Or(call.At, time.Now())
	if !e.isMatched() || e.observed || deadline.IsZero() || startsAt.Before(deadline) {
		return nil
	}
	r.Deadline, r.Ticket.ID = deadline, call.ID
	return tooLate(r, startsAt)
}

// addHeaders adds the configured headers, and a batch's class. It replaces invalid UTF-8, which no server could read.
func (c capture) addHeaders(ctx context.Context, e *enqueueTask, call *asynqredis.EnqueueCall) {
	if c.headers != nil {
		for name, value := range c.headers(ctx, e.task) {
			call.SetHeader(strings.ToValidUTF8(name, "\uFFFD"), strings.ToValidUTF8(value, "\uFFFD"))
		}
	}
	if e.isMember && e.isMatched() {
		id, _ := IdentityOf(e.task)
		id.Class = e.request.Class
		call.SetHeader(identityHeader, id.text())
	}
}
