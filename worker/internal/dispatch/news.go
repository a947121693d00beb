package dispatch

import (
	"context"
	"time"
)

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
	for _, set := range d.sets {
		for _, l := range set.lines {
			if l.nudged {
				l.nudged = false
				d.nudgeOthers(set, []any{l.name})
			}
		}
	}
}

// Nudge has a line asked now: by this server if it is idle, else by another one.
func (d *Dispatcher) Nudge(queue, line string) {
	d.tell(true, func() {
		l := d.setOf(queue).line(line)
		l.nudged = true
		l.expect(time.Now())
	})
}

// Expect notes that a task waits in a line for a queue, and when to ask for it. Limits may be raised
// meanwhile.
func (d *Dispatcher) Expect(line, queue string, in time.Duration) {
	at := time.Now().Add(min(in, lookEvery))
	d.tell(false, func() { d.setOf(queue).line(line).expect(at) })
}

// Freed makes lines due now, if tickets wait there: capacity was given back.
func (d *Dispatcher) Freed(lines ...string) {
	d.tell(false, func() {
		for _, set := range d.sets {
			for _, line := range lines {
				if l := set.lines[line]; l != nil && !l.due.IsZero() {
					l.expect(time.Now())
				}
			}
		}
	})
}

// hear passes nudges of some queues on to serve. It listens while serve is idle.
func (d *Dispatcher) hear(queues []string) {
	for {
		select {
		case <-d.idle:
		case <-d.serving.Done():
			return
		}
		switch queue, line, err := d.Tasks.AwaitNudge(d.serving, queues); {
		case err != nil:
			d.sleep(retryAfterError)
		case line != "" && d.isStopped(): // also those that it sent itself
			d.nudgeOthers(d.setOf(queue), []any{line})
		case line != "":
			d.Nudge(queue, line)
		}
	}
}

// nudgeOthers has another server of each queue of a set ask lines now.
func (d *Dispatcher) nudgeOthers(set *queueSet, lines []any) {
	if len(lines) == 0 {
		return
	}
	for _, queue := range set.queues {
		d.RetryInBackground(func(ctx context.Context) error { return d.Tasks.Nudge(ctx, queue, lines...) })
	}
}

// signal ends the wait for a channel that is under way, or else the next one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
