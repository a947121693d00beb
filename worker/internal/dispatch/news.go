package dispatch

import (
	"context"
	"time"
)

// tell adds news, which serve learns before its next round, and at once if Next waits.
func (d *Dispatcher) tell(news func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.news = append(d.news, news)
	if d.waiting {
		signal(d.wakeServe)
	}
}

// learn applies the news. A nudge is passed on to another server if this one has no free slot.
func (d *Dispatcher) learn() {
	d.mu.Lock()
	heard, waiting := d.news, d.waiting
	d.news = nil
	d.mu.Unlock()
	for _, news := range heard {
		news()
	}
	for _, set := range d.sets {
		for _, l := range set.lines {
			if l.nudged && !waiting {
				l.nudged = false
				d.nudgeOthers(set, []any{l.name})
			}
		}
	}
}

// Nudge makes this server ask a line now if it has a free slot, or else another server.
func (d *Dispatcher) Nudge(queue, line string) {
	d.tell(func() {
		l := d.setOf(queue).line(line)
		l.nudged = true
		l.askBy(time.Now())
	})
	signal(d.wakeServe) // even if Next does not wait: serve passes the nudge on
}

// Expect notes that a task of a queue waits in a line, and is expected to start after a time. The line is asked
// then, or after lookEvery if that is sooner, as limits may be raised meanwhile.
func (d *Dispatcher) Expect(line, queue string, in time.Duration) {
	at := time.Now().Add(min(in, lookEvery))
	d.tell(func() { d.setOf(queue).line(line).askBy(at) })
}

// Freed makes lines due now where tickets wait, as capacity was given back.
func (d *Dispatcher) Freed(lines ...string) {
	d.tell(func() {
		for _, set := range d.sets {
			for _, line := range lines {
				if l := set.lines[line]; l != nil && l.isWatched() {
					l.askBy(time.Now())
				}
			}
		}
	})
}

// hear tells serve the nudges of some queues. It listens while serve is idle.
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
		case line != "" && d.isStopped(): // passed on, even if this server sent it
			d.nudgeOthers(d.setOf(queue), []any{line})
		case line != "":
			d.Nudge(queue, line)
		}
	}
}

// nudgeOthers makes another server of each queue of a set ask lines now.
func (d *Dispatcher) nudgeOthers(set *queueSet, lines []any) {
	if len(lines) == 0 {
		return
	}
	for _, queue := range set.queues {
		d.RetryInBackground(func(ctx context.Context) error { return d.Tasks.Nudge(ctx, queue, lines...) })
	}
}

// signal ends the wait on a channel, or the next wait if there is none now.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
