package batch

import (
	"context"
	"crypto/rand"
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

const (
	// chunkSize is how many tasks are enqueued between two moves of the cursor, and in memory.
	chunkSize = 500

	// lookEvery is how often the holder looks at its firing.
	lookEvery = time.Second

	// accountAfter is after how long without progress the holder looks for tasks that others have
	// deleted or archived; then after twice as long, up to accountMost.
	accountAfter = time.Minute
	accountMost  = time.Hour

	// pauseMost is the longest pause after an error.
	pauseMost = 30 * time.Second

	// heldFor is how long a task that is held would wait if nobody released it.
	heldFor = 10 * 366 * 24 * time.Hour
)

// A work is what the holder of a firing's lease does until the firing has ended.
type work struct {
	*Scheduler
	b      *compiled
	f      asynqredis.Firing
	holder string

	ended     int           // tasks, at the last look
	since     time.Time     // when that changed
	account   time.Duration // without progress, when to account
	sweepings time.Duration // pause before the next sweep for tasks that come back
}

// work works for a firing if nobody else does.
func (s *Scheduler) work(ctx context.Context, b *compiled, f asynqredis.Firing) {
	w := &work{Scheduler: s, b: b, f: f, holder: rand.Text(), since: time.Now(), account: accountAfter}
	if fields, err := s.redis.Lease(ctx, f, w.holder, s.lease); err != nil || fields == nil {
		return
	}
	held, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		w.renew(held, cancel)
	}()
	err := w.until(held)
	cancel(nil)
	<-renewed
	if err != nil && ctx.Err() == nil && !errors.Is(err, asynqredis.ErrLeaseLost) {
		s.config.Logger.Error("batch: a firing waits for another scheduler", "batch", f.Batch, "firing", f.Name(), "error", err)
	}
	if ctx.Err() != nil { // another scheduler need not wait
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
		defer cancel()
		_, _ = s.redis.Lease(ctx, f, w.holder, 0)
	}
}

// renew renews the lease, also while a user's function takes long. It ends the context when the
// lease is lost or has run out.
func (w *work) renew(ctx context.Context, cancel context.CancelCauseFunc) {
	last := time.Now()
	for sleep(ctx, w.lease/5) {
		begun := time.Now()
		fields, err := w.redis.Lease(ctx, w.f, w.holder, w.lease)
		switch {
		case err == nil && fields == nil:
			cancel(asynqredis.ErrLeaseLost)
		case err == nil:
			last = begun
		case time.Since(last) > w.lease*4/5:
			cancel(err)
		}
	}
}

// until does what is to be done next, until the firing has ended.
func (w *work) until(ctx context.Context) error {
	for pause := lookEvery; ; {
		fields, err := w.redis.Lease(ctx, w.f, w.holder, w.lease)
		if err == nil && fields == nil {
			return context.Cause(ctx)
		}
		again := false
		r := recordOf(fields)
		if err == nil {
			again, err = w.step(ctx, r)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, asynqredis.ErrLeaseLost):
			return err
		case err != nil:
			w.config.Logger.Warn("batch: a firing is held up", "batch", w.f.Batch, "firing", w.f.Name(), "error", err)
			_, _ = w.redis.Update(ctx, w.f, w.holder, "error", err.Error())
			pause = min(2*pause, pauseMost)
		default:
			pause = lookEvery
		}
		if (err != nil || !again) && !sleep(ctx, pause) {
			return context.Cause(ctx)
		}
	}
}

// step does one thing, and reports whether there is more to do at once.
func (w *work) step(ctx context.Context, r record) (again bool, err error) {
	open := w.b.open(time.Now())
	switch {
	case r.want == wantCancel:
		return w.cancel(ctx, r)
	case !open && w.b.Hours.Stop && r.phase != phaseNew:
		_, err := w.redis.Want(ctx, w.f, wantCancel)
		return true, err
	case r.want == wantPause, !open:
		return false, w.pause(ctx, r)
	case r.held:
		return true, w.resume(ctx, r)
	case r.phase == phaseNew:
		return true, w.begin(ctx)
	case r.phase == phaseEnqueue:
		return true, w.enqueue(ctx, r)
	}
	return false, w.watch(ctx, r)
}

// begin keeps the firing's tenants.
func (w *work) begin(ctx context.Context) error {
	var tenants []string
	for tenant, err := range w.b.Tenants(ctx, w.user()) {
		if err != nil {
			return err
		}
		tenants = append(tenants, tenant)
	}
	if err := w.redis.SetTenants(ctx, w.f, tenants); err != nil {
		return err
	}
	fields := []any{"phase", phaseEnqueue, "tenants", len(tenants), "error", ""}
	_, err := w.redis.Update(ctx, w.f, w.holder, fields...)
	return err
}

