package dispatch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// waitMax bounds one wait of Next.
	waitMax = time.Second

	// listenMax bounds one wait for nudges, for which Close waits.
	listenMax = 2 * time.Second
)

// Nudges end a wait of Next.
type nudges struct {
	wake chan struct{} // something has changed while Next waits

	sync.Mutex
	listening map[string]bool // the listeners that run, by their first queue
	waiting   bool            // Next waits, and nudges are for it
}

// signal ends the wait that is under way, or else the next one.
func (n *nudges) signal() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// wait waits until the next round is worth it, or a nudge comes, but not beyond a time.
func (d *Dispatcher) wait(until time.Time) {
	again, ask := d.tend()
	until = sooner(sooner(again, ask), until)
	d.lines.Lock()
	for _, g := range d.lines.groups {
		until = sooner(until, later(g.lookAt, time.Now()))
	}
	d.lines.Unlock()
	d.listen()
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.nudges.wake:
	case <-d.serving.Done():
	}
	d.nudges.Lock()
	defer d.nudges.Unlock()
	d.nudges.waiting = false
}

// listen listens for nudges while Next waits: with one listener, or in a Cluster with one for each
// queue.
func (d *Dispatcher) listen() {
	d.nudges.Lock()
	defer d.nudges.Unlock()
	d.nudges.waiting = true
	if len(d.Limiter.Lines()) == 0 {
		return
	}
	var all []string
	for _, g := range d.lines.groups {
		all = append(all, g.queues...)
	}
	together := 1
	if d.Asynq.OneSlot() {
		together = len(all)
	}
	for queues := range slices.Chunk(all, together) {
		if !d.nudges.listening[queues[0]] {
			d.nudges.listening[queues[0]] = true
			d.inBackground(func() { d.hear(queues) })
		}
	}
}

// hear passes nudges of some queues to Next while that waits. One that comes later is for another
// server, as all slots are taken by then.
func (d *Dispatcher) hear(queues []string) {
	for again := true; again; {
		wait := listenMax
		if timeout := d.Asynq.ReadTimeout(); timeout > 0 {
			wait = min(wait, timeout*2/3)
		}
		queue, line, err := d.Asynq.AwaitNudge(context.WithoutCancel(d.ctx), queues, wait)
		d.nudges.Lock()
		again = err == nil && line == "" && d.nudges.waiting && !d.isStopped()
		d.nudges.listening[queues[0]] = again
		d.nudges.Unlock()
		if err == nil && line != "" {
			d.Nudge(queue, line)
		}
	}
}

// Nudge has a line asked now: by this server if it waits, else by another one.
func (d *Dispatcher) Nudge(queue, line string) {
	d.nudges.Lock()
	waiting := d.nudges.waiting && !d.isStopped()
	d.nudges.Unlock()
	d.expect(line, queue, 0, waiting, !waiting)
}

// Expect notes that a task waits in a line for a queue, and when to ask for it.
func (d *Dispatcher) Expect(line, queue string, in time.Duration) {
	d.expect(line, queue, min(in, waitMax), false, d.isStopped()) // limits may be raised meanwhile
}

func (d *Dispatcher) expect(line, queue string, in time.Duration, nudged, others bool) {
	if others {
		d.nudgeOthers([]string{queue}, line)
		return
	}
	d.lines.Lock()
	defer d.lines.Unlock()
	l := d.groupOf(queue).line(line)
	l.nudged = l.nudged || nudged
	l.expect(time.Now().Add(in))
	d.changed()
}

// Freed makes a line due now, if tickets wait there: capacity was given back.
func (d *Dispatcher) Freed(line string) {
	d.lines.Lock()
	defer d.lines.Unlock()
	for _, g := range d.lines.groups {
		if l := g.lines[line]; l != nil && !l.due.IsZero() {
			l.expect(time.Now())
			d.changed()
		}
	}
}

// Look makes all lines due now where tickets wait.
func (d *Dispatcher) Look() {
	for _, line := range d.Limiter.Lines() {
		d.Freed(line)
	}
}

// changed has Next, or else tend, look when the lines need something next.
func (d *Dispatcher) changed() {
	d.nudges.signal()
	d.tending.Reset(keptFor)
}

// nudgeOthers has another server of each queue ask a line now.
func (d *Dispatcher) nudgeOthers(queues []string, line string) {
	for _, queue := range queues {
		d.Later(func(ctx context.Context) error { return d.Asynq.Nudge(ctx, queue, line) })
	}
}

// tend does what does not wait for a free slot: it acknowledges takes, puts back tasks for which no
// slot has become free, and has other servers keep appointments. A server that has stopped does all of
// it at once. It returns when to do so again, and when to ask a line.
func (d *Dispatcher) tend() (again, ask time.Time) {
	now := time.Now()
	full, ready := d.buffer.load()
	by := now
	if d.isStopped() {
		full, by = true, now.Add(time.Hour)
	}
	again, ask = d.lines.tend(by, full, d.acknowledge, func(l *line) { d.nudgeOthers(l.group.queues, l.name) })
	switch expires := ready.Add(bufferFor); {
	case ready.IsZero():
	case now.Before(expires):
		again = sooner(again, expires)
	default:
		d.Later(func(ctx context.Context) error { return d.restore(ctx, now.Add(-bufferFor)) })
	}
	return again, ask
}

// acknowledge reports that what was taken from a line last has arrived.
func (d *Dispatcher) acknowledge(l *line) {
	d.Later(func(ctx context.Context) error {
		err := d.Limiter.Line(l.name).Acknowledge(ctx)
		if errors.Is(err, throttle.ErrUnknownPolicy) {
			return nil
		}
		return err
	})
}
