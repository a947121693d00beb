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

const storedFor = 2 * time.Minute // until workers look at a stored task whose join was lost

// An enqueuing is one task on its way into a line.
type enqueuing struct {
	Enqueued
	task    *asynq.Task
	headers map[string]string // to add
	request throttle.Request  // without a policy if none matches
	joins   bool              // it joins a line when it is to run

	call  asynqredis.EnqueueCall // of asynq's client, which was not sent, as the task joins now
	place throttle.Place         // in line
	fate  asynqredis.Move        // what becomes of it by its place
	done  chan struct{}          // is closed when it was committed with others
}

func (e *enqueuing) refuse(err error) {
	e.Info, e.Err = nil, fmt.Errorf("worker: task type %q: %w", e.task.Type(), err)
}

// report stores the expected start where ReportStart wants it.
func (e *enqueuing) report(opts []asynq.Option) {
	for _, o := range ours(opts) {
		if start, ok := o.value.(*ExpectedStart); ok && start != nil {
			*start = e.Start
		}
	}
}

// A task is enqueued in four steps. Asynq's client makes its message (message). The message is
// stored as scheduled (store). The task joins its line (join). At last the calls that its place
// asks for are made (arrange). In this order no worker can take a task that is not there. Whatever
// is lost between two steps is found by workers two minutes later.

// enqueue enqueues tasks together: those of a bulk from an index on.
func (c *Client) enqueue(ctx context.Context, tasks []*asynq.Task, from int, opts []asynq.Option) []Enqueued {
	all := make([]enqueuing, len(tasks))
	var joining []*enqueuing
	members, firing := asynqredis.MembersOf(ctx)
	for i, task := range tasks {
		e, options := &all[i], opts
		e.task = task
		if firing {
			id := members.ID(members.From + from + i)
			options = append(slices.Clip(opts), asynq.Queue(members.Queue), asynq.TaskID(id))
		}
		if c.message(ctx, e, options) {
			joining = append(joining, e)
		}
	}
	c.commit(ctx, joining)
	results := make([]Enqueued, len(all))
	for i := range all {
		all[i].report(opts)
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
			byLine[e.call.Line] = append(byLine[e.call.Line], e)
		}
	}
	for _, line := range slices.Sorted(maps.Keys(byLine)) {
		c.join(ctx, line, byLine[line])
	}
}

// message makes the task's message by asynq's client, and reports whether the task joins a line. If
// it does not, it has its result: asynq has enqueued it, or it was refused.
func (c *Client) message(ctx context.Context, e *enqueuing, opts []asynq.Option) bool {
	if e.task != nil { // else asynq returns the error
		if e.Err = c.prepare(ctx, e, opts); e.Err != nil {
			return false
		}
		ctx = context.WithValue(ctx, enqueuingKey{}, e)
	}
	info, err := c.client.EnqueueContext(ctx, e.task, opts...)
	if e.Err == nil { // else capture has refused it
		e.Info, e.Err = info, err
	}
	if e.Err != nil {
		return false
	}
	now := time.Now()
	if e.call.ID == "" {
		e.Start = ExpectedStart{Known: true, At: now}
		if info.State == asynq.TaskStateScheduled {
			e.Start.At = info.NextProcessAt
		}
		return false
	}
	message := e.call.Message
	e.request.Key = message.JoinKey()
	e.request.MaxHold = message.TimeLimit(now)
	e.request.Deadline = message.Deadline()
	if deadline := e.request.Deadline; !deadline.IsZero() && !deadline.After(now) {
		e.refuse(missed(e.request.Policy, e.request.Tenant, deadline, now))
		return false
	}
	return true
}

// prepare finds out what the task asks of the policy that matches it, and which headers it gets.
func (c *Client) prepare(ctx context.Context, e *enqueuing, opts []asynq.Option) (err error) {
	if c.headers != nil {
		e.headers = maps.Clone(c.headers(ctx, e.task))
	}
	policy, matched := c.limiter.Match(e.task.Type(), false)
	if !matched {
		return nil
	}
	e.request, err = c.request(ctx, policy.Name, e.task, opts)
	if err != nil && policy.Mode == throttle.ModeObserve {
		return nil // a server logs it, and runs the task
	}
	if err != nil {
		return err
	}
	e.joins = policy.Requeue != throttle.RequeueEarliestReset
	if class := string(e.request.Class); class != e.task.Headers()[classHeader] {
		if e.headers == nil {
			e.headers = map[string]string{}
		}
		e.headers[classHeader] = class
	}
	return nil
}

// request returns what the task asks of a policy.
func (c *Client) request(
	ctx context.Context, policy string, task *asynq.Task, opts []asynq.Option,
) (throttle.Request, error) {
	request, err := requestOf(c.identify, policy, task)
	if err != nil {
		return throttle.Request{}, err
	}
	for _, o := range ours(opts) {
		switch value := o.value.(type) {
		case time.Duration:
			request.MaxWait = value
		case int:
			request.Backlog = value
		case throttle.Class:
			request.Class = value
		}
	}
	if err := c.limiter.Check(ctx, request); isInvalid(err) {
		return throttle.Request{}, fmt.Errorf("worker: task type %q: %w", task.Type(), err)
	}
	return request, nil
}

// RequestOf returns what the task asks of the policy that matches it, if it is enqueued with the
// options. It is an error if no policy with a line matches, if the task has no tenant, or if its
// policy can never grant it: a wrapped *throttle.RequestError or *throttle.NeverFitsError.
func (c *Client) RequestOf(task *asynq.Task, opts ...asynq.Option) (throttle.Request, error) {
	if task == nil {
		return throttle.Request{}, errors.New("worker: RequestOf: task is nil")
	}
	policy, ok := c.limiter.Match(task.Type(), false)
	if !ok || policy.Requeue == throttle.RequeueEarliestReset {
		return throttle.Request{}, fmt.Errorf(
			"worker: task type %q: must match a policy without requeue earliest-reset", task.Type())
	}
	return c.request(context.Background(), policy.Name, task, opts)
}

// store stores tasks of one queue, and returns those that were.
func (c *Client) store(ctx context.Context, queue string, es []*enqueuing) []*enqueuing {
	identity, err := c.asynq.Identity(ctx)
	forwardAt := asynqredis.WholeSecond(time.Now().Add(storedFor))
	calls := make([]asynqredis.EnqueueCall, len(es))
	for i, e := range es {
		e.call.Line = c.limiter.LineOf(e.request.Policy, e.request.Tenant)
		calls[i] = e.call
	}
	var results []asynqredis.Result
	if err == nil {
		results, err = c.asynq.Store(ctx, queue, calls, forwardAt)
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
			e.Info.State, e.Info.NextProcessAt = asynq.TaskStateScheduled, forwardAt
			e.request.Ticket = throttle.Ticket{Queue: identity + "/" + queue, ID: e.call.ID}
			stored = append(stored, e)
		}
	}
	return stored
}
