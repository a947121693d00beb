package dispatch

import (
	"context"
	"maps"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// stuckPause is the first pause before a line is asked again whose next task was active. It
	// about doubles.
	stuckPause = 10 * time.Millisecond

	// stuckMax is how long a ticket keeps its place while its task is active.
	stuckMax = time.Second
)

// picksOf groups taken tickets by queue.
func (d *Dispatcher) picksOf(l *line, taken throttle.Taken, sent time.Time) []*fetch {
	var all []*fetch
	byQueue := map[string]*fetch{}
	for _, ticket := range taken.Tickets {
		f := byQueue[ticket.Queue]
		if f == nil {
			_, queue, _ := strings.Cut(ticket.Queue, "/")
			f = &fetch{line: l.name, queue: queue, callID: d.Asynq.Call(), sent: sent, taken: taken.At}
			byQueue[ticket.Queue] = f
			all = append(all, f)
		}
		f.tickets = append(f.tickets, ticket)
	}
	return all
}

// pick returns the tasks of tickets, and handles the tickets whose tasks cannot be picked.
func (d *Dispatcher) pick(ctx context.Context, f *fetch) ([]Task, error) {
	wanted := make([]asynqredis.Waiting, len(f.tickets))
	for i, ticket := range f.tickets {
		wanted[i] = asynqredis.Waiting{ID: ticket.ID, JoinKey: ticket.Key}
	}
	picks, err := d.Asynq.Pick(ctx, f.queue, f.callID, wanted)
	if err != nil {
		return nil, err
	}
	var ready []Task
	var back, gone []throttle.TakenTicket
	var again time.Duration
	now := time.Now()
	for i, pick := range picks {
		ticket := f.tickets[i]
		ref := asynqredis.Ref{Queue: f.queue, ID: ticket.ID}
		switch pick.Found {
		case asynqredis.Picked:
			// A take that was not answered at once hands out later what it had charged then.
			charged := f.sent.Add(-max(0, f.taken.Sub(ticket.Decision.At)))
			grant := &Grant{TakenTicket: ticket, Line: f.line, Sent: charged}
			if i == 0 {
				grant.Due = f.due
			}
			ready = append(ready, Task{ref, pick.Message, grant})
		case asynqredis.Active:
			if pause, ok := d.stuckFor(ref, now); ok {
				back, again = append(back, ticket), max(again, pause)
			} else {
				gone = append(gone, ticket)
			}
		case asynqredis.Paused:
			d.notePaused(f.queue)
			back, again = append(back, ticket), pausedFor
		default: // a pending one reserves when it is picked up
			gone = append(gone, ticket)
		}
	}
	d.putBack(f.line, f.queue, again, back)
	d.GiveBack(f.line, f.queue, gone...)
	return ready, nil
}

// stuckFor returns when to ask again for a ticket whose task is active. It may be about to come to
// rest. It is not ok if the task has been active for too long: the ticket is dropped then.
func (d *Dispatcher) stuckFor(ref asynqredis.Ref, now time.Time) (pause time.Duration, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.stuck, func(_ asynqredis.Ref, since time.Time) bool {
		return now.Sub(since) > 2*stuckMax
	})
	since, known := d.stuck[ref]
	if !known {
		since = now
		d.stuck[ref] = now
	}
	if now.Sub(since) > stuckMax {
		delete(d.stuck, ref)
		return 0, false
	}
	return max(stuckPause, now.Sub(since)), true
}
