package batch

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// heldFor is how long a task that is held would wait if nobody released it.
	heldFor = 10 * 366 * 24 * time.Hour

	// sweepAgainMost is the longest pause between two sweeps.
	sweepAgainMost = 30 * time.Second
)

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
	return errors.Join(err, w.swept(ctx, len(running)))
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
	if err := w.swept(ctx, len(running)); err != nil || w.sweepings > 0 {
		return false, err
	}
	fields, err := w.redis.Fields(ctx, w.f)
	if r = recordOf(fields); err != nil || r.ended() < r.position {
		w.sweepings = lookEvery
		return false, err
	}
	return true, w.end(ctx, r, Cancelled)
}

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
	running += len(after)
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
