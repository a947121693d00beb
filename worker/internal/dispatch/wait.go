package dispatch

import (
	"context"
	"time"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// waitMost bounds one wait of Next.
	waitMost = time.Second

	// hearMost bounds one wait for nudges, which Close waits for.
	hearMost = 2 * time.Second

	// keptFor is how late this server may come to an appointment before another one is asked to.
	keptFor = 20 * time.Millisecond

	// passOnEvery is how often another server is asked for the same line.
	passOnEvery = time.Second
)

// wait waits until something is to be asked, or a nudge comes, but not for longer than that.
func (d *Dispatcher) wait(end time.Time) {
	d.mu.Lock()
	until := d.nextAsk(time.Now(), end)
	d.waiting = true
	d.mu.Unlock()
	d.listen()
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.wake:
	case <-d.stop:
	}
	d.mu.Lock()
	d.waiting = false
	d.mu.Unlock()
}

// nextAsk is when the next round is worth it. The lock is held.
func (d *Dispatcher) nextAsk(now, end time.Time) time.Time {
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
			switch {
			case l.nudged != "":
				sooner(later(now, l.until, d.silence.until))
			case l.empty:
				empty = true
			default:
				sooner(later(l.next, l.until, d.silence.until))
			}
		}
	}
	if empty {
		sooner(later(d.emptyAt, d.silence.until))
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

// listen has nudges heard while Next waits: by one listener, or in a Cluster by one for each queue.
func (d *Dispatcher) listen() {
	var all []string
	d.mu.Lock()
	for _, g := range d.groups {
		if len(g.lines) > 0 {
			all = append(all, g.ordered...)
		}
	}
	d.mu.Unlock()
	if len(all) == 0 {
		return
	}
	if d.Asynq.OneSlot() {
		d.listenTo(all)
		return
	}
	for _, queue := range all {
		d.listenTo([]string{queue})
	}
}

func (d *Dispatcher) listenTo(queues []string) {
	d.mu.Lock()
	hears := d.hearing[queues[0]] || d.closed
	d.hearing[queues[0]] = true
	d.mu.Unlock()
	if hears {
		return
	}
	d.inBackground(func() {
		queue, policy, err := d.Asynq.AwaitNudge(context.WithoutCancel(d.ctx), queues, d.hearFor())
		d.mu.Lock()
		d.hearing[queues[0]] = false
		waiting := d.waiting
		if err == nil && policy != "" && waiting {
			d.nudged(queue, policy)
		}
		d.mu.Unlock()
		if err == nil && policy != "" && !waiting {
			// All slots are taken by now: it is for another server.
			d.later(func(ctx context.Context) error { return d.Asynq.Nudge(ctx, queue, policy) })
		}
	})
}

// hearFor is how long one command waits for a nudge.
func (d *Dispatcher) hearFor() time.Duration {
	if timeout := d.Asynq.ReadTimeout(); timeout > 0 {
		return min(hearMost, timeout/2)
	}
	return hearMost
}

// nudged has a line asked now. The lock is held.
func (d *Dispatcher) nudged(queue, policy string) {
	if l := d.groupOf(queue).lines[policy]; l != nil {
		l.nudged = queue
	}
	d.signal()
}

// Freed has the line of a policy asked now, if somebody waits there: capacity was given back that nobody knows of.
func (d *Dispatcher) Freed(policy string) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.groups {
		if l := g.lines[policy]; l != nil && !l.empty && now.Before(l.next) {
			l.next = now
			d.signal()
		}
	}
}

// Nudge has a line asked now: by this server if it waits, else by another.
func (d *Dispatcher) Nudge(queue, policy string) {
	d.mu.Lock()
	waiting := d.waiting
	if waiting {
		d.nudged(queue, policy)
	}
	d.mu.Unlock()
	if !waiting {
		d.later(func(ctx context.Context) error { return d.Asynq.Nudge(ctx, queue, policy) })
	}
}

// passOnLater sees to the appointments of a server whose slots are all taken. The lock is held.
func (d *Dispatcher) passOnLater() {
	if !d.passing && !d.closed && !d.isStopped() {
		d.passing = true
		d.passOn.Reset(keptFor)
	}
}

// passOnAppointments has other servers ask the lines that this one was to ask by now, as it has no slot free.
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
			if l.empty && l.nudged == "" {
				continue
			}
			if at := later(l.next.Add(keptFor), l.passed.Add(passOnEvery)); at.After(now) && l.nudged == "" {
				if at.Before(next) {
					next = at
				}
				continue
			}
			queue := l.nudged
			if queue == "" {
				queue = g.ordered[0]
			}
			l.passed, l.nudged = now, ""
			nudges[queue] = append(nudges[queue], l.policy)
		}
	}
	d.passOn.Reset(max(keptFor, time.Until(next)))
	d.mu.Unlock()
	for queue, policies := range nudges {
		d.inBackground(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), troubleTimeout)
			defer cancel()
			_ = d.Asynq.Nudge(ctx, queue, policies...) // again in a second
		})
	}
}

// A wakeUp is a second in which a queue is forwarded, without waiting for asynq to do so.
type wakeUp struct {
	queue  string
	second int64
}

// WakeAt forwards a queue at a time: a task that waits in no line becomes due then.
func (d *Dispatcher) WakeAt(queue string, at time.Time) {
	at = asynqredis.WholeSecond(at)
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
				n, err = d.Forward(context.WithoutCancel(d.ctx), queue, false) // or asynq's forwarder does
			}
		})
	})
}
