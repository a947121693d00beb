package dispatch

import (
	"context"
	"maps"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// stuckPause is the first pause before a line is asked again whose next task was active. It
	// about doubles.
	stuckPause = 10 * time.Millisecond

	// stuckMax is how long a ticket keeps its place while its task is active. Then it leaves, and the
	// task joins again when it comes to rest.
	stuckMax = time.Second
)

// pick returns the tasks of tickets, and handles the tickets whose tasks cannot be picked.
func (d *Dispatcher) pick(ctx context.Context, f *fetch) ([]Task, error) {
	now := time.Now()
	wanted := make([]asynqredis.Waiting, len(f.tickets))
	d.lines.Lock()
	for i, ticket := range f.tickets {
		since, stuck := d.lines.stuck[asynqredis.Ref{Queue: f.queue, ID: ticket.ID}]
		wanted[i] = asynqredis.Waiting{
			ID: ticket.ID, JoinKey: ticket.Key,
			Left: !ticket.Decision.Granted || stuck && now.Sub(since) > stuckMax,
		}
	}
	d.lines.Unlock()
	picks, err := d.Asynq.Pick(ctx, f.queue, f.callID, wanted)
	if err != nil {
		return nil, err
	}
	var ready []Task
	var back, gone []throttle.TakenTicket
	var again time.Duration
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
			if wanted[i].Left {
				gone = append(gone, ticket)
			} else {
				back, again = append(back, ticket), max(again, stuckPause, d.stuckFor(ref, now))
			}
		case asynqredis.Paused:
			d.setPaused(f.queue, true)
			back, again = append(back, ticket), pausedFor
		default: // a pending one reserves when it is picked up
			gone = append(gone, ticket)
		}
	}
	d.putBack(f.line, f.queue, again, back)
	d.GiveBack(f.line, f.queue, gone...)
	return ready, nil
}

// stuckFor returns for how long a task has been active whose ticket was taken. It may be about to come
// to rest.
func (d *Dispatcher) stuckFor(ref asynqredis.Ref, now time.Time) time.Duration {
	d.lines.Lock()
	defer d.lines.Unlock()
	stuck := d.lines.stuck
	maps.DeleteFunc(stuck, func(_ asynqredis.Ref, since time.Time) bool { return now.Sub(since) > 2*stuckMax })
	since, known := stuck[ref]
	if !known {
		since = now
		stuck[ref] = now
	}
	return now.Sub(since)
}
