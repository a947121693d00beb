package dispatch

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// takeTimeout is how long a take may block asynq's dequeue.
const takeTimeout = 250 * time.Millisecond

// takeFrom takes from the first line of a group that has a ticket that fits.
func (d *Dispatcher) takeFrom(ctx context.Context, g *group, n int, now time.Time) (found bool, err error) {
	for l := d.lines.due(g, now); l != nil && !found && err == nil && !d.isStopped(); l = d.lines.due(g, now) {
		found, err = d.take(ctx, l, n)
	}
	return found, err
}

// take takes from a line, and picks. Found reports that a task has become ready. The error is that
// of asynq's Redis.
func (d *Dispatcher) take(ctx context.Context, l *line, n int) (found bool, err error) {
	queues, err := d.open(ctx, l.group)
	if err != nil {
		return false, err
	}
	due, nudged := d.lines.sent(l, len(queues) == 0)
	if len(queues) == 0 {
		return false, nil
	}
	call, cancel := context.WithTimeout(ctx, takeTimeout)
	sent := time.Now()
	taken, err := d.Limiter.Line(l.name).Take(call, throttle.TakeOptions{Queues: queues, Strict: d.Strict, Max: n})
	cancel()
	if err != nil {
		d.failed(l, err)
		return false, nil
	}
	d.lines.answered(l, taken, sent)
	d.Answered(l.name, taken.At)
	switch {
	case nudged && len(taken.Tickets) >= n: // more may fit
		d.nudgeOthers(l.group.queues, l.name)
	case nudged && len(taken.Tickets) == 0 && d.Asynq.Changed(ctx):
		d.Expect(l.name, l.group.queues[0], 0)
	}
	for i, f := range d.fetchesOf(l, taken, sent) {
		if i == 0 {
			f.due = later(due, sent.Add(-taken.Tickets[0].Waited))
		}
		n, failed := d.fetch(ctx, f)
		if failed != nil {
			err = failed // the other queues' tickets are picked all the same, or kept to be picked
		}
		found = found || n > 0
	}
	return found, err
}

// open returns the queues to take from for a group, as the limiter knows them, with their priorities:
// its own, and the more important ones, without those that are paused.
func (d *Dispatcher) open(ctx context.Context, g *group) (map[string]int, error) {
	identity, err := d.Asynq.Identity(ctx)
	if err != nil {
		return nil, err
	}
	d.lines.Lock()
	defer d.lines.Unlock()
	names := map[string]int{}
	for _, queue := range g.with {
		if !d.lines.paused[queue] {
			names[identity+"/"+queue] = d.Queues[queue]
		}
	}
	return names, nil
}

// fetchesOf groups taken tickets by queue.
func (d *Dispatcher) fetchesOf(l *line, taken throttle.Taken, sent time.Time) (all []*fetch) {
	byQueue := map[string]*fetch{}
	for _, ticket := range taken.Tickets {
		f := byQueue[ticket.Queue]
		if f == nil {
			_, queue, _ := strings.Cut(ticket.Queue, "/")
			f = &fetch{
				group: l.group, queue: queue, callID: d.Asynq.Call(), line: l.name, sent: sent, taken: taken.At,
			}
			byQueue[ticket.Queue] = f
			all = append(all, f)
		}
		f.tickets = append(f.tickets, ticket)
	}
	return all
}

// failed notes that a call of a line failed.
func (d *Dispatcher) failed(l *line, err error) {
	if d.lines.failed(l, err, time.Now()) {
		d.Failed(l.name, unavailable(err))
	}
}

// unavailable returns the error of a limiter that did not answer in time.
func unavailable(err error) error {
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, throttle.ErrUnavailable) {
		return fmt.Errorf("%w: %w", throttle.ErrUnavailable, err)
	}
	return err
}
