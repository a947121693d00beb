package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
)

// recountFirst is the time without progress after which the holder looks for tasks that others have
// deleted or archived. The time until the next look doubles each time, up to recountMost.
const (
	recountFirst = time.Minute
	recountMost  = time.Hour
)

// watch counts tasks that others have ended.
func (w *work) watch(ctx context.Context, r record) error {
	if r.ended() != w.ended {
		w.ended, w.progressed, w.recountAfter = r.ended(), time.Now(), recountFirst
	}
	if time.Since(w.progressed) >= w.recountAfter {
		w.recountAfter = time.Since(w.progressed) + min(w.recountAfter, recountMost)
		return w.eachChunk(r, func(indexes []int) error { return w.redis.Count(ctx, w.f, "failed", indexes) })
	}
	return nil
}

// stops reports whether so many tasks have failed that the firing stops, if some are left (not during a retry).
func (w *work) stops(r record) bool {
	tooMany := r.Failed > 0 && 100*r.Failed >= w.b.stopAt*r.Size
	someLeft := r.Phase == phaseEnqueue || r.Phase == phaseDrain && r.ended() < r.Index
	return w.b.stopAt > 0 && tooMany && someLeft && r.Stopped == neverStopped
}

// stop pauses the firing, and enqueues the task that reports it.
func (w *work) stop(ctx context.Context, r record) error {
	w.config.Logger.Error("batch: a firing stops, as too many tasks have failed",
		"batch", w.f.Batch, "firing", w.f.Name(), "failed", r.Failed, "tasks", r.Size)
	if _, err := w.redis.Want(ctx, w.f, wantPause); err != nil {
		return err
	}
	running, err := w.redis.Running(ctx, w.f)
	if err != nil {
		return err
	}
	r.Stopped, r.Want = isStopped, wantPause
	if err := w.report(ctx, r, len(running), "stopped"); err != nil {
		return err
	}
	_, err = w.redis.Update(ctx, w.f, w.holder, "stopped", isStopped)
	return err
}

// end ends the firing, and enqueues the task that reports it.
func (w *work) end(ctx context.Context, r record, outcome State) error {
	r.Phase, r.Outcome, r.Finished, r.DelayedBy = phaseEnded, outcome, time.Now().Unix(), ""
	if err := w.report(ctx, r, 0, "ended"); err != nil {
		return err
	}
	_, err := w.redis.Update(ctx, w.f, w.holder, "phase", phaseEnded, "outcome", string(outcome), "delayed_by", "")
	return err
}

// endedRetention is how long a task that reports on a firing keeps its ID, so that it is enqueued once.
const endedRetention = 24 * time.Hour

// report enqueues the task of Batch.Ended. A firing that was retried ends, and reports, once more.
func (w *work) report(ctx context.Context, r record, running int, what string) error {
	if w.b.Ended == "" {
		return nil
	}
	payload, err := json.Marshal(w.b.status(w.f, r, running))
	if err != nil {
		return err
	}
	task := worker.NewTask(worker.Identity{Tenant: w.f.Batch}, w.b.Ended, payload)
	id := fmt.Sprintf("%s%s-%d", w.f.IDPrefix(), what, r.Round)
	_, err = w.client.EnqueueContext(ctx, task,
		asynq.TaskID(id), asynq.Queue(w.f.Queue), asynq.Retention(endedRetention))
	if errors.Is(err, asynq.ErrTaskIDConflict) {
		return nil
	}
	return err
}
