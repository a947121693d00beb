package dispatch

import (
	"context"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// stuckPause is the first pause before a line is asked again whose next task was active. It
	// doubles.
	stuckPause = 10 * time.Millisecond

	// stuckMax is how long a ticket keeps its place while its task is active.
	stuckMax = time.Second
)

// A picking is the tickets of one queue from one take.
type picking struct {
	line    string
	queue   string
	call    string
	due     time.Time // of the first ticket; zero: unknown
	sent    time.Time
	taken   time.Time // by the clock of Redis
	tickets []throttle.TakenTicket
}

// pickings groups taken tickets by queue.
func (d *Dispatcher) pickings(l *line, taken throttle.Taken, sent time.Time) []*picking {
	var all []*picking
	byQueue := map[string]*picking{}
	for _, ticket := range taken.Tickets {
		p := byQueue[ticket.Queue]
		if p == nil {
			_, queue, _ := strings.Cut(ticket.Queue, "/")
			p = &picking{line: l.name, queue: queue, call: d.Asynq.Call(), sent: sent, taken: taken.At}
			byQueue[ticket.Queue] = p
			all = append(all, p)
		}
		p.tickets = append(p.tickets, ticket)
	}
	return all
}

// pick makes the tasks of tickets ready, and handles the tickets whose tasks cannot be picked. If
// it gets no answer it must be repeated before anything else, as some tasks may be active.
func (d *Dispatcher) pick(ctx context.Context, p *picking) error {
	wanted := make([]asynqredis.Waiting, len(p.tickets))
	for i, ticket := range p.tickets {
		wanted[i] = asynqredis.Waiting{ID: ticket.ID, JoinKey: ticket.Key}
	}
	picks, err := d.Asynq.Pick(ctx, p.queue, p.call, wanted)
	if err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.lost = append(d.lost, p)
		if timer := d.acks[p.line]; timer != nil {
			timer.Stop()
		}
		return err
	}
	var ready []Task
	var back, gone []throttle.TakenTicket
	var again time.Duration
	now := time.Now()
	for i, pick := range picks {
		ticket := p.tickets[i]
		ref := asynqredis.Ref{Queue: p.queue, ID: ticket.ID}
		switch pick.Found {
		case asynqredis.Picked:
			// A take that was not answered at once hands out later what it had charged then.
			charged := p.sent.Add(-max(0, p.taken.Sub(ticket.Decision.At)))
			grant := &Grant{TakenTicket: ticket, Line: p.line, Sent: charged}
			if i == 0 {
				grant.Due = p.due
			}
			ready = append(ready, Task{ref, pick.Message, grant})
		case asynqredis.Active:
			if pause, ok := d.stuckFor(ref, now); ok {
				back, again = append(back, ticket), max(again, pause)
			} else {
				gone = append(gone, ticket)
			}
		case asynqredis.Paused:
			d.pause(p.queue)
			back, again = append(back, ticket), pausedFor
		default: // a pending one reserves when it is picked up
			gone = append(gone, ticket)
		}
	}
	d.ready(&batch{queue: p.queue, call: p.call, line: p.line, at: now}, ready)
	d.putBack(p.line, p.queue, again, back)
	d.GiveBack(p.line, p.queue, gone...)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.acknowledgeLater(p.line)
	return nil
}

// stuckFor returns when to ask again for a ticket whose task is active. It may be about to come to
// rest. It is not ok if the task has been active for too long: the ticket is dropped then.
func (d *Dispatcher) stuckFor(ref asynqredis.Ref, now time.Time) (pause time.Duration, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for ref, s := range d.stuck {
		if now.Sub(s.since) > 2*stuckMax {
			delete(d.stuck, ref)
		}
	}
	s, known := d.stuck[ref]
	if !known {
		s = stuck{since: now, pause: stuckPause / 2}
	}
	if now.Sub(s.since) > stuckMax {
		delete(d.stuck, ref)
		return 0, false
	}
	s.pause *= 2
	d.stuck[ref] = s
	return s.pause, true
}
