package drain

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	joinMost    = 300         // jobs that join a line by one call
	takeEvery   = time.Second // at least: what others released or changed is seen by then
	againAfter  = time.Second // after Redis did not answer
	lostAfter   = time.Minute // without a taken ticket, before all join again: Redis may have lost them
	startWithin = 100 * time.Millisecond
)

// A line is that of one policy, or of one of its shards.
type line struct {
	*throttle.Line

	jobs []*work       // in their order
	wake chan struct{} // has the line asked at once
}

func (l *line) ask() {
	select {
	case l.wake <- struct{}{}:
	default: // it is about to be asked
	}
}

// join makes the jobs that wait join the line. One that is in line keeps its position.
func (d *Drain) join(ctx, calls context.Context, l *line) {
	d.mu.Lock()
	waiting := slices.DeleteFunc(slices.Clone(l.jobs), func(w *work) bool { return !w.waits })
	d.mu.Unlock()
	for part := range slices.Chunk(waiting, joinMost) {
		d.joinSome(ctx, calls, l, part)
	}
}

func (d *Drain) joinSome(ctx, calls context.Context, l *line, part []*work) {
	requests := make([]throttle.Request, len(part))
	d.mu.Lock()
	for i, w := range part {
		requests[i] = w.request
	}
	d.mu.Unlock()
	places, err := l.Join(ctx, requests)
	for ; err != nil && ctx.Err() == nil; places, err = l.Join(ctx, requests) {
		d.Progress.Unanswered(err)
		pause(ctx, againAfter)
	}
	for i, p := range places {
		switch {
		case p.Err != nil && d.takes(part[i].job.ID) != nil:
			d.end(part[i], p.Err)
		case p.Exempt && d.takes(part[i].job.ID) != nil:
			d.working.Go(func() { d.startExempt(ctx, calls, part[i]) })
		}
	}
	l.ask()
}

// takes returns the job of a ticket that left the line, which waits no more, or nil if it did not wait.
func (d *Drain) takes(id string) *work {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.open[id]
	if w == nil || !w.waits {
		return nil
	}
	w.waits = false
	return w
}

// serve takes tickets from the line while there are free slots, and makes their calls.
func (d *Drain) serve(ctx, calls context.Context, l *line) {
	defer func() { _ = l.Acknowledge(calls) }()
	held, seen := 0, time.Now()
	for ctx.Err() == nil {
		for free := true; free && held < throttle.MaxTake; {
			select {
			case <-d.slots:
				held++
			default:
				free = false
			}
		}
		wanted, asked := held, time.Now()
		taken, err := l.Take(calls, throttle.TakeOptions{Queues: map[string]int{d.Queue: 1}, Max: held})
		if err != nil {
			d.Progress.Unanswered(err)
		}
		for i, t := range taken.Tickets {
			if held == 0 { // it repeats the reply of a take that wanted more
				_ = l.PutBack(calls, taken.Tickets[i:])
				break
			}
			held--
			seen = time.Now()
			d.working.Go(func() {
				defer d.free()
				d.start(ctx, calls, l, t, asked)
			})
		}
		more := len(taken.Tickets) >= wanted // there may be
		for ; held > 0; held-- {
			d.free()
		}
		if more && wanted > 0 {
			continue
		}
		if time.Since(seen) > lostAfter {
			seen = time.Now()
			d.working.Go(func() { d.join(ctx, calls, l) })
		}
		next := takeEvery
		if err == nil && taken.Next >= 0 {
			next = min(next, taken.Next)
		}
		var slots chan struct{}
		if wanted == 0 {
			slots, next = d.slots, takeEvery
		}
		select {
		case <-slots:
			held = 1
		case <-l.wake:
		case <-ctx.Done():
		case <-time.After(next):
		}
	}
}

func (d *Drain) free() { d.slots <- struct{}{} }

// start makes the call of a ticket that was taken, if it is still to be made.
func (d *Drain) start(ctx, calls context.Context, l *line, t throttle.TakenTicket, asked time.Time) {
	w := d.takes(t.ID)
	if w == nil { // such as of a job that is not in the file any more
		_ = l.Refund(calls, []throttle.TakenTicket{t})
		return
	}
	grant, err := t.Decision, error(nil)
	if !l.Matches(t, w.request) || time.Since(asked) > startWithin { // units count from the take
		grant, err = l.ReserveAgain(calls, t, w.request)
	}
	d.decided(ctx, calls, w, grant, err)
}

// startExempt makes the call of a job that joins no line.
func (d *Drain) startExempt(ctx, calls context.Context, w *work) {
	select {
	case <-d.slots:
		defer d.free()
		grant, err := d.Limiter.Reserve(calls, w.request)
		d.decided(ctx, calls, w, grant, err)
	case <-ctx.Done():
	}
}

// decided makes the call of a job that was granted. One that was denied is in line again.
func (d *Drain) decided(ctx, calls context.Context, w *work, grant throttle.Decision, err error) {
	switch {
	case errors.As(err, new(*throttle.RequestError)) || errors.As(err, new(*throttle.NeverFitsError)):
		d.end(w, err)
	case err != nil:
		d.again(ctx, calls, w, againAfter)
	case grant.Granted:
		d.call(ctx, calls, w, grant)
	default:
		d.mu.Lock()
		defer d.mu.Unlock()
		w.waits = true
	}
}

// again makes a job that had its turn join the line after a while, before the others of its tenant.
func (d *Drain) again(ctx, calls context.Context, w *work, after time.Duration) {
	d.working.Go(func() {
		if pause(ctx, after); ctx.Err() != nil {
			return
		}
		d.mu.Lock()
		w.request.Front, w.waits = true, true
		d.mu.Unlock()
		d.joinSome(ctx, calls, w.line, []*work{w})
	})
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
