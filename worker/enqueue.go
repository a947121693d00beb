package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A task is enqueued in three steps. Asynq's client makes its message (message, capture). The message is
// stored as scheduled (store). The task joins its line, and its place says what else is to be done (join).
// In this order no worker can take a task that is not there. Whatever is lost between two steps is found by
// workers two minutes later.

// An enqueueTask is one task on its way into a line.
type enqueueTask struct {
	EnqueueResult
	task     *asynq.Task
	reportTo *ExpectedStart   // nil: nobody asks
	request  throttle.Request // without a policy if none matches
	member   bool             // of a batch: by default it lets live ones go first
	joins    bool             // it joins a line when it is to run

	call  asynqredis.EnqueueCall // of asynq's client, which was not sent, as the task joins now
	place throttle.Place         // in line
	done  chan struct{}          // is closed when it was committed with others
}

// These refuse what would have no effect.
var (
	errJoinsLater = errors.New("MaxWait and Backlog need a task that joins a line when it is enqueued: " +
		"one with ProcessAt, ProcessIn or Group joins later, one of a policy with earliest_reset never")
	errMember = errors.New("a task of a batch must join a line when it is enqueued: " +
		"its type must match a policy, without earliest_reset, " +
		"and it must have no ProcessAt, ProcessIn or Group")
	errNoTask = errors.New("worker: the task is nil")
)

func (e *enqueueTask) refuse(err error) {
	e.Info, e.Err = nil, fmt.Errorf("worker: task type %q: %w", e.task.Type(), err)
}

// report stores the expected start where ReportStart wants it.
func (e *enqueueTask) report() {
	if e.reportTo != nil {
		*e.reportTo = e.Start
	}
}

// message makes the task's message by asynq's client, and reports whether the task joins a line. If
// it does not, it has its result: asynq has enqueued it, or it was refused.
func (c *Client) message(ctx context.Context, e *enqueueTask, opts []asynq.Option) bool {
	if e.Err = c.prepare(ctx, e, opts); e.Err != nil {
		return false
	}
	info, err := c.asynqClient.EnqueueContext(context.WithValue(ctx, enqueueTaskKey{}, e), e.task, opts...)
	if e.Err = cmp.Or(e.Err, err); e.Err != nil { // what capture has refused, or asynq
		return false
	}
	now := time.Now()
	e.Info = info
	if message := e.call.Message; message != nil {
		e.request.Key, e.request.Deadline = message.JoinKey(), message.Deadline()
		e.request.MaxHold = message.TimeLimit(now)
		return true
	}
	e.Start = ExpectedStart{At: now}
	if info.State == asynq.TaskStateScheduled {
		e.Start.At = info.NextProcessAt
	}
	return false
}

// prepare finds out what the task asks of the policy that matches it.
func (c *Client) prepare(ctx context.Context, e *enqueueTask, opts []asynq.Option) error {
	if e.task == nil {
		return errNoTask
	}
	policy, matched := c.limiter.Match(e.task.Type(), false)
	var err error
	if matched {
		e.request, err = requestOf(c.config.Identify, policy.Name, e.task)
	}
	if _, e.member = asynqredis.MembersOf(ctx); e.member {
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
		e.request = throttle.Request{}
		if policy.Observe {
			return nil // a server logs it, and runs the task
		}
		return err
	}
	e.joins = matched && !policy.EarliestReset
	return nil
}

// RequestOf returns what the task asks of the policy that matches it. It is an error if no policy with a
// line matches, if the task has no tenant, or if its policy can never grant it: a wrapped
// *throttle.RequestError.
func (c *Client) RequestOf(task *asynq.Task) (throttle.Request, error) {
	e := &enqueueTask{task: task}
	err := c.prepare(context.Background(), e, nil)
	if err == nil && !e.joins {
		err = fmt.Errorf("worker: task type %q: must match a policy without earliest_reset", task.Type())
	}
	return e.request, err
}

// capture is the hook in a client's connection that keeps asynq's calls from being sent, and adds
// headers to tasks, if the context says so: only asynq's client knows how a task becomes a message.
type capture struct {
	singleCalls
	headers func(context.Context, *asynq.Task) map[string]string // those of the config
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
		if known {
			c.addHeaders(ctx, e, &call)
		}
		joinsNow := known && e.joins && call.At.IsZero()
		deadline, startsAt := call.Message.Deadline(), call.At
		if startsAt.IsZero() {
			startsAt = time.Now()
		}
		r := e.request
		switch {
		case e.member && !joinsNow:
			e.refuse(errMember)
		case r.Policy != "" && !deadline.IsZero() && !startsAt.Before(deadline):
			r.Deadline, r.Ticket.ID = deadline, call.ID
			e.refuse(tooLate(r, startsAt))
		case joinsNow:
			e.call = call
			script.SetVal(int64(1)) // enqueued, as far as asynq's client knows
			return nil
		case r.Policy != "" && (r.MaxWait != 0 || r.Backlog != 0):
			e.refuse(errJoinsLater)
		default:
			return next(ctx, cmd)
		}
		script.SetErr(e.Err)
		return e.Err
	}
}

// addHeaders adds the headers of the config, and the class of a batch's task. No server could read a task
// whose headers are not UTF-8.
func (c capture) addHeaders(ctx context.Context, e *enqueueTask, call *asynqredis.EnqueueCall) {
	if c.headers != nil {
		for name, value := range c.headers(ctx, e.task) {
			call.SetHeader(strings.ToValidUTF8(name, "\uFFFD"), strings.ToValidUTF8(value, "\uFFFD"))
		}
	}
	if e.member && e.request.Policy != "" {
		id, _ := IdentityOf(e.task)
		id.Class = e.request.Class
		call.SetHeader(identityHeader, id.text())
	}
}