// user returns the firing as users know it.
func (w *work) user() Firing { return Firing{w.f.Batch, w.f.Tick} }

// A cursor is how far a firing is enqueued.
type cursor struct {
	position int // of the next task in the firing
	tenant   int // the index of its tenant
	offset   int // how many tasks of that tenant were enqueued
	policies string
	expected time.Time // when the last of them is expected to start
}

// enqueue enqueues tasks from the cursor on, until all are, or something else is wanted.
func (w *work) enqueue(ctx context.Context, r record) error {
	at := cursor{r.position, r.tenant, r.offset, r.policies, r.expected}
	tenants, err := w.redis.Tenants(ctx, w.f, at.tenant)
	if err != nil {
		return err
	}
	chunk := make([]*asynq.Task, 0, chunkSize)
	first := at.tenant
	for i, tenant := range tenants {
		n, skip := 0, 0
		if at.tenant == first+i {
			skip = at.offset
		}
		for task, err := range w.b.Tasks(ctx, w.user(), tenant) {
			if err != nil {
				return err
			}
			if n++; n <= skip {
				continue
			}
			if chunk = append(chunk, task); len(chunk) < chunkSize {
				continue
			}
			want, err := w.flush(ctx, chunk, cursor{at.position + len(chunk), first + i, n, at.policies, at.expected}, &at, phaseEnqueue)
			if err != nil || want != wantRun || !w.b.open(time.Now()) {
				return err
			}
			chunk = chunk[:0]
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	_, err = w.flush(ctx, chunk, cursor{at.position + len(chunk), first + len(tenants), 0, at.policies, at.expected}, &at, phaseDrain)
	return err
}

// flush enqueues a chunk of tasks and moves the cursor behind it.
func (w *work) flush(ctx context.Context, chunk []*asynq.Task, next cursor, at *cursor, phase string) (want string, err error) {
	if len(chunk) > 0 {
		// A chunk that was begun is ended: a join that is cut off would make its tasks pending.
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(w.lease, leaseFor))
		defer cancel()
		members := asynqredis.Members{Firing: w.f, From: at.position}
		results := w.client.EnqueueBatch(asynqredis.WithMembers(call, members), chunk, w.b.Options...)
		var refused []int
		for i, result := range results {
			switch {
			case result.Err == nil, errors.Is(result.Err, asynq.ErrTaskIDConflict):
				if policy, ok := w.config.Client.Limiter.Match(chunk[i].Type()); ok {
					next.policies = policiesOf(next.policies, policy.Name)
				}
				if result.Start.At.After(next.expected) {
					next.expected = result.Start.At
				}
			case passes(result.Err):
				return "", result.Err
			default:
				refused, err = append(refused, at.position+i), result.Err
			}
		}
		if refused != nil {
			if err := w.redis.Refuse(ctx, w.f, refused); err != nil {
				return "", err
			}
		}
	}
	fields := []any{"phase", phase, "position", next.position, "tenant", next.tenant, "offset", next.offset, "policies", next.policies}
	if !next.expected.IsZero() {
		fields = append(fields, "expected", next.expected.Unix())
	}
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
		slices.ContainsFunc([]error{context.Canceled, context.DeadlineExceeded, io.EOF, io.ErrUnexpectedEOF, redis.ErrClosed, redis.ErrPoolTimeout},
			func(of error) bool { return errors.Is(err, of) })
}

// watch ends the firing when all of its tasks have ended.
func (w *work) watch(ctx context.Context, r record) error {
	if r.ended() >= r.position {
		return w.end(ctx, r, Done)
	}
	if r.ended() != w.ended {
		w.ended, w.since, w.account = r.ended(), time.Now(), accountAfter
	}
	if time.Since(w.since) >= w.account {
		w.account = min(w.account+time.Since(w.since), accountMost+time.Since(w.since))
		return w.sweep(r, func(positions []int) error { return w.redis.Account(ctx, w.f, positions) })
	}
	return nil
}

// end ends the firing, and enqueues the task that tells it.
func (w *work) end(ctx context.Context, r record, outcome State) error {
	r.phase, r.outcome, r.finished = phaseEnded, string(outcome), time.Now().Truncate(time.Second)
	if w.b.Ended != "" {
		if err := w.tell(ctx, r.status(w.f, 0)); err != nil {
			return err
		}
	}
	_, err := w.redis.Update(ctx, w.f, w.holder, "phase", phaseEnded, "outcome", string(outcome))
	return err
}

// pause takes the tasks of the firing out of their lines, again and again until none of them runs,
// as one that runs may come back.
func (w *work) pause(ctx context.Context, r record) error {
	if r.phase == phaseNew {
		return nil
	}
	if !w.mayComeBack(r.held) {
		return nil
	}
	running, err := w.redis.Running(ctx, w.f)
	if err != nil {
		return err
	}
	err = w.sweep(r, func(positions []int) error {
		if err := w.redis.Hold(ctx, w.f, positions, time.Now().Add(heldFor)); err != nil {
			return err
		}
		return w.leave(ctx, r, positions)
	})
	if err != nil {
		return err
	}
	_, err = w.redis.Update(ctx, w.f, w.holder, "held", 1)
	return errors.Join(err, w.swept(ctx, running))
}

// resume has the tasks join their lines again.
func (w *work) resume(ctx context.Context, r record) error {
	w.sweepings = 0
	if err := w.sweep(r, func(positions []int) error { return w.redis.Release(ctx, w.f, positions) }); err != nil {
		return err
	}
	_, err := w.redis.Update(ctx, w.f, w.holder, "held", 0)
	return err
}

// cancel deletes the tasks that wait, again and again until none is left.
func (w *work) cancel(ctx context.Context, r record) (again bool, err error) {
	if r.phase == phaseNew || r.phase == phaseDrain && r.ended() >= r.position {
		return true, w.end(ctx, r, Cancelled)
	}
	if !w.mayComeBack(true) {
		return false, nil
	}
	running, err := w.redis.Running(ctx, w.f)
	if err != nil {
		return false, err
	}
	err = w.sweep(r, func(positions []int) error {
		if err := w.redis.Delete(ctx, w.f, positions); err != nil {
			return err
		}
		if err := w.leave(ctx, r, positions); err != nil {
			return err
		}
		return w.redis.Account(ctx, w.f, positions)
	})
	if err != nil {
		return false, err
	}
	if err := w.swept(ctx, running); err != nil || w.sweepings > 0 {
		return false, err
	}
	fields, err := w.redis.Fields(ctx, w.f)
	if r = recordOf(fields); err != nil || r.ended() < r.position {
		w.sweepings = lookEvery
		return false, err
	}
	return true, w.end(ctx, r, Cancelled)
}

// sweepAgainMost is the longest pause between two sweeps.
const sweepAgainMost = 30 * time.Second

// mayComeBack reports whether it is time for the next sweep. The first is at once.
func (w *work) mayComeBack(swept bool) bool {
	return !swept || w.sweepings == 0 || w.sweepings > 0 && time.Since(w.since) >= w.sweepings
}

// swept notes a sweep, before which so many tasks were running. If none was, and none is, it is the
// last.
func (w *work) swept(ctx context.Context, running int) error {
	w.since = time.Now()
	after, err := w.redis.Running(ctx, w.f)
	if err != nil {
		return err
	}
	running += after
	switch {
	case running == 0:
		w.sweepings = -1
	case w.sweepings <= 0:
		w.sweepings = lookEvery
	default:
		w.sweepings = min(2*w.sweepings, sweepAgainMost)
	}
	return nil
}

// sweep calls do for the positions of all tasks that were enqueued, and of a chunk more: its cursor
// may not have been moved.
func (w *work) sweep(r record, do func(positions []int) error) error {
	last := r.position
	if r.phase == phaseEnqueue {
		last += chunkSize
	}
	positions := make([]int, 0, chunkSize)
	for position := range last {
		if positions = append(positions, position); len(positions) == chunkSize || position == last-1 {
			if err := do(positions); err != nil {
				return err
			}
			positions = positions[:0]
		}
	}
	return nil
}

// leave takes tasks out of the lines in which they may wait.
func (w *work) leave(ctx context.Context, r record, positions []int) error {
	identity, err := w.redis.Identity(ctx)
	if err != nil {
		return err
	}
	policies := strings.Split(r.policies, ",")
	for _, line := range w.config.Client.Limiter.Lines() {
		if !slices.Contains(policies, throttle.PolicyOf(line)) {
			continue
		}
		for some := range slices.Chunk(positions, throttle.MaxTake) {
			tickets := make([]throttle.Ticket, len(some))
			for i, position := range some {
				tickets[i] = throttle.Ticket{Queue: identity + "/" + w.f.Queue, ID: w.f.ID(position)}
			}
			if err := w.config.Client.Limiter.Line(line).Leave(ctx, tickets...); err != nil && !errors.Is(err, throttle.ErrUnknownPolicy) {
				return err
			}
		}
	}
	return nil
}
