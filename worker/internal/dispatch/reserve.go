package dispatch

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// reserve reserves for pending tasks of one queue that were dequeued together, in one call for each
// line. So no slot waits for it. A task that gets no decision here gets one in the middleware.
func (d *Dispatcher) reserve(ctx context.Context, g *group, queue string, tasks []Task) {
	identity, err := d.Asynq.Identity(ctx)
	if err != nil {
		return
	}
	requests := map[string][]throttle.Request{}
	of := map[string][]int{} // by line: the tasks of its requests
	for i, task := range tasks {
		match, ok := d.Match(task.Message, false)
		if !ok {
			continue
		}
		r := match.Request
		r.Ticket = throttle.Ticket{Queue: identity + "/" + queue, ID: task.ID}
		line := d.Limiter.LineOf(r.Policy, r.Tenant)
		requests[line] = append(requests[line], r)
		of[line] = append(of[line], i)
	}
	for line, all := range requests {
		l := d.lines.answering(g, line, time.Now())
		if l == nil {
			continue
		}
		call, cancel := context.WithTimeout(ctx, takeTimeout)
		sent := time.Now()
		tickets, err := d.Limiter.Line(line).Reserve(call, all)
		cancel()
		if errors.Is(unavailable(err), throttle.ErrUnavailable) {
			d.failed(l, err)
		}
		for j, ticket := range tickets {
			if ticket.ID != "" {
				tasks[of[line][j]].Grant = &Grant{TakenTicket: ticket, Line: line, Sent: sent}
			}
		}
	}
}
