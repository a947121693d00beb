package dispatch

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// lookEvery is how often a server looks at its queues at least: for pending tasks, and for lines
	// that nobody watches. In a test kit that knows of pending tasks it is lookEveryKit.
	lookEvery    = time.Second
	lookEveryKit = time.Minute

	// pendingFor is how many tasks from lines earn pending tasks one.
	pendingFor = 3
)

// pending dequeues pending tasks, unless there were none a moment ago. It reports whether it found any.
func (d *Dispatcher) pending(g *group, n int) (found bool) {
	now := time.Now()
	if !g.strict && now.Before(g.lookAt) {
		return false
	}
	if !d.isQuiet(g, now) {
		var watched []any
		if now.Sub(g.watchedAt) >= watchEvery {
			watched, g.watchedAt = g.watched(), now
		}
		for _, queue := range g.draw(d.Queues) {
			if d.dequeue(g, queue, n, watched) {
				return true
			}
		}
	}
	every := min(d.Poll, lookEvery)
	g.earned, g.lookAt = 0, now.Add(every*3/4+rand.N(max(1, every/2)))
	return false
}

// isQuiet reports, in a test kit, that a look at the queues of a group would find nothing.
func (d *Dispatcher) isQuiet(g *group, now time.Time) bool {
	mayHave := func(queue string) bool { return d.lines.paused[queue] || d.HasPending(queue) }
	return d.HasPending != nil && now.Sub(g.watchedAt) < lookEveryKit && !slices.ContainsFunc(g.queues, mayHave)
}

// draw returns the queues in the order of this round: each is the next with a chance by its
// priority, as in asynq.
func (g *group) draw(priorities map[string]int) []string {
	drawn := map[string]float64{}
	for _, queue := range g.queues {
		drawn[queue] = rand.ExpFloat64() / float64(priorities[queue])
	}
	return slices.SortedFunc(maps.Keys(drawn), func(a, b string) int { return cmp.Compare(drawn[a], drawn[b]) })
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
