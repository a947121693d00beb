package dispatch

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// waitMax bounds one wait of Next.
	waitMax = time.Second

	// listenMax bounds one wait for nudges, for which Close waits.
	listenMax = 2 * time.Second

	// keptFor is how late this server may be for an appointment before it asks another server to
	// keep it.
	keptFor = 20 * time.Millisecond

	// passOnEvery is how often another server is asked for the same line.
	passOnEvery = time.Second
)

// wait waits until the next round is worth it, or a nudge comes, but not beyond end.
func (d *Dispatcher) wait(end time.Time) {
	d.mu.Lock()
	until := d.nextAsk(end)
	d.waiting = true
	d.mu.Unlock()
	d.listen()
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.wake:
	case <-d.serving.Done():
	}
	d.mu.Lock()
	d.waiting = false
	d.mu.Unlock()
}

// nextAsk returns when the next round is worth it. The lock is held.
func (d *Dispatcher) nextAsk(end time.Time) time.Time {
	next := end
	sooner := func(at time.Time) {
		if at.Before(next) {
			next = at
		}
	}
	empty := false
	for _, g := range d.groups {
		sooner(g.pollAt)
		for _, l := range g.lines {
			if empty = empty || l.empty; !l.empty {
				sooner(later(l.next, l.Until, d.silence.Until))
			}
		}
	}
	if empty {
		sooner(later(d.emptyAt, d.silence.Until))
	}
	return next
}

func later(times ...time.Time) (latest time.Time) {
	for _, at := range times {
		if at.After(latest) {
			latest = at
		}
	}
	return latest
}

// listen listens for nudges while Next waits: with one listener, or in a Cluster with one for each
// queue.
func (d *Dispatcher) listen() {
	var all []string
	d.mu.Lock()
	for _, g := range d.groups {
		if len(g.lines) > 0 {
			all = append(all, g.queues...)
		}
	}
	d.mu.Unlock()
	together := 1
	if d.Asynq.OneSlot() {
		together = max(1, len(all))
	}
	for queues := range slices.Chunk(all, together) {
		d.listenTo(queues)
	}
}

func (d *Dispatcher) listenTo(queues []string) {
	d.mu.Lock()
	hears := d.listening[queues[0]] || d.closed
	d.listening[queues[0]] = true
	d.mu.Unlock()
	if hears {
		return
	}
	d.inBackground(func() {
		for again := true; again; {
			queue, line, err := d.Asynq.AwaitNudge(context.WithoutCancel(d.ctx), queues, d.listenFor())
			d.mu.Lock()
			waiting := d.waiting
			again = err == nil && line == "" && waiting && !d.isStopped()
			d.listening[queues[0]] = again
			if err == nil && line != "" && waiting {
				d.nudged(queue, line)
			}
			d.mu.Unlock()
			if err == nil && line != "" && !waiting {
				d.nudgeAnother(queue, line) // all slots are taken by now
			}
		}
	})
}

// listenFor is how long one command waits for a nudge.
func (d *Dispatcher) listenFor() time.Duration {
	if timeout := d.Asynq.ReadTimeout(); timeout > 0 {
		return min(listenMax, timeout*2/3)
	}
	return listenMax
}

// nudged makes a line due now. The lock is held.
func (d *Dispatcher) nudged(queue, line string) {
	if l := d.groupOf(queue).lines[line]; l != nil {
		l.nudged = queue
		d.expect(l, time.Now())
	}
	d.signal()
}

// Freed makes a line due now, if tickets wait there: capacity was given back.
func (d *Dispatcher) Freed(line string) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.groups {
		if l := g.lines[line]; l != nil && !l.empty {
			d.expect(l, now)
		}
	}
}

// Nudge has a line asked now: by this server if it waits, else by another one.
func (d *Dispatcher) Nudge(queue, line string) {
	d.mu.Lock()
	waiting := d.waiting
	if waiting {
		d.nudged(queue, line)
	}
	d.mu.Unlock()
	if !waiting {
		d.nudgeAnother(queue, line)
	}
}

// nudgeAnother has another server ask lines now.
func (d *Dispatcher) nudgeAnother(queue string, lines ...string) {
	d.Later(func(ctx context.Context) error { return d.Asynq.Nudge(ctx, queue, lines...) })
}

// passOnLater arranges that others keep the appointments of a server without a free slot. The lock
// is held.
func (d *Dispatcher) passOnLater() {
	if !d.passing && !d.closed && !d.isStopped() {
		d.passing = true
		d.passOn.Reset(keptFor)
	}
}

// passOnAppointments asks other servers to keep the appointments that this one has missed, as it
// has no free slot.
func (d *Dispatcher) passOnAppointments() {
	now := time.Now()
	next := now.Add(passOnEvery)
	nudges := map[string][]string{}
	d.mu.Lock()
	if d.passing = d.running >= d.Concurrency && !d.closed && !d.isStopped(); !d.passing {
		d.mu.Unlock()
		return
	}
	for _, g := range d.groups {
		for _, l := range g.lines {
			if l.empty {
				continue
			}
			if at := later(l.next.Add(keptFor), l.passed.Add(passOnEvery)); at.After(now) && l.nudged == "" {
				if at.Before(next) {
					next = at
				}
				continue
			}
			queue := cmp.Or(l.nudged, g.queues[0])
			l.passed, l.nudged = now, ""
			nudges[queue] = append(nudges[queue], l.name)
		}
	}
	d.passOn.Reset(max(keptFor, time.Until(next)))
	d.mu.Unlock()
	for queue, names := range nudges {
		d.nudgeAnother(queue, names...)
	}
}

// A wakeUp is a second at which a queue is forwarded, before asynq does so.
type wakeUp struct {
	queue  string
	second int64
}

// WakeAt forwards a queue at the given time, when a task that waits in no line becomes due: in the
// past, at once.
func (d *Dispatcher) WakeAt(queue string, at time.Time) {
	if at.After(time.Now()) {
		at = asynqredis.WholeSecond(at)
	}
	w := wakeUp{queue, at.Unix()}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.wakes[w] || d.closed {
		return
	}
	d.wakes[w] = true
	time.AfterFunc(time.Until(at), func() {
		d.mu.Lock()
		delete(d.wakes, w)
		d.mu.Unlock()
		if d.isStopped() {
			return
		}
		d.inBackground(func() {
			for n, err := 1, error(nil); n > 0 && err == nil && !d.isStopped(); {
				// If it fails asynq's forwarder does it.
				n, err = d.Forward(context.WithoutCancel(d.ctx), queue, false)
			}
		})
	})
}
