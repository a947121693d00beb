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
	found := insist(d.ctx, d, func(ctx context.Context) (asynqredis.DequeueReply, error) {
		return d.Tasks.DequeuePending(ctx, queue, call, n, watched...)
	})
	for _, name := range found.Unwatched {
		if line := fmt.Sprint(name); set.lines[line] != nil {
			d.Nudge(queue, line)
		}
	}
	d.paused[queue] = found.Paused
	tasks := make([]Task, len(found.Messages))
	for i, m := range found.Messages {
		tasks[i] = d.newTask(queue, call, m, nil)
	}
	d.reserve(set, tasks)
	set.sinceTurn = max(0, set.sinceTurn-pendingFor*len(tasks))
	return d.makeReady(tasks)
}

// reserve reserves for the tasks of one call about which nothing is decided, in their order, in one call for
// each line. So no slot waits for it, and a task that is denied has joined. One that gets no decision here gets
// one in the middleware. A ticket decides nothing that was taken without units, as its policy had other scopes
// when it joined, or whose tenant is in another shard now.
func (d *Dispatcher) reserve(set *queueSet, tasks []Task) {
	identity, err := d.Tasks.Identity(d.ctx)
	if err != nil {
		return
	}
	requests, asking := map[string][]throttle.Request{}, map[string][]*Task{} // by line
	for i, task := range tasks {
		taken := task.Verdict
		if taken != nil && (taken.Decision.Granted || taken.NeverFits) &&
			taken.Line == d.Limiter.LineOf(throttle.PolicyOf(taken.Line), taken.Decision.Tenant) {
			continue
		}
		r, line, ok := d.request(identity, task.Queue, task.Message, taken != nil)
		if !ok {
			continue
		}
		if taken != nil {
			r.Front, r.Since = true, taken.Since // it had its turn
		}
		requests[line], asking[line] = append(requests[line], r), append(asking[line], &tasks[i])
	}
	for line, all := range requests {
		l := set.lines[line]
		if l == nil || time.Now().Before(latest(l.backoff.Until, d.backoff.Until)) {
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
