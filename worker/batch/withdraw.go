package batch

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// sweepAgainMost is the longest pause between two sweeps.
const sweepAgainMost = 30 * time.Second

// pause takes the tasks of the firing out of their lines, again and again until none of them runs,
// as one that runs may come back.
func (w *work) pause(ctx context.Context, r record) error {
	if r.Phase == phaseNew || r.Held && (w.sweepings < 0 || time.Since(w.since) < w.sweepings) {
		return nil // it is not yet time for the next sweep; the first is at once
	}
	if err := w.withdraw(ctx, r, w.move(ctx, asynqredis.Hold)); err != nil {
		return err
	}
	_, err := w.redis.Update(ctx, w.f, w.holder, "held", 1)
	return err
}

// resume has the tasks join their lines again, and lets them be picked until the hours end.
func (w *work) resume(ctx context.Context, r record) error {
	w.sweepings = 0
	if err := w.sweep(r, w.move(ctx, asynqredis.Release)); err != nil {
		return err
	}
	_, err := w.redis.Update(ctx, w.f, w.holder, "held", 0, "closes", w.b.closes(w.f.Tick, time.Now()))
	return err
}

// move does something with tasks of the firing.
func (w *work) move(ctx context.Context, verb string) func(indexes []int) error {
	return func(indexes []int) error { return w.redis.Move(ctx, w.f, verb, indexes) }
}

// retry has all tasks wait again that have failed. The firing goes on.
func (w *work) retry(ctx context.Context, r record) error {
	fates, err := w.fates(ctx, w.f)
	if err != nil {
		return err
	}
	err = w.sweep(r, func(indexes []int) error {
		failed := slices.DeleteFunc(slices.Clone(indexes), func(i int) bool { return fates.of(i) != fateFailed })
		return w.move(ctx, asynqredis.RetryFailed)(failed)
	})
	if err != nil {
		return err
	}
	_, err = w.redis.Update(ctx, w.f, w.holder, "phase", phaseDrain, "stopped", 0)
	return err
}

// cancel deletes the tasks that wait, again and again until none is left.
func (w *work) cancel(ctx context.Context, r record) (again bool, err error) {
	if r.Phase == phaseNew || r.Phase == phaseDrain && r.ended() >= r.Index {
		return true, w.end(ctx, r, StateCancelled)
	}
	if time.Since(w.since) < w.sweepings {
		return false, nil
	}
	err = w.withdraw(ctx, r, func(indexes []int) error {
		if err := w.move(ctx, asynqredis.Delete)(indexes); err != nil {
			return err
		}
		return w.redis.Count(ctx, w.f, "failed", indexes)
	})
	if err != nil || w.sweepings > 0 {
		return false, err
	}
	fields, err := w.redis.Fields(ctx, w.f)
	if err == nil {
		r, err = recordOf(fields)
	}
	if err != nil || r.ended() < r.Index {
		w.sweepings = lookEvery
		return false, err
	}
	return true, w.end(ctx, r, StateCancelled)
}

// withdraw takes tasks from where they wait, by a function for their indexes, and out of their
// lines. If none was running before and none is after, it was the last time.
func (w *work) withdraw(ctx context.Context, r record, from func(indexes []int) error) error {
	before, err := w.redis.Running(ctx, w.f)
	if err != nil {
		return err
	}
	lines, err := w.lines(ctx)
	if err != nil {
		return err
	}
	err = w.sweep(r, func(indexes []int) error {
		if err := from(indexes); err != nil {
			return err
		}
		return w.leave(ctx, lines, indexes)
	})
	if err != nil {
		return err
	}
	w.since = time.Now()
	after, err := w.redis.Running(ctx, w.f)
	switch {
	case err != nil:
		return err
	case len(before)+len(after) == 0:
		w.sweepings = -1
	case w.sweepings <= 0:
		w.sweepings = lookEvery
	default:
		w.sweepings = min(2*w.sweepings, sweepAgainMost)
	}
	return nil
}

// sweep calls do for the indexes of all tasks that were enqueued, and of a chunk more: its cursor
// may not have been moved.
func (w *work) sweep(r record, do func(indexes []int) error) error {
	last := r.Index
	if r.Phase == phaseEnqueue {
		last += chunkSize
	}
	indexes := make([]int, 0, chunkSize)
	for index := range last {
		if indexes = append(indexes, index); len(indexes) == chunkSize || index == last-1 {
			if err := do(indexes); err != nil {
				return err
			}
			indexes = indexes[:0]
		}
	}
	return nil
}

// lines are those in which tasks of the firing may wait.
func (w *work) lines(ctx context.Context) (lines []string, err error) {
	p, err := w.kept(ctx, w.f)
	policies := map[string]bool{}
	for _, t := range p.Tenants {
		for _, k := range t.Kinds {
			policies[k.Policy] = true
		}
	}
	for _, line := range w.config.Client.Limiter.Lines() {
		if policies[throttle.PolicyOf(line)] {
			lines = append(lines, line)
		}
	}
	return lines, err
}

// leave takes tasks out of lines.
func (w *work) leave(ctx context.Context, lines []string, indexes []int) error {
	identity, err := w.redis.Identity(ctx)
	if err != nil {
		return err
	}
	for _, line := range lines {
		for some := range slices.Chunk(indexes, throttle.MaxTake) {
			tickets := make([]throttle.Ticket, len(some))
			for i, index := range some {
				tickets[i] = throttle.Ticket{Queue: identity + "/" + w.f.Queue, ID: w.f.ID(index)}
			}
			err := w.config.Client.Limiter.Line(line).Leave(ctx, tickets...)
			if err != nil && !errors.Is(err, throttle.ErrUnknownPolicy) {
				return err
			}
		}
	}
	return nil
}
