package dispatch

import (
	"context"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// restore puts back tasks that have been ready since before a time, and their tickets to their positions. It
// reports whether it could. If not, the tasks stay ready.
func (d *Dispatcher) restore(before time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for b := &d.buffer; ; {
		last := b.readyBefore(before) - 1
		if last < 0 {
			return true
		}
		task := b.ready[last]
		b.ready = slices.Delete(b.ready, last, last+1)
		d.mu.Unlock()
		err := d.restoreTask(task)
		d.mu.Lock()
		if err != nil {
			b.ready = slices.Insert(b.ready, b.readyBefore(task.active), task)
			return false
		}
	}
}

// restoreTask puts a ready task back, and its ticket.
func (d *Dispatcher) restoreTask(task Task) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), troubleTimeout)
	defer cancel()
	r := asynqredis.RestoreOptions{Ref: task.Ref, Call: task.Call, Mark: asynqredis.KeptMark}
	if task.Verdict != nil && task.Verdict.Taken {
		r.At = time.Now().Add(fallbackMin)
	}
	if _, err := d.Tasks.Restore(ctx, r); err != nil && !asynqredis.IsNotFound(err) {
		return err
	}
	switch verdict := task.Verdict; {
	case verdict == nil:
	case verdict.Taken:
		set := d.lines.setOf(task.Queue)
		set.sinceTurn = max(0, set.sinceTurn-1)
		if !verdict.Decision.Queued { // else it has joined again
			d.putBack(verdict.Line, task.Queue, verdict.TakenTicket)
		}
	default:
		d.refund(verdict.Line, task.Queue, verdict.TakenTicket)
	}
	return nil
}

// putBack returns tickets to their positions, and refunds their units. One that was taken without units has
// no position in the line as it is now: its task, which is scheduled, is due at once, and joins in front.
func (d *Dispatcher) putBack(line, queue string, tickets ...throttle.TakenTicket) {
	give := func(l Line, ctx context.Context, tickets []throttle.TakenTicket) error {
		var joins []asynqredis.Move
		for _, t := range tickets {
			if !t.Decision.Granted {
				move := asynqredis.Move{ID: t.ID, JoinKey: t.Key, At: time.Now(), Line: line, Mark: asynqredis.FrontMark}
				joins = append(joins, move)
			}
		}
		if _, err := d.Tasks.Apply(ctx, queue, false, joins); err != nil {
			return err
		}
		if len(joins) > 0 {
			d.WakeAt(queue, time.Now())
		}
		return l.PutBack(ctx, tickets)
	}
	d.giveTicketsBack(line, queue, tickets, give)
}

// refund gives back the units of tickets that leave.
func (d *Dispatcher) refund(line, queue string, tickets ...throttle.TakenTicket) {
	d.giveTicketsBack(line, queue, tickets, Line.Refund)
}

// giveTicketsBack gives tickets back in the background, and asks their line again: other tickets may fit.
func (d *Dispatcher) giveTicketsBack(line, queue string, tickets []throttle.TakenTicket,
	give func(Line, context.Context, []throttle.TakenTicket) error,
) {
	if len(tickets) == 0 {
		return
	}
	d.RetryInBackground(func(ctx context.Context) error {
		err := give(d.Line(line), ctx, tickets)
		if err == nil {
			d.Expect(line, queue, 0)
		}
		return err
	})
}
