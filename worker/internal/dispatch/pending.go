package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

const (
	// lookEvery is about how often a server looks at its queues, a quarter more at most: for pending
	// tasks, and for lines that nobody watches.
	lookEvery = time.Second

	// pendingFor is how many tasks from lines earn pending tasks one.
	pendingFor = 3
)

// takePending dequeues pending tasks, unless there were none a moment ago. It reports whether it found any.
func (d *Dispatcher) takePending(set *queueSet, n int) (found bool) {
	now := time.Now()
	if !set.strict && now.Before(set.lookAt) {
		return false
	}
	var watched []any
	if now.Sub(set.watchedAt) >= watchEvery {
		watched, set.watchedAt = set.watched(), now
	}
	for _, queue := range set.draw(d.Queues) {
		if d.dequeue(set, queue, n, watched) {
			return true
		}
	}
	every := min(d.Poll, lookEvery)
	set.sinceTurn, set.lookAt = 0, now.Add(every*3/4+rand.N(max(1, every/2)))
	return false
}

// draw returns the queues in the order of this round: each is the next with a chance by its
// priority, as in asynq.
func (set *queueSet) draw(priorities map[string]int) []string {
	drawn := map[string]float64{}
	for _, queue := range set.queues {
		drawn[queue] = rand.ExpFloat64() / float64(priorities[queue])
	}
	return slices.SortedFunc(maps.Keys(drawn), func(a, b string) int { return cmp.Compare(drawn[a], drawn[b]) })
}

// dequeue makes pending tasks of a queue ready, with what was decided about them. It also looks at the
// list of the lines in which tasks of the queue wait, with the lines that this server watches.
func (d *Dispatcher) dequeue(set *queueSet, queue string, n int, watched []any) bool {
	call := d.Tasks.NewCall()
	var found asynqredis.DequeueReply
	if !d.insist(func(ctx context.Context) (err error) {
		found, err = d.Tasks.DequeuePending(ctx, queue, call, n, watched...)
		return err
	}) {
		return false
	}
	for _, name := range found.Unwatched {
		if l := set.lines[fmt.Sprint(name)]; l != nil {
			l.nudge()
		}
	}
	d.lines.paused[queue] = found.Paused
	tasks := make([]Task, len(found.Messages))
	for i, m := range found.Messages {
		tasks[i] = d.newTask(queue, call, m, nil)
	}
	d.reserve(set, tasks)
	set.sinceTurn = max(0, set.sinceTurn-pendingFor*len(tasks))
	return d.makeReady(tasks)
}

// isUndecided reports whether nothing is decided about a task, such as if its ticket was taken without units,
// as its policy had other scopes when it joined, or if its tenant is in another shard now.
func (d *Dispatcher) isUndecided(t Task) bool {
	verdict := t.Verdict
	return verdict == nil || !verdict.Decision.Granted && !verdict.NeverFits ||
		verdict.Line != d.Limiter.LineOf(throttle.PolicyOf(verdict.Line), verdict.Decision.Tenant)
}

// reserve reserves for the undecided tasks of one call, in their order, in one call for each line. So no
// slot waits for it, and a task that is denied has joined. One that gets no decision here gets one in the
// middleware.
func (d *Dispatcher) reserve(set *queueSet, tasks []Task) {
	identity, err := d.Tasks.Identity(d.ctx)
	if err != nil {
		return
	}
	requests, asking := map[string][]throttle.Request{}, map[string][]*Task{} // by line
	for i, task := range tasks {
		if !d.isUndecided(task) {
			continue
		}
		r, line, ok := d.request(identity, task.Queue, task.Message, task.Verdict != nil)
		if !ok {
			continue
		}
		if task.Verdict != nil {
			r.Front, r.Since = true, task.Verdict.Since // it had its turn
		}
		requests[line], asking[line] = append(requests[line], r), append(asking[line], &tasks[i])
	}
	for line, all := range requests {
		l := set.lines[line]
		if l == nil || time.Now().Before(latest(l.backoff.Until, d.lines.backoff.Until)) {
			continue
		}
		call, cancel := context.WithTimeoutCause(d.ctx, takeTimeout, outage.ErrSilent)
		sent := time.Now()
		tickets, err := d.Limiter.Line(line).Reserve(call, all)
		cancel()
		if errors.Is(err, throttle.ErrUnavailable) {
			d.noteFailure(l, err)
		}
		for i, ticket := range tickets {
			if task := asking[line][i]; ticket.ID != "" {
				before := task.Verdict
				if before != nil {
					ticket.Since, ticket.Waited = before.Since, before.Waited
					d.giveBack((*throttle.Line).Refund, before.Line, task.Queue, before.TakenTicket)
				}
				task.Verdict = &Verdict{TakenTicket: ticket, Line: line, Sent: sent, Taken: before != nil}
			}
		}
	}
}

// request returns the request of a task of a queue, and the line in which it waits, if it joins one.
func (d *Dispatcher) request(
	identity, queue string, m asynqredis.Message, waited bool,
) (r throttle.Request, line string, ok bool) {
	if r, ok = d.Match(m, waited); ok {
		r.Ticket = throttle.Ticket{Queue: identity + "/" + queue, ID: m.ID()}
		line = d.Limiter.LineOf(r.Policy, r.Tenant)
	}
	return r, line, ok
}
