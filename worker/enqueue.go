package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// storedFor is when workers look at a stored task whose join was lost.
const storedFor = 2 * time.Minute

// An enqueuing is one task on its way into a line.
type enqueuing struct {
	Enqueued
	task    *asynq.Task
	call    asynqredis.EnqueueCall
	reason  string // why it waits for long
	request throttle.Request
}

func (e *enqueuing) refuse(err error) {
	e.Info, e.Err = nil, fmt.Errorf("worker: task type %q: %w", e.task.Type(), err)
}

func (e *enqueuing) waiting() asynqredis.Waiting {
	return asynqredis.Waiting{ID: e.call.ID, JoinKey: e.request.Key}
}

// A task is enqueued in four steps. Asynq's client makes its message (message). The message is
// stored as scheduled (store). The task joins its line (join). At last the calls that its place
// asks for are made (rest). In this order no worker can take a task that is not there. Whatever is
// lost between two steps is found by workers two minutes later.

// enqueue enqueues tasks together, which are those of a batch from an index on.
func (c *Client) enqueue(ctx context.Context, tasks []*asynq.Task, from int, opts []asynq.Option) []Enqueued {
	all := make([]enqueuing, len(tasks))
	var joining []*enqueuing
	members, firing := asynqredis.MembersOf(ctx)
	for i, task := range tasks {
		e := &all[i]
		e.task = task
		own := opts
		if firing {
			own = append(slices.Clip(opts), asynq.Queue(members.Queue), asynq.TaskID(members.ID(members.From+from+i)))
		}
		if c.message(ctx, e, own) {
			joining = append(joining, e)
		}
	}
	c.commit(ctx, joining)
	results := make([]Enqueued, len(all))
	for i := range all {
		results[i] = all[i].Enqueued
	}
	return results
}

// commit does all steps but the first.
func (c *Client) commit(ctx context.Context, tasks []*enqueuing) {
	byQueue := map[string][]*enqueuing{}
	for _, e := range tasks {
		byQueue[e.call.Queue] = append(byQueue[e.call.Queue], e)
	}
	byLine := map[string][]*enqueuing{}
	for queue, es := range byQueue {
		for _, e := range c.store(ctx, queue, es) {
			line := c.limiter.LineOf(e.request.Policy, e.request.Tenant)
			byLine[line] = append(byLine[line], e)
		}
	}
	for _, line := range slices.Sorted(maps.Keys(byLine)) {
		c.join(ctx, line, byLine[line])
	}
}

// message makes the task's message by asynq's client, and reports whether the task joins a line. If
// it does not, it has its result: asynq has enqueued it, or it was refused.
func (c *Client) message(ctx context.Context, e *enqueuing, opts []asynq.Option) bool {
	var caught captured
	if e.task != nil {
		var err error
		if caught.matched, err = c.request(ctx, e, opts, &caught); err != nil {
			e.Err = err
			return false
		}
		if c.headers != nil {
			caught.headers = maps.Clone(c.headers(ctx, e.task))
		}
		if caught.class != "" {
			if caught.headers == nil {
				caught.headers = map[string]string{}
			}
			caught.headers[classHeader] = string(caught.class)
		}
		if caught.matched || len(caught.headers) > 0 {
			ctx = context.WithValue(ctx, capturedKey{}, &caught)
		}
		if _, member := asynqredis.MembersOf(ctx); member && !caught.join {
			e.refuse(errMember)
			return false
		}
	}
	info, err := c.client.EnqueueContext(ctx, e.task, opts...)
	var late *throttle.TooLateError
	switch {
	case errors.As(caught.err, &late):
		late.Decision = throttle.Decision{At: time.Now(), Policy: e.request.Policy, Tenant: e.request.Tenant}
		fallthrough
	case caught.err != nil:
		e.refuse(caught.err)
		return false
	case err != nil:
		e.Err = err
		return false
	}
	now := time.Now()
	e.Info = info
	if !caught.ok {
		e.Start = ExpectedStart{Known: true, Least: now}
		if info.State == asynq.TaskStateScheduled {
			e.Start.Least = info.NextProcessAt
		}
		return false
	}
	e.call = caught.call
	e.request.Key = e.call.Message.JoinKey()
	e.request.MaxHold = e.call.Message.TimeLimit(now)
	if deadline := e.call.Message.Deadline(); !deadline.IsZero() {
		if e.request.Deadline = deadline; !deadline.After(now) {
			e.refuse(missed(e.request.Policy, e.request.Tenant, deadline, now))
			return false
		}
	}
	return true
}

// request makes the task's request, and reports whether a policy matches it.
func (c *Client) request(ctx context.Context, e *enqueuing, opts []asynq.Option, caught *captured) (bool, error) {
	policy, ok := c.limiter.Match(e.task.Type())
	if !ok {
		return false, nil
	}
	request, err := c.requestBy(ctx, policy, e.task, opts)
	if err != nil {
		return false, err
	}
	e.request = request
	for _, o := range opts {
		switch o := o.(type) {
		case maxWait:
			e.request.MaxWait = o.value.(time.Duration)
		case backlog:
			e.request.Backlog = o.value.(int)
		case class:
			caught.class = e.request.Class
		}
	}
	caught.join = policy.Requeue != throttle.RequeueEarliestReset
	_, caught.member = asynqredis.MembersOf(ctx)
	caught.backlog, caught.maxWait = e.request.Backlog > 0, max(0, e.request.MaxWait)
	return true, nil
}

// requestBy returns what the task asks of a policy. Of the options it knows Class.
func (c *Client) requestBy(ctx context.Context, policy throttle.PolicyInfo, task *asynq.Task, opts []asynq.Option) (throttle.Request, error) {
	request, err := c.identify.request(policy.Name, task)
	if err != nil {
		return throttle.Request{}, err
	}
	for _, o := range opts {
		if o, ok := o.(class); ok {
			request.Class = o.value.(throttle.Class)
		}
	}
	if err := c.limiter.Check(ctx, request); isInvalid(err) {
		return throttle.Request{}, fmt.Errorf("worker: task type %q: %w", task.Type(), err)
	}
	return request, nil
}

// store stores tasks of one queue, and returns those that were.
func (c *Client) store(ctx context.Context, queue string, es []*enqueuing) []*enqueuing {
	identity, err := c.asynq.Identity(ctx)
	at := asynqredis.WholeSecond(time.Now().Add(storedFor))
	calls := make([]asynqredis.EnqueueCall, len(es))
	for i, e := range es {
		calls[i] = e.call
	}
	var results []asynqredis.Result
	if err == nil {
		results, err = c.asynq.Store(ctx, queue, calls, at)
	}
	var stored []*enqueuing
	for i, e := range es {
		switch {
		case i >= len(results):
			e.Info, e.Err = nil, err
		case results[i] == asynqredis.IDTaken:
			e.Info, e.Err = nil, fmt.Errorf("%w", asynq.ErrTaskIDConflict)
		case results[i] == asynqredis.LockTaken:
			e.Info, e.Err = nil, fmt.Errorf("%w", asynq.ErrDuplicateTask)
		default:
			e.Info.State, e.Info.NextProcessAt = asynq.TaskStateScheduled, at
			e.request.Ticket = throttle.Ticket{Queue: identity + "/" + queue, ID: e.call.ID}
			stored = append(stored, e)
		}
	}
	return stored
}
