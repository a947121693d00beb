package batch

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
)

// accountAfter is after how long without progress the holder looks for tasks that others have
// deleted or archived; then after twice as long, up to accountMost.
const (
	accountAfter = time.Minute
	accountMost  = time.Hour
)

// watch ends the firing when all of its tasks have ended.
func (w *work) watch(ctx context.Context, r record) error {
	if r.ended() >= r.Position {
		return w.end(ctx, r, StateDone)
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

// end ends the firing, and enqueues the task that reports it.
func (w *work) end(ctx context.Context, r record, outcome State) error {
	r.Phase, r.Outcome, r.EndedAt, r.HeldUp = phaseEnded, outcome, time.Now().Unix(), ""
	if w.b.Ended != "" {
		if err := w.report(ctx, w.b.status(w.f, r, 0)); err != nil {
			return err
		}
	}
	_, err := w.redis.Update(ctx, w.f, w.holder, "phase", phaseEnded, "outcome", string(outcome), "held_up", "")
	return err
}

// endedRetention is how long the task that reports the end of a firing keeps its ID, so that it is
// enqueued once.
const endedRetention = 24 * time.Hour

// report enqueues the task that reports the end of the firing.
func (w *work) report(ctx context.Context, s Status) error {
	payload, err := json.Marshal(s)
	if err != nil {
		return err
	}
	task := worker.NewTask(worker.Identity{Tenant: w.f.Batch}, w.b.Ended, payload)
	_, err = w.client.EnqueueContext(ctx, task,
		asynq.TaskID(w.f.IDs()+"ended"), asynq.Queue(w.f.Queue), asynq.Retention(endedRetention))
	if errors.Is(err, asynq.ErrTaskIDConflict) {
		return nil
	}
	return err
}
