package dispatch

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// insist repeats a call on asynq's Redis until it is answered, as it may have made tasks active. While
// Next waits it returns the errors. The result is false if the dispatcher is closed before.
func (d *Dispatcher) insist(call func(ctx context.Context) error) bool {
	for begun := time.Now(); ; {
		err := call(d.ctx)
		if err != nil && d.ctx.Err() != nil {
			return false
		}
		if d.AsynqAnswers(err, time.Since(begun)); err == nil {
			return true
		}
		d.mu.Lock()
		if d.waiting {
			d.failed = err
			signal(d.ready)
		}
		d.mu.Unlock()
		d.sleep(errorPause)
	}
}

// put makes tasks ready, and reports whether there are any.
func (d *Dispatcher) put(tasks []Task) bool {
	if len(tasks) == 0 {
		return false
	}
	d.mu.Lock()
	d.buffer.ready = append(d.buffer.ready, tasks...)
	d.waiting = false
	d.mu.Unlock()
	signal(d.ready)
	return true
}

// pick makes the tasks of a queue ready whose tickets were taken from a line, and handles the tickets
// whose tasks cannot be picked. It reports whether any task is ready.
func (d *Dispatcher) pick(l *line, name string, grants []*Grant) bool {
	_, queue, _ := strings.Cut(name, "/") // behind the identity of asynq's Redis
	call, waiting := d.Asynq.Call(), make([]asynqredis.Waiting, len(grants))
	for i, grant := range grants {
		waiting[i] = asynqredis.Waiting{ID: grant.ID, JoinKey: grant.Key}
	}
	var picks []asynqredis.Pick
	if !d.insist(func(ctx context.Context) (err error) {
		picks, err = d.Asynq.Pick(ctx, queue, call, waiting)
		return err
	}) {
		return false
	}
	var tasks []Task
	var back, gone []throttle.TakenTicket
	for i, pick := range picks {
		grant := grants[i]
		switch {
		case pick.Message != nil:
			tasks = append(tasks, d.task(queue, call, pick.Message, grant))
		case pick.Paused:
			d.lines.paused[queue] = true
			back = append(back, grant.TakenTicket)
		default: // a pending task reserves when it is dequeued, an active one joins again if it is denied
			gone = append(gone, grant.TakenTicket)
		}
	}
	d.putBack(l.name, queue, back...)
	d.giveBack(l.name, queue, gone...)
	d.reserve(l.group, tasks) // units that these were taken without
	l.group.earned += len(tasks)
	return d.put(slices.DeleteFunc(tasks, d.rests))
}

// rests puts a taken task back that was denied when it reserved again, as it has joined by then. It reports
// whether it could: otherwise the task wakes to be denied.
func (d *Dispatcher) rests(t Task) bool {
	if !t.Grant.Decision.Queued || d.undo(t) != nil {
		return false
	}
	d.Expect(t.Grant.Line, t.Queue, t.Grant.Decision.RetryIn)
	d.WakeAt(t.Queue, time.Now()) // its ticket may have been taken before it was back
	return true
}

func (d *Dispatcher) task(queue, call string, m asynqredis.Message, grant *Grant) Task {
	ref := asynqredis.Ref{Queue: queue, ID: m.ID()}
	return Task{Ref: ref, Message: m, Grant: grant, Call: call, active: time.Now()}
}

// dequeue makes pending tasks of a queue ready, with what was decided about them. It also looks at the
// list of the lines in which tasks of the queue wait, with the lines that this server watches.
func (d *Dispatcher) dequeue(g *group, queue string, n int, watched []any) bool {
	call := d.Asynq.Call()
	var found asynqredis.Dequeued
	if !d.insist(func(ctx context.Context) (err error) {
		found, err = d.Asynq.DequeuePending(ctx, queue, call, n, watched...)
		return err
	}) {
		return false
	}
	g.unwatched(found.Unwatched)
	d.lines.paused[queue] = found.Paused
	tasks := make([]Task, len(found.Messages))
	for i, m := range found.Messages {
		tasks[i] = d.task(queue, call, m, nil)
	}
	d.reserve(g, tasks)
	g.earned = max(0, g.earned-pendingFor*len(tasks))
	return d.put(tasks)
}

// isOpen reports whether nothing is decided about a task, such as if its ticket was taken without units, as
// its policy had other scopes when it joined. It is open, too, if its tenant is in another shard now.
func (d *Dispatcher) isOpen(t Task) bool {
	g := t.Grant
	return g == nil || !g.Decision.Granted && !g.NeverFits ||
		g.Line != d.Limiter.LineOf(throttle.PolicyOf(g.Line), g.Decision.Tenant)
}

