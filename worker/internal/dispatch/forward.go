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

const (
	// forwardMax is the most tasks that are forwarded at once. It is asynq's own number.
	forwardMax = 100

	// joinTimeout bounds their join.
	joinTimeout = 2 * time.Second

	// unavailableFor is when forward looks again at a task that could not join.
	unavailableFor = 10 * time.Second
)

// Forward moves the due tasks of a queue, either scheduled ones or those to retry. Tasks that a
// policy matches join its line, and the others become pending. It returns how many it has moved. If
// that is not 0 there may be more.
func (d *Dispatcher) Forward(ctx context.Context, queue string, retried bool) (int, error) {
	if d.isStopped() {
		return 0, nil
	}
	due, err := d.Asynq.Due(ctx, queue, retried, forwardMax)
	if err != nil || len(due) == 0 {
		return 0, err
	}
	identity, err := d.Asynq.Identity(ctx)
	if err != nil {
		return 0, err
	}
	now, call := time.Now(), d.Asynq.Call()
	moves := make([]asynqredis.Move, len(due))
	joins := map[string][]joining{}
	for i, task := range due {
		moves[i].ID = task.ID
		if task.Message.GroupKey() != "" {
			continue
		}
		match, ok := d.Match(task.Message)
		if !ok {
			continue
		}
		key := task.Message.JoinKey()
		move := &moves[i]
		if move.Mark = task.Mark; retried || !strings.HasPrefix(task.Mark, key) {
			move.Mark = asynqredis.Mark(key, now, call)
		}
		move.At = now.Add(fallbackMin)
		r := &match.Request
		r.Front = r.Front || retried || task.Mark == asynqredis.FrontMark // it had its turn
		r.Deadline, r.Key = task.Message.Deadline(), key
		r.Ticket = throttle.Ticket{Queue: identity + "/" + queue, ID: task.ID}
		if task.Mark == "" { // it joins for the first time
			r.MaxWait = match.MaxWait
		}
		line := d.Limiter.LineOf(r.Policy, r.Tenant)
		joined := asynqredis.JoinedAt(move.Mark)
		stood := !retried && move.Mark == task.Mark && now.Sub(joined) >= fallbackMin-time.Second
		joins[line] = append(joins[line], joining{match, i, task.Message, stood, joined})
	}
	moved, lost := d.Asynq.Forward(ctx, queue, retried, moves)
	if lost != nil { // they may have moved all the same: a ticket that joined in vain is dropped
		moved = slices.Repeat([]bool{true}, len(moves))
	}
	n := 0
	for i, ok := range moved {
		if ok {
			n++
		}
		if ok && moves[i].At.IsZero() {
			d.pendingNow(queue)
		}
	}
	for line, all := range joins {
		all = slices.DeleteFunc(all, func(j joining) bool { return !moved[j.index] })
		if err := d.join(ctx, queue, line, all); err != nil {
			return n, err
		}
	}
	return n, lost
}

// A joining is a task that joins a line.
type joining struct {
	Match
	index   int
	message asynqredis.Message
	stood   bool // in a line, as far as the task knows
	joined  time.Time
}

// reason is empty for a task whose last error is a failure: that says more.
func (j joining) reason(p throttle.Place, now time.Time) string {
	if j.message.LastError() != "" && !j.message.Denied() {
		return ""
	}
	return Reason(j.Request, p, now)
}

// join makes tasks join a line. They are scheduled with their join keys.
func (d *Dispatcher) join(ctx context.Context, queue, line string, all []joining) error {
	if len(all) == 0 {
		return nil
	}
	requests := make([]throttle.Request, len(all))
	for i, j := range all {
		requests[i] = j.Request
	}
	call, cancel := context.WithTimeout(ctx, joinTimeout)
	places, err := d.Limiter.Line(line).Join(call, requests)
	cancel()
	if len(all) > 1 && isOfOne(err) {
		for i := range all {
			if err := d.join(ctx, queue, line, all[i:i+1]); err != nil {
				return err
			}
		}
		return nil
	}
	var arranged []asynqredis.Arranged
	nudge, pending := false, false
	now := time.Now()
	removed := errors.Is(err, throttle.ErrUnknownPolicy) // the middleware matches again
	if err != nil && !removed {
		d.Failed(line, unavailable(err))
		d.mu.Lock()
		d.noJoins = now
		d.mu.Unlock()
		d.Expect(line, queue, 0) // the tickets may be in line all the same
	}
	for i, j := range all {
		task := asynqredis.Waiting{ID: j.Request.Ticket.ID, JoinKey: j.Request.Key}
		to := asynqredis.Arranged{Waiting: task}
		switch {
		case err != nil && !removed && !j.FailOpen:
			to.At = now.Add(unavailableFor)
		case err != nil, places[i].Exempt, places[i].Err != nil: // the middleware returns it
			pending = true
		default:
			if j.stood && !places[i].AlreadyQueued {
				d.lostTicket(queue, line, j.joined)
			}
			nudge = nudge || places[i].Nudge
			d.Expect(line, queue, places[i].Expected)
			wait := Fallback(places[i].Expected, j.FailOpen)
			if wait <= fallbackMin {
				continue
			}
			to.At, to.Message, to.Reason = now.Add(wait), j.message, j.reason(places[i], now)
		}
		arranged = append(arranged, to)
	}
	if nudge {
		d.Nudge(queue, line)
	}
	if len(arranged) == 0 {
		return nil
	}
	if err := d.Asynq.Arrange(ctx, queue, arranged); err != nil {
		return err
	}
	if pending {
		d.pendingNow(queue)
	}
	return nil
}

// lostTicket reports, once for each queue, that a task which joined a line at a time stood in none. If
// a join has failed since, that may have been its own.
func (d *Dispatcher) lostTicket(queue, line string, joined time.Time) {
	d.mu.Lock()
	report := !d.lostIn[queue] && d.noJoins.Before(joined)
	d.lostIn[queue] = d.lostIn[queue] || report
	d.mu.Unlock()
	if report {
		d.Lost(queue, line)
	}
}

// isOfOne reports whether an error may be due to a single ticket, such as a tenant lookup that
// failed.
func isOfOne(err error) bool {
	for _, all := range []error{
		nil, throttle.ErrUnavailable, throttle.ErrState, throttle.ErrReply, throttle.ErrClock,
		throttle.ErrUnknownPolicy, context.DeadlineExceeded, context.Canceled,
	} {
		if errors.Is(err, all) {
			return false
		}
	}
	return true
}

// pendingNow has Next look for pending tasks at once.
func (d *Dispatcher) pendingNow(queue string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.groupOf(queue).pollAt = time.Time{}
	if d.waiting {
		d.signal()
	}
}
