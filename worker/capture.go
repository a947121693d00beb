package worker

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// enqueuingKey is the key of the *enqueuing in the context of asynq's client.
type enqueuingKey struct{}

// These refuse options that would have no effect.
var (
	errJoinsLater = errors.New("Backlog needs a task that joins a line when it is enqueued: " +
		"one with ProcessAt, ProcessIn or Group joins later, one of a policy with requeue earliest-reset never")
	errMember = errors.New("a task of a batch must join a line when it is enqueued: " +
		"its type must match a policy, without requeue earliest-reset, " +
		"and it must have no ProcessAt, ProcessIn or Group")
	errJoinsNever = errors.New("MaxWait needs a task that joins a line: " +
		"one with Group joins as a part of another, one of a policy with requeue earliest-reset never")
)

// capture is the hook in a client's connection that keeps asynq's calls from being sent, and adds
// headers to tasks, if the context says so: only asynq's client knows how a task becomes a message.
type capture struct{ singleCalls }

func (capture) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		e, _ := ctx.Value(enqueuingKey{}).(*enqueuing)
		if !ok || e == nil {
			return next(ctx, cmd)
		}
		call, known := asynqredis.EnqueueOf(script.Args())
		if known {
			for name, value := range e.headers {
				call.SetHeader(name, value)
			}
		}
		_, member := asynqredis.MembersOf(ctx)
		deadline, scheduled := call.Message.Deadline(), !call.At.IsZero()
		switch {
		case known && !scheduled && e.joins:
			e.call = call
			script.SetVal(int64(1)) // enqueued, as far as asynq's client knows
			return nil
		case member:
			e.refuse(errMember)
		case e.request.Policy == "":
		case !deadline.IsZero() && !call.At.Before(deadline):
			e.refuse(missed(e.request.Policy, e.request.Tenant, deadline, call.At))
		case e.request.Backlog > 0:
			e.refuse(errJoinsLater)
		case e.request.MaxWait == 0:
		case scheduled && e.joins && call.Message.GroupKey() == "": // forward looks at it when the task joins
			call.SetHeader(maxWaitHeader, e.request.MaxWait.String())
		default:
			e.refuse(errJoinsNever)
		}
		if e.Err != nil {
			script.SetErr(e.Err)
			return e.Err
		}
		return next(ctx, cmd)
	}
}
