package dispatch

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// lookEvery is how often a server looks at its queues at least: for pending tasks, and for lines
	// that nobody watches. In a test kit that knows of pending tasks it is lookEveryKit.
	lookEvery    = time.Second
	lookEveryKit = time.Minute

	// errorPause is the pause after an error of asynq's Redis.
	errorPause = 100 * time.Millisecond

	// listenMax bounds one wait for nudges, for which Close waits.
	listenMax = 2 * time.Second
)

// begin starts what serves Next: serve, and one listener for nudges, or in a Cluster one for each queue.
func (d *Dispatcher) begin() {
	d.inBackground(d.serve)
	queues, together := slices.Sorted(maps.Keys(d.Queues)), 1
	if d.Asynq.OneSlot() {
		together = len(queues)
	}
	for some := range slices.Chunk(queues, together) {
		d.inBackground(func() { d.hear(some) })
	}
}

// serve makes tasks ready while Next waits for one, or is about to. When the dispatcher stops, it puts
// back what is ready, and has other servers ask the lines.
func (d *Dispatcher) serve() {
	defer close(d.emptied)
	for !d.isStopped() {
		d.mu.Lock()
		wanted := d.waiting || d.buffer.wantsMore()
		d.mu.Unlock()
		if !wanted || !d.round() {
			d.wait(d.tend(time.Now()))
		}
	}
	for !d.restore(time.Now()) && d.ctx.Err() == nil {
		d.sleep(errorPause)
	}
	d.passOn()
}