// reserve reserves for the open tasks of one call, in their order, in one call for each line. So no slot
// waits for it, and a task that is denied has joined. One that gets no decision here gets one in the
// middleware.
func (d *Dispatcher) reserve(g *group, tasks []Task) {
	identity, err := d.Asynq.Identity(d.ctx)
	if err != nil {
		return
	}
	requests := map[string][]throttle.Request{}
	asking := map[string][]*Task{} // by line
	for i, task := range tasks {
		if !d.isOpen(task) {
			continue
		}
		r, ok := d.Match(task.Message, task.Grant != nil)
		if !ok {
			continue
		}
		if task.Grant != nil {
			r.Front, r.Since = true, task.Grant.Since // it had its turn
		}
		r.Ticket = throttle.Ticket{Queue: identity + "/" + task.Queue, ID: task.ID}
		line := d.Limiter.LineOf(r.Policy, r.Tenant)
		requests[line], asking[line] = append(requests[line], r), append(asking[line], &tasks[i])
	}
	for line, all := range requests {
		l := g.lines[line]
		if l == nil || time.Now().Before(later(l.failed.Until, d.lines.silence.Until)) {
			continue
		}
		call, cancel := context.WithTimeout(d.ctx, takeTimeout)
		sent := time.Now()
		tickets, err := d.Line(line).Reserve(call, all)
		cancel()
		if errors.Is(unavailable(err), throttle.ErrUnavailable) {
			d.fails(l, err)
		}
		for i, ticket := range tickets {
			if task := asking[line][i]; ticket.ID != "" {
				g := task.Grant
				if g != nil {
					ticket.Since, ticket.Waited = g.Since, g.Waited
					d.giveBack(g.Line, task.Queue, g.TakenTicket)
				}
				task.Grant = &Grant{TakenTicket: ticket, Line: line, Sent: sent, Taken: g != nil}
			}
		}
	}
}

// restore puts back tasks that have been ready since before a time, and their tickets to their ranks. It
// reports whether it could. If not, the tasks stay ready.
func (d *Dispatcher) restore(before time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for b := &d.buffer; ; {
		last := b.since(before) - 1
		if last < 0 {
			return true
		}
		task := b.ready[last]
		b.ready = slices.Delete(b.ready, last, last+1)
		d.mu.Unlock()
		err := d.undo(task)
		d.mu.Lock()
		if err != nil {
			b.ready = slices.Insert(b.ready, b.since(task.active), task)
			return false
		}
	}
}

// undo puts a task back that is ready.
func (d *Dispatcher) undo(task Task) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), troubleTimeout)
	defer cancel()
	r := asynqredis.Restored{Queue: task.Queue, Call: task.Call, Mark: asynqredis.KeptMark}
	if task.Grant != nil && task.Grant.Taken {
		r.At = time.Now().Add(fallbackMin)
	}
	if err := d.Asynq.Restore(ctx, r, task.ID); err != nil {
		return err
	}
	switch grant := task.Grant; {
	case grant == nil:
	case grant.Taken:
		g := d.lines.groupOf(task.Queue)
		g.earned = max(0, g.earned-1)
		if !grant.Decision.Queued { // else it has joined again
			d.putBack(grant.Line, task.Queue, grant.TakenTicket)
		}
	default:
		d.giveBack(grant.Line, task.Queue, grant.TakenTicket)
	}
	return nil
}

// putBack returns tickets to their ranks, with their units. One that was taken without units has no rank
// in the line as it is now: its task, which is at rest, is due at once, and joins again in front.
func (d *Dispatcher) putBack(line, queue string, tickets ...throttle.TakenTicket) {
	d.back(line, queue, tickets, func(l Line, ctx context.Context, tickets []throttle.TakenTicket) error {
		var joins []asynqredis.Move
		for _, t := range tickets {
			if !t.Decision.Granted {
				move := asynqredis.Move{ID: t.ID, JoinKey: t.Key, At: time.Now(), Line: line, Mark: asynqredis.FrontMark}
				joins = append(joins, move)
			}
		}
		if _, err := d.Asynq.Apply(ctx, queue, false, joins); err != nil {
			return err
		}
		if len(joins) > 0 {
			d.WakeAt(queue, time.Now())
		}
		return l.PutBack(ctx, tickets)
	})
}

// giveBack refunds tickets that leave.
func (d *Dispatcher) giveBack(line, queue string, tickets ...throttle.TakenTicket) {
	d.back(line, queue, tickets, Line.Refund)
}

// back gives tickets back in the background, and asks their line again: other tickets may fit.
func (d *Dispatcher) back(line, queue string, tickets []throttle.TakenTicket,
	give func(Line, context.Context, []throttle.TakenTicket) error,
) {
	if len(tickets) == 0 {
		return
	}
	d.Later(func(ctx context.Context) error {
		err := give(d.Line(line), ctx, tickets)
		if err == nil {
			d.Expect(line, queue, 0)
		}
		return err
	})
}
