package worker

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A captured is what capture keeps of a call by which asynq's client enqueues a task.
type captured struct {
	headers map[string]string // to add
	matched bool              // by a policy
	class   throttle.Class    // if that is given

	// Of a task that a policy matches:

	join    bool // the task joins a line if it is to run now: its call is not sent
	backlog bool // Backlog is given: the task must join now
	member  bool // the task is one of a firing of a batch: it must join now
	maxWait time.Duration

	call asynqredis.EnqueueCall
	ok   bool  // the call was kept
	err  error // why it was refused
}

type capturedKey struct{}

// These refuse options that would have no effect.
var (
	errJoinsLater = errors.New("Backlog needs a task that joins a line when it is enqueued: " +
		"one with ProcessAt, ProcessIn or Group joins later, one of a policy with requeue earliest-reset never")
	errMember = errors.New("a task of a batch must join a line when it is enqueued: " +
		"its type must match a policy, without requeue earliest-reset, and it must have no ProcessAt, ProcessIn or Group")
	errJoinsNever = errors.New("MaxWait needs a task that joins a line: " +
		"one with Group joins as a part of another, one of a policy with requeue earliest-reset never")
)

// capture is the hook in a client's connection that keeps asynq's calls from being sent, and adds
// headers to tasks, if the context says so: only asynq's client knows how a task becomes a message.
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
		if call, now := asynqredis.EnqueueOf(script.Args()); now {
			for name, value := range c.headers {
				call.SetHeader(name, value)
			}
			if c.join {
				c.call, c.ok = call, true
				script.SetVal(int64(1)) // enqueued, as far as asynq's client knows
				return nil
			}
		}
		schedule, scheduled := asynqredis.ScheduleOf(script.Args())
		if scheduled {
			for name, value := range c.headers {
				schedule.SetHeader(name, value)
			}
		}
		if !c.matched {
			return next(ctx, cmd)
		}
		joins := scheduled && c.join && schedule.Message.GroupKey() == ""
		switch deadline := schedule.Message.Deadline(); {
		case !deadline.IsZero() && !schedule.At.Before(deadline):
			c.err = &throttle.TooLateError{Deadline: deadline, StartsAt: schedule.At}
		case c.member:
			c.err = errMember
		case c.backlog:
			c.err = errJoinsLater
		case c.maxWait > 0 && !joins:
			c.err = errJoinsNever
		case c.maxWait > 0: // forward looks at it when the task joins
			schedule.SetHeader(maxWaitHeader, c.maxWait.String())
		}
		if c.err != nil {
			script.SetErr(c.err)
			return c.err
		}
		return next(ctx, cmd)
	}
}
