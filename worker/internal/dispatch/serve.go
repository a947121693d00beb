package dispatch

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// lookEvery is how often a server looks at its queues at least: for pending tasks, and for lines
	// that nobody watches. In a test kit that knows of pending tasks it is lookEveryKit.
	lookEvery    = time.Second
	lookEveryKit = time.Minute

	// errorPause is the pause after an error of asynq's Redis.
	errorPause = 100 * time.Millisecond
)

// serve makes tasks ready while Next waits for one, or is about to. All that is known of lines is its own:
// others tell it the news. When the dispatcher stops, it puts back what is ready, and has other servers keep
// its appointments.
func (d *Dispatcher) serve() {
	defer close(d.emptied)
	for !d.isStopped() {
		d.learn()
		d.mu.Lock()
		n := d.buffer.wanted(d.waiting)
		d.mu.Unlock()
		if n == 0 || !d.round(n) {
			d.wait(d.tend(time.Now()))
		}
	}
	for !d.restore(time.Now()) && d.ctx.Err() == nil {
		d.sleep(errorPause)
	}
	d.acknowledge(time.Now())
	for _, g := range d.lines.groups {
		d.nudgeOthers(g, g.watched())
	}
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
	return found
}

// pending dequeues pending tasks, unless there were none a moment ago. It reports whether it found any.
func (d *Dispatcher) pending(g *group, n int) (found bool) {
	now := time.Now()
	if !g.strict && now.Before(g.lookAt) {
		return false
	}
	if !d.isQuiet(g, now) {
		var watched []any
		if now.Sub(g.watchedAt) >= watchEvery {
			watched, g.watchedAt = g.watched(), now
		}
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
// long. It returns when to do so again, or to make the next round, and whether Next waits.
func (d *Dispatcher) tend(now time.Time) (again time.Time, waiting bool) {
	again = now.Add(time.Hour)
	if !d.restore(now.Add(-bufferFor)) {
		again = now.Add(errorPause)
	}
	if left := d.acknowledge(now.Add(-acknowledgeAfter)); !left.IsZero() {
		again = sooner(again, left.Add(acknowledgeAfter))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if ready := d.buffer.ready; len(ready) > 0 {
		again = sooner(again, later(ready[0].active.Add(bufferFor), now.Add(errorPause)))
	}
	if !d.waiting {
		return again, false
	}
	for _, g := range d.lines.groups {
		again = sooner(again, later(g.lookAt, now))
		for _, l := range g.lines {
			again = sooner(again, d.lines.next(l))
		}
	}
	return again, true
}

// wait waits until a time, or for news. Meanwhile nudges are for this server if Next waits.
func (d *Dispatcher) wait(until time.Time, waiting bool) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	idle := d.idle
	if !waiting {
		idle = nil
	}
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
		case line != "" && d.isStopped(): // such as its own
			d.nudgeOthers(d.lines.groupOf(queue), []any{line})
		case line != "":
			d.Nudge(queue, line)
		}
	}
}

// tell has serve learn news before its next round, and at once if it is urgent or Next waits.
func (d *Dispatcher) tell(urgent bool, news func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.news = append(d.news, news)
	if urgent || d.waiting {
		signal(d.wake)
	}
}

// learn takes note of the news. A nudge is for another server if this one has no free slot.
func (d *Dispatcher) learn() {
	d.mu.Lock()
	heard, waiting := d.news, d.waiting
	d.news = nil
	d.mu.Unlock()
	for _, news := range heard {
		news()
	}
	if waiting {
		return
	}
	for _, g := range d.lines.groups {
		for _, l := range g.lines {
			if l.nudged {
				l.nudged = false
				d.nudgeOthers(g, []any{l.name})
			}
		}
	}
}

// Nudge has a line asked now: by this server if it is idle, else by another one.
func (d *Dispatcher) Nudge(queue, line string) {
	d.tell(true, func() { d.lines.groupOf(queue).line(line).nudge() })
}

// Expect notes that a task waits in a line for a queue, and when to ask for it. Limits may be raised
// meanwhile.
func (d *Dispatcher) Expect(line, queue string, in time.Duration) {
	at := time.Now().Add(min(in, lookEvery))
	d.tell(false, func() { d.lines.groupOf(queue).line(line).expect(at) })
}

// Freed makes a line due now, if tickets wait there: capacity was given back.
func (d *Dispatcher) Freed(line string) { d.tell(false, func() { d.lines.freed(line) }) }

// pendingNow looks for pending tasks at once.
func (d *Dispatcher) pendingNow(queue string) {
	d.tell(false, func() { d.lines.groupOf(queue).lookAt = time.Time{} })
}

// Look makes all lines due now where tickets wait.
func (d *Dispatcher) Look() {
	for _, line := range d.Limiter.Lines() {
		d.Freed(line)
	}
}

// nudgeOthers has another server of each queue of a group ask lines now.
func (d *Dispatcher) nudgeOthers(g *group, lines []any) {
	if len(lines) == 0 {
		return
	}
	for _, queue := range g.queues {
		d.Later(func(ctx context.Context) error { return d.Asynq.Nudge(ctx, queue, lines...) })
	}
}

// acknowledge reports that what was taken before a time has arrived. It returns when the first of the other
// takes was, the zero time for none.
func (d *Dispatcher) acknowledge(before time.Time) (left time.Time) {
	for _, g := range d.lines.groups {
		for _, l := range g.lines {
			if l.taken.After(before) {
				left = sooner(left, l.taken)
			} else if !l.taken.IsZero() {
				l.taken = time.Time{}
				d.Later(d.Line(l.name).Acknowledge)
			}
		}
	}
	return left
}
