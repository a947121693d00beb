package dispatch

import (
	"context"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// restore puts back tasks that have been ready since before a time, and their tickets to their positions: the
// last one first, so that what was pending keeps its order. It reports whether it could. If not, the others
// are ready again.
func (d *Dispatcher) restore(before time.Time) bool {
	d.mu.Lock()
	ready := d.buffer.ready
	n := 0
	for n < len(ready) && !ready[n].active.After(before) {
		n++
	}
	d.buffer.ready = ready[n:]
	d.mu.Unlock()
	for n > 0 && d.restoreTask(ready[n-1]) == nil {
		n--
	}
	if n == 0 {
		return true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.buffer.ready = slices.Concat(ready[:n], d.buffer.ready)
	signal(d.ready)
	return false
}

// restoreTask puts a ready task back, and its ticket.
func (d *Dispatcher) restoreTask(task Task) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), troubleTimeout)
	defer cancel()
	r := asynqredis.RestoreOptions{Ref: task.Ref, Call: task.Call, Mark: asynqredis.KeptMark}
	if task.Verdict != nil && task.Verdict.Taken {
		r.At = time.Now().Add(fallbackMin)
	}
	due, err := d.Tasks.Restore(ctx, r)
	if err != nil && !asynqredis.IsNotFound(err) {
		return err
	}
	if due { // its ticket was taken meanwhile
		d.WakeAt(task.Queue, time.Now())
	}
	switch verdict := task.Verdict; {
	case verdict == nil:
	case verdict.Taken:
		set := d.lines.setOf(task.Queue)
		set.sinceTurn = max(0, set.sinceTurn-1)
		if verdict.Decision.Queued { // it has joined again
			d.Expect(verdict.Line, task.Queue, verdict.Decision.RetryIn)
		} else {
			d.putBack(verdict.Line, task.Queue, verdict.TakenTicket)
		}
	default:
		d.giveBack((*throttle.Line).Refund, verdict.Line, task.Queue, verdict.TakenTicket)
	}
	return nil
}

// putBack returns tickets to their positions, and refunds their units. One that was taken without units has
// no position in the line as it is now: its task, which is scheduled, is due at once, and joins in front.
func (d *Dispatcher) putBack(line, queue string, tickets ...throttle.TakenTicket) {
	var joins []asynqredis.Move
	for _, t := range tickets {
		if !t.Decision.Granted {
			move := asynqredis.Move{ID: t.ID, JoinKey: t.Key, At: time.Now(), Line: line, Mark: asynqredis.FrontMark}
			joins = append(joins, move)
		}
	}
	if len(joins) > 0 {
		d.RetryInBackground(func(ctx context.Context) error {
			_, err := d.Tasks.Apply(ctx, queue, joins)
			d.WakeAt(queue, time.Now())
			return err
		})
	}
	d.giveBack((*throttle.Line).PutBack, line, queue, tickets...)
}

// giveBack gives the units of tickets back in the background, and asks their line again: other tickets may fit.
// Tickets that leave the line are a Refund.
func (d *Dispatcher) giveBack(give func(*throttle.Line, context.Context, []throttle.TakenTicket) error,
	line, queue string, tickets ...throttle.TakenTicket,
) {
	if len(tickets) == 0 {
		return
	}
	d.RetryInBackground(func(ctx context.Context) error {
		err := give(d.Limiter.Line(line), ctx, tickets)
		if err == nil {
			d.Expect(line, queue, 0)
		}
		return err
	})
}
