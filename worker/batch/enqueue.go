package batch

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// chunkSize is how many tasks are in memory at once, and enqueued between two moves of the cursor.
const chunkSize = 500

// enqueue enqueues tasks from the record's cursor on, until all are, or something else is wanted.
func (w *work) enqueue(ctx context.Context, r record) error {
	p, err := w.readPlan(ctx, w.f)
	if err != nil {
		return err
	}
	chunk := make([]*asynq.Task, 0, chunkSize)
	advance := func(phase string, tenant, offset int) (want string, err error) {
		from := r.Index
		r.Index += len(chunk)
		want, err = w.flush(ctx, chunk, from, "phase", phase, "index", r.Index, "tenant", tenant, "offset", offset)
		chunk = chunk[:0]
		return want, err
	}
	for i := r.Tenant; i < len(p.Tenants); i++ {
		tenant := p.Tenants[i]
		n, skip := 0, r.Offset
		r.Offset = 0 // for the next tenants
		for task, err := range w.b.Tasks(ctx, Firing{w.f.Batch, w.f.Tick}, tenant.Tenant) {
			if err != nil {
				return err
			}
			if n++; n <= skip {
				continue
			}
			if chunk = append(chunk, task); len(chunk) < chunkSize {
				continue
			}
			want, err := advance(phaseEnqueue, i, n)
			if err != nil || want != wantRun || !w.b.open(w.f.Tick, time.Now()) {
				return err
			}
			if now, err := w.read(ctx); err != nil || w.stops(now) {
				return err
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	_, err = advance(phaseDrain, len(p.Tenants), 0)
	return err
}

// flush enqueues a chunk of tasks, the first task of index `from`, and then writes the fields of the cursor.
func (w *work) flush(ctx context.Context, chunk []*asynq.Task, from int, fields ...any) (want string, err error) {
	// A chunk that was begun is finished: tasks whose join is cut off start some two minutes late, by forward.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(w.lease, leaseFor))
	defer cancel()
	call = asynqredis.WithMembers(call, asynqredis.Members{Firing: w.f, From: from})
	var rejected, stored []int
	var passing, reason error
	for i, result := range w.client.EnqueueBulk(call, chunk, w.b.Options...) {
		switch {
		case result.Err == nil:
		case errors.Is(result.Err, asynq.ErrTaskIDConflict):
			// A scheduler that was killed may have stored the task without joining it.
			stored = append(stored, from+i)
		case result.Info != nil, isPassing(result.Err): // with an Info it is stored, and has not joined
			passing = result.Err
		default:
			rejected, reason = append(rejected, from+i), result.Err
		}
	}
	// This comes first, as the IDs of tasks that their line refused stay taken: next time they would count as stored.
	err = w.redis.Count(call, w.f, "rejected", rejected)
	if err == nil && reason != nil {
		_, err = w.redis.Update(call, w.f, w.holder, "reason", reason.Error())
	}
	if err = cmp.Or(err, passing); err == nil && len(stored) > 0 {
		_, err = w.config.Client.Limiter.CheckRedis(ctx) // servers join them to their lines, for which the limiter must answer
	}
	if err == nil {
		err = w.move(ctx, asynqredis.Release)(stored)
	}
	if err != nil {
		return "", err
	}
	return w.redis.Update(ctx, w.f, w.holder, append(fields, "delayed_by", "")...)
}

// isPassing reports whether an error is one of the connection or of the moment, and not of the task.
func isPassing(err error) bool {
	if errors.As(err, new(*throttle.DeniedError)) {
		return false
	}
	for _, passing := range []error{
		throttle.ErrUnavailable, context.Canceled, context.DeadlineExceeded,
		io.EOF, io.ErrUnexpectedEOF, redis.ErrClosed, redis.ErrPoolTimeout,
	} {
		if errors.Is(err, passing) {
			return true
		}
	}
	var reply redis.Error
	var network net.Error
	return errors.As(err, &reply) || errors.As(err, &network)
}
