package batch

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// chunkSize is how many tasks are enqueued between two moves of the cursor, and in memory.
const chunkSize = 500

// A cursor is how far a firing is enqueued.
type cursor struct {
	position int // of the next task in the firing
	tenant   int // the index of its tenant
	offset   int // how many tasks of that tenant were enqueued
	policies string
}

// enqueue enqueues tasks from the cursor on, until all are, or something else is wanted.
func (w *work) enqueue(ctx context.Context, r record) error {
	at := cursor{r.position, r.tenant, r.offset, r.policies}
	p, err := w.kept(ctx, w.f)
	if err != nil {
		return err
	}
	chunk := make([]*asynq.Task, 0, chunkSize)
	for i := at.tenant; i < len(p.Tenants); i++ {
		tenant := p.Tenants[i]
		n, skip := 0, 0
		if at.tenant == i {
			skip = at.offset
		}
		for task, err := range w.b.Tasks(ctx, w.user(), tenant.Name) {
			if err != nil {
				return err
			}
			if tenant.Kept < tenant.Total && n == tenant.Kept {
				break // the others are left out
			}
			if n++; n <= skip {
				continue
			}
			if chunk = append(chunk, task); len(chunk) < chunkSize {
				continue
			}
			want, err := w.flush(ctx, chunk, cursor{at.position + len(chunk), i, n, at.policies}, &at, phaseEnqueue)
			if err != nil || want != wantRun || !w.b.open(time.Now()) {
				return err
			}
			chunk = chunk[:0]
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	_, err = w.flush(ctx, chunk, cursor{at.position + len(chunk), len(p.Tenants), 0, at.policies}, &at, phaseDrain)
	return err
}

// flush enqueues a chunk of tasks and moves the cursor behind it.
func (w *work) flush(ctx context.Context, chunk []*asynq.Task, next cursor, at *cursor, phase string) (want string, err error) {
	if len(chunk) > 0 {
		// A chunk that was begun is ended: a join that is cut off would make its tasks pending.
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(w.lease, leaseFor))
		defer cancel()
		members := asynqredis.Members{Firing: w.f, From: at.position}
		results := w.client.EnqueueBatch(asynqredis.WithMembers(call, members), chunk, w.b.options()...)
		var refused, before []int
		for i, result := range results {
			taken := errors.Is(result.Err, asynq.ErrTaskIDConflict)
			if taken {
				before = append(before, at.position+i)
			}
			switch {
			case result.Err == nil, taken:
				if policy, ok := w.config.Client.Limiter.Match(chunk[i].Type()); ok {
					next.policies = policiesOf(next.policies, policy.Name)
				}
			case passes(result.Err):
				return "", result.Err
			default:
				refused, err = append(refused, at.position+i), result.Err
			}
		}
		if before != nil { // a scheduler that was killed may have stored them, and no more
			if err := w.redis.Release(ctx, w.f, before); err != nil {
				return "", err
			}
		}
		if refused != nil {
			if err := w.redis.Refuse(ctx, w.f, refused); err != nil {
				return "", err
			}
		}
	}
	fields := []any{"phase", phase, "position", next.position, "tenant", next.tenant, "offset", next.offset, "policies", next.policies}
	if err != nil {
		fields = append(fields, "error", err.Error())
	}
	*at = next
	return w.redis.Update(ctx, w.f, w.holder, fields...)
}

// passes reports whether an error is one of the connection or of the moment, and not of the task.
func passes(err error) bool {
	var late *throttle.TooLateError
	if errors.As(err, &late) {
		return false
	}
	var reply redis.Error
	var network net.Error
	return errors.As(err, &reply) || errors.As(err, &network) ||
		slices.ContainsFunc([]error{throttle.ErrUnavailable, context.Canceled, context.DeadlineExceeded, io.EOF, io.ErrUnexpectedEOF, redis.ErrClosed, redis.ErrPoolTimeout},
			func(of error) bool { return errors.Is(err, of) })
}

// policiesOf returns the names of a list, with one more.
func policiesOf(list, name string) string {
	for have := range strings.SplitSeq(list, ",") {
		if have == name {
			return list
		}
	}
	return strings.TrimPrefix(list+","+name, ",")
}
