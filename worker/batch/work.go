package batch

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// lookEvery is how often the holder looks at its firing.
	lookEvery = time.Second

	// delayLeast delays the next try after an error. The delay doubles up to delayMost, until chunks go through again.
	delayLeast = 250 * time.Millisecond
	delayMost  = 30 * time.Second
)

// A work is the state of the holder of a firing's lease while it works for the firing.
type work struct {
	*Scheduler
	b      *compiled
	f      asynqredis.Firing
	holder string

	ended        int           // tasks that had ended at the last look
	progressed   time.Time     // when ended last changed
	recountAfter time.Duration // how long after `progressed` watch counts anew
	swept        time.Time     // when withdraw last swept
	sweepDelay   time.Duration // before the next sweep for tasks that come back; 0: now; or neverAgain
}

// work works for a firing if nobody else does.
func (s *Scheduler) work(ctx context.Context, b *compiled, f asynqredis.Firing) {
	w := &work{Scheduler: s, b: b, f: f, holder: rand.Text(), progressed: time.Now(), recountAfter: recountFirst}
	if err := s.redis.Lease(ctx, f, w.holder, s.lease); err != nil {
		return
	}
	leased, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var goroutines sync.WaitGroup
	goroutines.Go(func() { w.renew(leased, cancel) })
	goroutines.Go(func() { w.estimate(leased) })
	err := w.loop(leased)
	cancel(nil)
	goroutines.Wait()
	if err != nil && ctx.Err() == nil && !errors.Is(err, asynqredis.ErrNotHolder) {
		s.config.Logger.Error("batch: a firing waits until a scheduler takes it",
			"batch", f.Batch, "firing", f.Name(), "error", err)
	}
	if ctx.Err() != nil { // another scheduler need not wait
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
		defer cancel()
		_ = s.redis.Lease(ctx, f, w.holder, 0)
	}
}

// renew renews the lease, however long a user's function takes. It ends the context when the lease is (nearly) lost.
func (w *work) renew(ctx context.Context, cancel context.CancelCauseFunc) {
	last := time.Now()
	for sleep(ctx, w.lease/5) {
		begun := time.Now()
		err := w.redis.Lease(ctx, w.f, w.holder, w.lease)
		switch {
		case errors.Is(err, asynqredis.ErrNotHolder):
			cancel(err)
		case err == nil:
			last = begun
		case time.Since(last) > w.lease*4/5:
			cancel(err)
		}
	}
}

func (w *work) read(ctx context.Context) (record, error) {
	fields, err := w.redis.Fields(ctx, w.f)
	if err != nil {
		return record{}, err
	}
	return recordOf(fields)
}

// loop does step after step, until the firing has ended.
func (w *work) loop(ctx context.Context) error {
	delay, index := delayLeast, -1
	for {
		again, r := false, record{}
		err := w.redis.Lease(ctx, w.f, w.holder, w.lease)
		if err == nil {
			r, err = w.read(ctx)
		}
		if r.Index != index {
			delay, index = delayLeast, r.Index
		}
		if err == nil {
			again, err = w.guarded(ctx, r)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, asynqredis.ErrNotHolder):
			return err
		case err != nil:
			w.config.Logger.Warn("batch: a firing is delayed", "batch", w.f.Batch, "firing", w.f.Name(), "error", err)
			fields := []any{"delayed_by", err.Error()}
			if r.DelayedBy == "" {
				fields = append(fields, "delayed_since", time.Now().Unix())
			}
			_, _ = w.redis.Update(ctx, w.f, w.holder, fields...)
			if !sleep(ctx, delay) {
				return context.Cause(ctx)
			}
			delay = min(2*delay, delayMost)
			continue
		case r.DelayedBy != "":
			_, _ = w.redis.Update(ctx, w.f, w.holder, "delayed_by", "")
		}
		delay = delayLeast
		if !again && !sleep(ctx, lookEvery) {
			return context.Cause(ctx)
		}
	}
}

// guarded calls step, and recovers from its panics. The firing outlives this process: a panic that ended
// the process would end the next process, too.
func (w *work) guarded(ctx context.Context, r record) (again bool, err error) {
	defer func() {
		if value := recover(); value != nil {
			again, err = false, fmt.Errorf("batch: a panic: %v", value)
			w.config.Logger.Error("batch: a function of the batch panicked", "panic", value, "stack", string(debug.Stack()))
		}
	}()
	return w.step(ctx, r)
}

// step does one thing, and reports whether there is more to do at once.
func (w *work) step(ctx context.Context, r record) (again bool, err error) {
	tick, now := w.f.Tick, time.Now()
	open := w.b.open(tick, now)
	switch {
	case r.Want == wantCancel:
		return w.cancel(ctx, r)
	case w.stops(r):
		return true, w.stop(ctx, r)
	case r.Phase == phaseDrain && r.Want != wantPause && r.ended() >= r.Index: // also after its hours
		return true, w.end(ctx, r, StateDone)
	case r.Want == wantPause, !open:
		return false, w.pause(ctx, r)
	case r.SetAside, r.Closes != w.b.closes(tick, now):
		return true, w.resume(ctx, r)
	case r.Phase == phaseNew:
		if waits, err := w.waits(ctx); waits || err != nil {
			return false, err
		}
		return true, w.begin(ctx, r)
	case r.Phase == phaseEnqueue:
		return true, w.enqueue(ctx, r)
	case r.Phase == phaseRetry:
		return true, w.retry(ctx, r)
	}
	return false, w.watch(ctx, r)
}

// waits reports whether the firing waits until earlier firings have ended.
func (w *work) waits(ctx context.Context) (bool, error) {
	if w.b.Overlap != OverlapQueue {
		return false, nil
	}
	known, err := w.redis.Schedule(ctx, w.b.Queue, w.b.Name, "")
	return slices.ContainsFunc(known.Open, func(f asynqredis.Firing) bool { return f.Tick.Before(w.f.Tick) }), err
}

// begin plans the firing, and keeps the plan: its tenants, and how many tasks they have.
func (w *work) begin(ctx context.Context, r record) error {
	p, err := w.plan(ctx, w.b, Firing{w.f.Batch, w.f.Tick}, time.Now(), nil)
	if err != nil {
		return err
	}
	fields := append(expectedFields(p.all.Finish), "planned", expected(p.all.Finish), "size", p.total)
	details := []any{
		"batch", w.f.Batch, "firing", w.f.Name(), "finish_by", w.b.deadline(w.f.Tick), "overdue", p.all.Late,
		"unknown", p.all.Unknown, "binds", p.all.Binds, "changes", p.all.changes,
	}
	switch {
	case p.refused:
		w.config.Logger.Error("batch: nothing is enqueued, as tasks would end too late", details...)
		reason := fmt.Sprintf("batch: %d tasks are expected to end too late: nothing is enqueued", p.all.Late)
		if _, err = w.redis.Update(ctx, w.f, w.holder, append(fields, "reason", reason)...); err == nil {
			r, err = w.read(ctx)
		}
		if err != nil {
			return err
		}
		return w.end(ctx, r, StateRefused)
	case p.all.Late > 0:
		w.config.Logger.Warn("batch: tasks are expected to end too late", details...)
	case w.b.FinishBy != "" && len(p.all.Unknown) > 0:
		w.config.Logger.Warn("batch: tasks may end too late, as not all that binds them is known", details...)
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	_, err = w.redis.Update(ctx, w.f, w.holder, append(fields, "phase", phaseEnqueue, ":"+keptPlan, string(text))...)
	return err
}