// round makes tasks ready, and reports whether it found any. It asks, group by group, the lines that are
// due and the pending tasks. Pending tasks that have earned a turn come first.
func (d *Dispatcher) round() (found bool) {
	d.mu.Lock()
	d.lines.know(d.Limiter.Lines())
	d.mu.Unlock()
	for _, g := range d.lines.groups {
		d.mu.Lock()
		n, turns := d.buffer.wanted(), g.earned/pendingFor
		d.mu.Unlock()
		found = turns > 0 && d.pending(g, min(n, turns))
		now := time.Now()
		for l := d.due(g, now); l != nil && !found; l = d.due(g, now) {
			found = d.take(l, n)
		}
		if found = found || d.pending(g, n); found {
			break
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.buffer.found = found
	return found
}

// pending dequeues pending tasks, unless there were none a moment ago. It reports whether it found any.
func (d *Dispatcher) pending(g *group, n int) (found bool) {
	now := time.Now()
	d.mu.Lock()
	look := g.strict || !now.Before(g.lookAt)
	asks, watched := look && !d.isQuiet(g, now), []any(nil)
	if asks {
		watched = g.watched(now)
	}
	d.mu.Unlock()
	for _, queue := range g.draw(d.Queues) {
		if asks && d.dequeue(g, queue, n, watched) {
			return true
		}
	}
	if !look {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	every := min(d.Poll, lookEvery)
	g.earned, g.lookAt = 0, now.Add(every*3/4+rand.N(max(1, every/2)))
	return false
}

// isQuiet reports, in a test kit, that a look at the queues of a group would find nothing. The lock is
// held.
func (d *Dispatcher) isQuiet(g *group, now time.Time) bool {
	mayHave := func(queue string) bool { return d.lines.paused[queue] || d.HasPending(queue) }
	return d.HasPending != nil && now.Sub(g.watchedAt) < lookEveryKit && !slices.ContainsFunc(g.queues, mayHave)
}

// pendingNow looks for pending tasks at once.
func (d *Dispatcher) pendingNow(queue string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines.groupOf(queue).lookAt = time.Time{}
	d.changed()
}

// changed has serve look at what has changed, if Next waits for that. The lock is held.
func (d *Dispatcher) changed() {
	if d.waiting {
		signal(d.wake)
	}
}

// tend does what needs no free slot: it acknowledges takes, and puts back tasks that are ready for too
// long. It returns when to do so again, or to make the next round.
func (d *Dispatcher) tend(now time.Time) time.Time {
	again := now.Add(time.Hour)
	if !d.restore(now.Add(-bufferFor)) {
		again = now.Add(errorPause)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if fetched := d.buffer.fetched; len(fetched) > 0 {
		again = sooner(again, later(fetched[0].at.Add(bufferFor), now.Add(errorPause)))
	}
	for _, g := range d.lines.groups {
		if d.waiting {
			again = sooner(again, later(g.lookAt, now))
		}
		for _, l := range g.lines {
			if !l.taken.IsZero() && !now.Before(l.taken.Add(acknowledgeAfter)) {
				d.acknowledge(l)
			}
			if !l.taken.IsZero() {
				again = sooner(again, l.taken.Add(acknowledgeAfter))
			}
			if d.waiting && !l.at.IsZero() {
				again = sooner(again, later(l.at, d.lines.silence.Until))
			}
		}
	}
	return again
}

// wait waits until a time, or something changes. Meanwhile nudges are for this server if Next waits.
func (d *Dispatcher) wait(until time.Time) {
	d.mu.Lock()
	if d.isIdle = d.waiting; d.isIdle {
		d.idle.Broadcast()
	}
	d.mu.Unlock()
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.wake:
	case <-d.serving.Done():
	}
}

// hear passes nudges of some queues on to serve while that is idle. A nudge that comes later is for
// another server, as all slots are taken by then.
func (d *Dispatcher) hear(queues []string) {
	wait := listenMax
	if timeout := d.Asynq.ReadTimeout(); timeout > 0 {
		wait = min(wait, timeout*2/3)
	}
	for {
		d.mu.Lock()
		for !d.isIdle && !d.isStopped() {
			d.idle.Wait()
		}
		d.mu.Unlock()
		if d.isStopped() {
			return
		}
		queue, line, err := d.Asynq.AwaitNudge(context.WithoutCancel(d.ctx), queues, wait)
		switch {
		case err != nil:
			d.sleep(errorPause)
		case line != "":
			d.Nudge(queue, line)
		}
	}
}

// Nudge has a line asked now: by this server if it is idle, else by another one.
func (d *Dispatcher) Nudge(queue, line string) { d.expect(line, queue, 0, true) }

// Expect notes that a task waits in a line for a queue, and when to ask for it. Limits may be raised
// meanwhile.
func (d *Dispatcher) Expect(line, queue string, in time.Duration) {
	d.expect(line, queue, min(in, lookEvery), false)
}

func (d *Dispatcher) expect(line, queue string, in time.Duration, nudged bool) {
	d.mu.Lock()
	others := d.isStopped() || nudged && !d.isIdle
	if !others {
		l := d.lines.groupOf(queue).line(line)
		l.nudged = l.nudged || nudged
		d.isIdle = d.isIdle && !nudged // the next nudge is for another one, until nothing was found
		l.expect(time.Now().Add(in))
		d.changed()
	}
	d.mu.Unlock()
	if others {
		d.nudgeOthers([]string{queue}, line)
	}
}

// Freed makes a line due now, if tickets wait there: capacity was given back.
func (d *Dispatcher) Freed(line string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.lines.groups {
		if l := g.lines[line]; l != nil && !l.due.IsZero() {
			l.expect(time.Now())
		}
	}
	d.changed()
}

// Look makes all lines due now where tickets wait.
func (d *Dispatcher) Look() {
	for _, line := range d.Limiter.Lines() {
		d.Freed(line)
	}
}

// nudgeOthers has another server of each queue ask lines now.
func (d *Dispatcher) nudgeOthers(queues []string, lines ...any) {
	for _, queue := range queues {
		d.Later(func(ctx context.Context) error { return d.Asynq.Nudge(ctx, queue, lines...) })
	}
}

// acknowledge reports that what was taken from a line last has arrived. The lock is held.
func (d *Dispatcher) acknowledge(l *line) {
	l.taken = time.Time{}
	d.Later(func(ctx context.Context) error {
		err := d.Limiter.Line(l.name).Acknowledge(ctx)
		if errors.Is(err, throttle.ErrUnknownPolicy) {
			return nil
		}
		return err
	})
}

// passOn has other servers keep the appointments of this one, which has stopped.
func (d *Dispatcher) passOn() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.lines.groups {
		var waiting []any
		for _, l := range g.lines {
			if l.state == stateWaiting {
				waiting = append(waiting, l.name)
			}
			if !l.taken.IsZero() {
				d.acknowledge(l)
			}
		}
		if len(waiting) > 0 {
			d.nudgeOthers(g.queues, waiting...)
		}
	}
}
