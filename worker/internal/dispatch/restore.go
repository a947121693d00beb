package dispatch

import (
	"context"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// restore puts the ready tasks back, and their tickets to their positions, if the first task was made active at the
// cutoff or earlier. The last task goes first, so that pending tasks keep their order. restore reports whether it
// succeeded. If not, it has slept, and the tasks that are left, the failed one included, are still ready.
func (d *Dispatcher) restore(cutoff time.Time) bool {
	for {
		d.mu.Lock()
		last := len(d.buffer.ready) - 1
		if last < 0 || d.buffer.ready[0].activeSince.After(cutoff) {
			d.mu.Unlock()
			return true
		}
		task := d.buffer.ready[last]
		d.buffer.ready = d.buffer.ready[:last]
		d.mu.Unlock()
		defer d.WakeAt(task.Queue, time.Now()) // the task may be due; deferred until all are back, in their order
		if d.restoreTask(task) != nil {
			d.makeReady([]Task{task})
			d.sleep(retryAfterError)
			return false
		}
	}
}

// restoreTask puts back a task that got no slot: with its ticket, if it is from a line; else its units are refunded.
// A denied task has no units to give back, only a ticket in line. A task with an uncharged ticket joins in front, now.
func (d *Dispatcher) restoreTask(task Task) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), cleanUpTimeout)
	defer cancel()
	verdict, now := task.Verdict, time.Now()
	r := asynqredis.RestoreOptions{Ref: task.Ref, CallKey: task.CallKey, Mark: asynqredis.KeptMark}
	if verdict != nil && verdict.FromLine {
		r.At = now.Add(fallbackMin)
		if verdict.isUncharged() {
			r.At, r.Mark = now.Truncate(time.Second), asynqredis.FrontMark
		}
	}
	due, err := d.Tasks.Restore(ctx, r)
	if err != nil && !asynqredis.IsNotFound(err) {
		return err
	}
	if due { // its ticket was taken meanwhile
		d.WakeAt(task.Queue, now)
	}
	switch {
	case verdict == nil:
	case verdict.FromLine:
		set := d.setOf(task.Queue)
		set.sinceTurn = max(0, set.sinceTurn-1)
		d.giveBack((*throttle.Line).PutBack, verdict.Line, verdict.TakenTicket)
	default:
		d.giveBack((*throttle.Line).Refund, verdict.Line, verdict.TakenTicket)
	}
	return nil
}
