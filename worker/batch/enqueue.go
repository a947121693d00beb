package batch

import (
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
	flush := func(phase string, tenant, offset int) (want string, err error) {
		from := r.Index
		r.Index += len(chunk)
		want, err = w.flush(ctx, chunk, from,
			"phase", phase, "index", r.Index, "tenant", tenant, "offset", offset)
		chunk = chunk[:0]
		return want, err
	}
	for i := r.Tenant; i < len(p.Tenants); i++ {
		tenant := p.Tenants[i]
		n, skip := 0, 0
		if i == r.Tenant {
			skip = r.Offset
		}
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
			want, err := flush(phaseEnqueue, i, n)
			if err != nil || want != wantRun || !w.b.open(w.f.Tick, time.Now()) {
				return err
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	_, err = flush(phaseDrain, len(p.Tenants), 0)
	return err
}

// flush enqueues a chunk of tasks, whose indexes count up from from, and then writes the fields of the cursor.
func (w *work) flush(ctx context.Context, chunk []*asynq.Task, from int, fields ...any) (
	want string, err error) {
	// A chunk that was begun is finished: a join that is cut off would make its tasks pending.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(w.lease, leaseFor))
	defer cancel()
	members := asynqredis.Members{Firing: w.f, From: from}
	var rejected, stored []int
	call = asynqredis.WithMembers(call, members)
	for i, result := range w.client.EnqueueBulk(call, chunk, w.b.Options...) {
		switch {
		case result.Err == nil:
		case errors.Is(result.Err, asynq.ErrTaskIDConflict):
			// A scheduler that was killed may have stored the task without joining it.
			stored = append(stored, from+i)
		case isPassing(result.Err):
			return "", result.Err
		default:
			rejected, err = append(rejected, from+i), result.Err
		}
	}
	if fields = append(fields, "delayed_by", ""); err != nil {
		fields = append(fields, "reason", err.Error())
	}
	if len(stored) > 0 { // servers join them to their lines, for which the limiter must answer
		if _, err := w.config.Client.Limiter.CheckRedis(ctx); err != nil {
			return "", err
		}
	}
	if err := w.move(ctx, asynqredis.Release)(stored); err != nil {
		return "", err
	}
	if err := w.redis.Count(ctx, w.f, "rejected", rejected); err != nil {
		return "", err
	}
	return w.redis.Update(ctx, w.f, w.holder, fields...)
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
