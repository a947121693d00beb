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
	for err := call(d.ctx); err != nil; err = call(d.ctx) {
		if d.ctx.Err() != nil {
			return false
		}
		d.mu.Lock()
		if d.waiting {
			d.failed = err
			signal(d.ready)
		}
		d.mu.Unlock()
		d.sleep(errorPause)
	}
	return true
}

// put makes tasks ready, and reports whether there are any.
func (d *Dispatcher) put(f *fetched) bool {
	if len(f.tasks) == 0 {
		return false
	}
	f.at = time.Now()
	d.mu.Lock()
	d.buffer.fetched = append(d.buffer.fetched, f)
	d.waiting = false
	d.mu.Unlock()
	signal(d.ready)
	return true
}

// pick makes the tasks of a queue ready whose tickets were taken from a line, and handles the tickets
// whose tasks cannot be picked. It reports whether any task is ready.
func (d *Dispatcher) pick(l *line, name string, grants []*Grant) bool {
	_, queue, _ := strings.Cut(name, "/") // behind the identity of asynq's Redis
	f := &fetched{group: l.group, queue: queue, callID: d.Asynq.Call(), line: l.name}
	waiting := make([]asynqredis.Waiting, len(grants))
	for i, grant := range grants {
		waiting[i] = asynqredis.Waiting{ID: grant.ID, JoinKey: grant.Key}
	}
	var picks []asynqredis.Pick
	if !d.insist(func(ctx context.Context) (err error) {
		picks, err = d.Asynq.Pick(ctx, queue, f.callID, waiting)
		return err
	}) {
		return false
	}
	var back, gone []throttle.TakenTicket
	for i, pick := range picks {
		grant := grants[i]
		switch {
		case pick.Message != nil:
			task := Task{Ref: asynqredis.Ref{Queue: queue, ID: grant.ID}, Message: pick.Message, Grant: grant, call: f.callID}
			f.tasks = append(f.tasks, task)
		case pick.Paused:
			d.mu.Lock()
			d.lines.paused[queue] = true
			d.mu.Unlock()
			back = append(back, grant.TakenTicket)
		default: // a pending task reserves when it is dequeued, an active one joins again if it is denied
			gone = append(gone, grant.TakenTicket)
		}
	}
	d.putBack(l.name, queue, back)
	d.GiveBack(l.name, queue, gone...)
	d.reserveAgain(f)
	return d.put(f)
}

// reserveAgain reserves for tasks whose tickets were taken without units, as the policy had other scopes
// when they joined. A task that is denied has joined by the scopes of now, and goes back to wait.
func (d *Dispatcher) reserveAgain(f *fetched) {
	isDenied := func(t Task) bool { return t.Grant.Decision.Queued }
	if !slices.ContainsFunc(f.tasks, Task.isOpen) {
		return
	}
	d.reserve(f.group, f.tasks)
	var denied []string
	for _, task := range f.tasks {
		if isDenied(task) {
			denied = append(denied, task.ID)
			d.Expect(task.Grant.Line, f.queue, task.Grant.Decision.RetryIn)
		}
	}
	f.tasks = slices.DeleteFunc(f.tasks, isDenied)
	if len(denied) == 0 {
		return
	}
	d.insist(func(ctx context.Context) error {
		return d.Asynq.Restore(ctx, f.queue, f.callID, denied, time.Now().Add(fallbackMin), "")
	})
	d.WakeAt(f.queue, time.Now()) // a ticket may have been taken before its task was back
}

// dequeue makes pending tasks of a queue ready, with what was decided about them. It also looks at the
// list of the lines in which tasks of the queue wait, with the lines that this server watches.
func (d *Dispatcher) dequeue(g *group, queue string, n int, watched []any) bool {
	f := &fetched{group: g, queue: queue, callID: d.Asynq.Call()}
	var found asynqredis.Dequeued
	if !d.insist(func(ctx context.Context) (err error) {
		found, err = d.Asynq.DequeuePending(ctx, queue, f.callID, n, watched...)
		return err
	}) {
		return false
	}
	d.mu.Lock()
	g.unwatched(found.Unwatched)
	d.lines.paused[queue] = found.Paused
	d.mu.Unlock()
	for _, m := range found.Messages {
		f.tasks = append(f.tasks, Task{Ref: asynqredis.Ref{Queue: queue, ID: m.ID()}, Message: m, call: f.callID})
	}
	d.reserve(g, f.tasks)
	return d.put(f)
}

