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

// serve makes tasks ready while Next waits for one, or is about to. All that is known of lines is its own:
// others tell it the news. When the dispatcher stops, it puts back what is ready, and has other servers ask
// the lines.
func (d *Dispatcher) serve() {
	defer close(d.emptied)
	for !d.isStopped() {
		d.learn()
		if n := d.wanted(); n == 0 || !d.round(n) {
			d.wait(d.tend(time.Now()))
		}
	}
	for !d.restore(time.Now()) && d.ctx.Err() == nil {
		d.sleep(errorPause)
	}
	d.learn()
	d.passOn()
}

// round makes up to n tasks ready, and reports whether it found any. It asks, group by group, the lines
// that are due and the pending tasks. Pending tasks that have earned a turn come first.
func (d *Dispatcher) round(n int) (found bool) {
	d.lines.know(d.Limiter.Lines())
	for _, g := range d.lines.groups {
		turns := g.earned / pendingFor
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
	if !g.strict && now.Before(g.lookAt) {
		return false
	}
	if !d.isQuiet(g, now) {
		watched := g.watched(now)
		for _, queue := range g.draw(d.Queues) {
			if d.dequeue(g, queue, n, watched) {
				return true
			}
		}
	}
	every := min(d.Poll, lookEvery)
	g.earned, g.lookAt = 0, now.Add(every*3/4+rand.N(max(1, every/2)))
	return false
}

// isQuiet reports, in a test kit, that a look at the queues of a group would find nothing.
func (d *Dispatcher) isQuiet(g *group, now time.Time) bool {
	mayHave := func(queue string) bool { return d.lines.paused[queue] || d.HasPending(queue) }
	return d.HasPending != nil && now.Sub(g.watchedAt) < lookEveryKit && !slices.ContainsFunc(g.queues, mayHave)
}

// tend does what needs no free slot: it acknowledges takes, and puts back tasks that are ready for too
// long. It returns when to do so again, or to make the next round.
func (d *Dispatcher) tend(now time.Time) (again time.Time) {
	again = now.Add(time.Hour)
	if !d.restore(now.Add(-bufferFor)) {
		again = now.Add(errorPause)
	}
	d.mu.Lock()
	waiting := d.waiting
	if ready := d.buffer.ready; len(ready) > 0 {
		again = sooner(again, later(ready[0].active.Add(bufferFor), now.Add(errorPause)))
	}
	d.mu.Unlock()
	for _, g := range d.lines.groups {
		if waiting {
			again = sooner(again, later(g.lookAt, now))
		}
		for _, l := range g.lines {
			if !l.taken.IsZero() && !now.Before(l.taken.Add(acknowledgeAfter)) {
				d.acknowledge(l)
			}
			if !l.taken.IsZero() {
				again = sooner(again, l.taken.Add(acknowledgeAfter))
			}
			if waiting && !l.next.IsZero() {
				again = sooner(again, later(l.next, d.lines.silence.Until))
			}
		}
	}
	return again
}

// wait waits until a time, or for news. Meanwhile nudges are for this server if Next waits.
func (d *Dispatcher) wait(until time.Time) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	idle := d.idle
	if d.mu.Lock(); !d.waiting {
		idle = nil
	}
	d.mu.Unlock()
	for {
		select {
		case idle <- struct{}{}:
		case <-d.wake:
			return
		case <-timer.C:
			return
		case <-d.serving.Done():
			return
		}
	}
}

// hear passes nudges of some queues on to serve. It listens while that is idle.
func (d *Dispatcher) hear(queues []string) {
	for {
		select {
		case <-d.idle:
		case <-d.serving.Done():
			return
		}
		switch queue, line, err := d.Asynq.AwaitNudge(d.serving, queues); {
		case err != nil:
			d.sleep(errorPause)
		case line != "":
			d.Nudge(queue, line)
		}
	}
}

// News is about a line for the tasks of a queue; with no queue, that capacity was given back; with no
// line, that the queue has pending tasks. It is for one server if it is a nudge.
type news struct {
	line, queue string
	nudge       bool
}

// tell has serve learn news, for which to ask at a time. A server that has stopped passes it on.
func (d *Dispatcher) tell(n news, at time.Time) {
	d.mu.Lock()
	stopped := d.isStopped()
	if !stopped {
		d.news[n] = sooner(d.news[n], at)
	}
	if d.waiting || n.nudge {
		signal(d.wake)
	}
	d.mu.Unlock()
	if stopped && n.line != "" && n.queue != "" {
		d.nudgeOthers([]string{n.queue}, n.line)
	}
}

// learn notes the news. A nudge is for another server if this one has no free slot, or had one before.
func (d *Dispatcher) learn() {
	d.mu.Lock()
	heard, mine := d.news, d.waiting && !d.isStopped()
	d.news = map[news]time.Time{}
	d.mu.Unlock()
	for n, due := range heard {
		switch {
		case n.line == "":
			d.lines.groupOf(n.queue).lookAt = time.Time{}
		case n.queue == "":
			d.lines.freed(n.line, due)
		case n.nudge && !mine:
			d.nudgeOthers([]string{n.queue}, n.line)
		default:
			l := d.lines.groupOf(n.queue).line(n.line)
			l.expect(due)
			l.nudged, mine = l.nudged || n.nudge, mine && !n.nudge
		}
	}
}

// Nudge has a line asked now: by this server if it is idle, else by another one.
func (d *Dispatcher) Nudge(queue, line string) { d.tell(news{line, queue, true}, time.Now()) }

// Expect notes that a task waits in a line for a queue, and when to ask for it. Limits may be raised
// meanwhile.
func (d *Dispatcher) Expect(line, queue string, in time.Duration) {
	d.tell(news{line, queue, false}, time.Now().Add(min(in, lookEvery)))
}

// Freed makes a line due now, if tickets wait there: capacity was given back.
func (d *Dispatcher) Freed(line string) { d.tell(news{line: line}, time.Now()) }

// pendingNow looks for pending tasks at once.
func (d *Dispatcher) pendingNow(queue string) { d.tell(news{queue: queue}, time.Now()) }

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

// acknowledge reports that what was taken from a line last has arrived.
func (d *Dispatcher) acknowledge(l *line) {
	l.taken = time.Time{}
	d.Later(func(ctx context.Context) error {
		err := d.Line(l.name).Acknowledge(ctx)
		if errors.Is(err, throttle.ErrUnknownPolicy) {
			return nil
		}
		return err
	})
}

// passOn has other servers keep the appointments of this one, which has stopped.
func (d *Dispatcher) passOn() {
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
