package batch

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// sweepAgainMost is the longest delay between two sweeps. neverAgain is the sweepDelay if no task can come back.
const sweepAgainMost, neverAgain = 30 * time.Second, time.Duration(-1)

// pause takes the firing's waiting tasks out of their lines. It does so again until none of its tasks runs, as running
// tasks may come back to wait.
func (w *work) pause(ctx context.Context, r record) error {
	isSwept := r.SetAside && (w.sweepDelay == neverAgain || time.Since(w.swept) < w.sweepDelay) // for now
	if r.Phase == phaseNew || isSwept {
		return nil
	}
	if err := w.withdraw(ctx, r, w.move(ctx, asynqredis.SetAside)); err != nil {
		return err
	}
	_, err := w.redis.Update(ctx, w.f, w.holder, "set_aside", 1)
	return err
}

// resume stores the time until which servers may pick the tasks, and makes the tasks join their lines again at once.
func (w *work) resume(ctx context.Context, r record) error {
	w.sweepDelay = 0
	_, err := w.redis.Update(ctx, w.f, w.holder, "resumed", 0, "closes", w.b.closes(w.f.Tick, time.Now()))
	if err == nil {
		err = w.eachChunk(r, w.move(ctx, asynqredis.Release))
	}
	if err == nil {
		_, err = w.redis.Update(ctx, w.f, w.holder, "set_aside", 0)
	}
	return err
}

// move returns a function that does what the verb says with tasks of the firing.
func (w *work) move(ctx context.Context, verb string) func(indexes []int) error {
	return func(indexes []int) error { return w.redis.Move(ctx, w.f, verb, indexes) }
}

// retry makes all failed tasks wait again. The firing goes on.
func (w *work) retry(ctx context.Context, r record) error {
	fates, err := w.fates(ctx, w.f)
	if err != nil {
		return err
	}
	err = w.eachChunk(r, func(indexes []int) error {
		failed := slices.DeleteFunc(slices.Clone(indexes), func(i int) bool { return fates.at(i) != fateFailed })
		return w.move(ctx, asynqredis.RetryFailed)(failed)
	})
	if err != nil {
		return err
	}
	_, err = w.redis.Update(ctx, w.f, w.holder, "phase", phaseDrain, "stopped", neverStopped)
	return err
}

// cancel deletes the waiting tasks. It does so again until none is left.
func (w *work) cancel(ctx context.Context, r record) (again bool, err error) {
	if r.Phase == phaseNew || r.Phase == phaseDrain && r.ended() >= r.Index {
		return true, w.end(ctx, r, StateCancelled)
	}
	if time.Since(w.swept) < w.sweepDelay {
		return false, nil
	}
	err = w.withdraw(ctx, r, func(indexes []int) error {
		if err := w.move(ctx, asynqredis.Delete)(indexes); err != nil {
			return err
		}
		return w.redis.Count(ctx, w.f, "failed", indexes)
	})
	if err != nil || w.sweepDelay != neverAgain {
		return false, err
	}
	r, err = w.read(ctx)
	if err != nil || r.ended() < r.Index {
		w.sweepDelay = lookEvery
		return false, err
	}
	return true, w.end(ctx, r, StateCancelled)
}

// withdraw moves waiting tasks, by a function for their indexes, and takes them out of their lines. If no
// task ran before, and none runs after, it need not be called again.
func (w *work) withdraw(ctx context.Context, r record, move func(indexes []int) error) error {
	running, err := w.redis.Running(ctx, w.f)
	if err != nil {
		return err
	}
	lines, err := w.lines(ctx)
	if err != nil {
		return err
	}
	err = w.eachChunk(r, func(indexes []int) error {
		if err := move(indexes); err != nil {
			return err
		}
		return w.leave(ctx, lines, indexes)
	})
	if err != nil {
		return err
	}
	w.swept = time.Now()
	after, err := w.redis.Running(ctx, w.f)
	switch {
	case err != nil:
		return err
	case len(running)+len(after) == 0:
		w.sweepDelay = neverAgain
	case w.sweepDelay == 0, w.sweepDelay == neverAgain:
		w.sweepDelay = lookEvery
	default:
		w.sweepDelay = min(2*w.sweepDelay, sweepAgainMost)
	}
	return nil
}

// eachChunk calls do for the indexes of all enqueued tasks, and of one chunk more: the cursor may lag.
func (w *work) eachChunk(r record, do func(indexes []int) error) error {
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

// lines returns the lines in which tasks of the firing may wait.
func (w *work) lines(ctx context.Context) (lines []string, err error) {
	p, err := w.readPlan(ctx, w.f)
	policies := map[string]bool{}
	for _, t := range p.Tenants {
		for _, k := range t.Kinds {
			policies[k.Policy] = true
		}
	}
	limiter := w.config.Client.Limiter
	return slices.DeleteFunc(limiter.Lines(), func(line string) bool {
		p, _ := limiter.Lookup(line)
		return !policies[p.Name]
	}), err
}

func (w *work) leave(ctx context.Context, lines []string, indexes []int) error {
	database, err := w.redis.Database(ctx)
	if err != nil {
		return err
	}
	for _, line := range lines {
		for some := range slices.Chunk(indexes, throttle.MaxTake) {
			tickets := make([]throttle.Ticket, len(some))
			for i, index := range some {
				tickets[i] = throttle.Ticket{Queue: database + "/" + w.f.Queue, ID: w.f.ID(index)}
			}
			err := w.config.Client.Limiter.Line(line).Leave(ctx, tickets...)
			if err != nil && !errors.Is(err, throttle.ErrUnknownPolicy) {
				return err
			}
		}
	}
	return nil
}