// isOpen reports whether nothing is decided about a task.
func (t Task) isOpen() bool { return t.Grant == nil || !t.Grant.Decision.Granted && !t.Grant.NeverFits }

// reserve reserves for the open tasks of one call, in one call for each line. So no slot waits for it. A
// task that gets no decision here gets one in the middleware.
func (d *Dispatcher) reserve(g *group, tasks []Task) {
	identity, err := d.Asynq.Identity(d.ctx)
	if err != nil {
		return
	}
	requests := map[string][]throttle.Request{}
	asking := map[string][]*Task{} // by line
	for i, task := range tasks {
		match, ok := d.Match(task.Message, task.Grant != nil)
		if !ok || !task.isOpen() {
			continue
		}
		r := match.Request
		if task.Grant != nil {
			r.Front, r.Since = true, task.Grant.Since // it had its turn
		}
		r.Ticket = throttle.Ticket{Queue: identity + "/" + task.Queue, ID: task.ID}
		line := d.Limiter.LineOf(r.Policy, r.Tenant)
		requests[line], asking[line] = append(requests[line], r), append(asking[line], &tasks[i])
	}
	for line, all := range requests {
		d.mu.Lock()
		l := g.lines[line]
		silent := l == nil || time.Now().Before(later(l.failed.Until, d.lines.silence.Until))
		d.mu.Unlock()
		if silent {
			continue
		}
		call, cancel := context.WithTimeout(d.ctx, takeTimeout)
		sent := time.Now()
		tickets, err := d.Limiter.Line(line).Reserve(call, all)
		cancel()
		if errors.Is(unavailable(err), throttle.ErrUnavailable) {
			d.fails(l, err)
		}
		for i, ticket := range tickets {
			if task := asking[line][i]; ticket.ID != "" {
				if task.Grant != nil {
					ticket.Since, ticket.Waited = task.Grant.Since, task.Grant.Waited
				}
				task.Grant = &Grant{TakenTicket: ticket, Line: line, Sent: sent}
			}
		}
	}
}

// restore puts back tasks that have been ready since before a time, and their tickets to their ranks. It
// reports whether it could. If not, the tasks stay ready.
func (d *Dispatcher) restore(before time.Time) bool {
	d.mu.Lock()
	old := d.buffer.since(before)
	d.mu.Unlock()
	for i, f := range old {
		if d.undo(f) != nil {
			d.mu.Lock()
			d.buffer.fetched = append(old[i:], d.buffer.fetched...)
			d.mu.Unlock()
			return false
		}
	}
	return true
}

// undo puts the tasks of a call back that are ready.
func (d *Dispatcher) undo(f *fetched) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), troubleTimeout)
	defer cancel()
	var ids []string
	for _, task := range f.tasks {
		ids = append(ids, task.ID)
	}
	var at time.Time // to pending
	if f.line != "" {
		at = time.Now().Add(fallbackMin)
	}
	if err := d.Asynq.Restore(ctx, f.queue, f.callID, ids, at, ""); err != nil {
		return err
	}
	var tickets []throttle.TakenTicket
	for _, task := range f.tasks {
		if f.line != "" {
			tickets = append(tickets, task.Grant.TakenTicket)
		} else if task.Grant != nil {
			d.GiveBack(task.Grant.Line, f.queue, task.Grant.TakenTicket)
		}
	}
	d.putBack(f.line, f.queue, tickets)
	return nil
}

// putBack returns tickets to their ranks, with their units. One that was taken without units has no rank
// in the line as it is now: its task, which is at rest, is due at once, and joins again.
func (d *Dispatcher) putBack(line, queue string, tickets []throttle.TakenTicket) {
	d.back(line, queue, tickets, func(l Line, ctx context.Context, tickets []throttle.TakenTicket) error {
		var joins []asynqredis.Arranged
		for _, t := range tickets {
			if !t.Decision.Granted {
				task := asynqredis.Waiting{ID: t.ID, JoinKey: t.Key}
				joins = append(joins, asynqredis.Arranged{Waiting: task, At: time.Now()})
			}
		}
		if err := d.Asynq.Arrange(ctx, queue, joins); err != nil {
			return err
		}
		if len(joins) > 0 {
			d.WakeAt(queue, time.Now())
		}
		return l.PutBack(ctx, tickets)
	})
}

// GiveBack refunds tickets that leave.
func (d *Dispatcher) GiveBack(line, queue string, tickets ...throttle.TakenTicket) {
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
		err := give(d.Limiter.Line(line), ctx, tickets)
		if err == nil {
			d.Expect(line, queue, 0)
		}
		return err
	})
}
