package dispatch

import (
	"context"
	"slices"
	"time"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	waitMax         = time.Second            // bounds one wait of Next
	retryAfterError = 100 * time.Millisecond // how long after an error of asynq's Redis a call is repeated

	// takeMax is the most tasks that one take or dequeue asks for, and about the most that wait for a slot. If
	// it were more, a task would cost Redis less, but would wait longer for the tasks of the same call.
	takeMax = 48

	// lookAhead: tasks are made ready for the slots that become free in this time. A task waits about as long for one.
	lookAhead = 10 * time.Millisecond
	// aheadFrom is how many slots must become free within lookAhead for serve to take tasks before Next asks.
	aheadFrom = 8

	// bufferFor is how long a task is kept ready for a slot. After staleAfter it is not handed out: its lease ends soon.
	bufferFor  = 500 * time.Millisecond
	staleAfter = asynqredis.LeaseFor / 2
)

// Next returns the task that runs next, of any queue of the server. Like asynq's dequeue it is
// called when a slot is free, once for each queue until there is a task. If there is none, or a Redis
// does not answer, it waits up to a second and returns false.
func (d *Dispatcher) Next(ctx context.Context) (task Task, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, waitMax)
	defer cancel()
	defer context.AfterFunc(d.serving, cancel)()
	for startNoted := ""; !d.isStopped(); {
		d.mu.Lock()
		task, isReady, starts := d.buffer.handOut(startNoted)
		timeIsUp := ctx.Err() != nil
		d.waiting = !isReady && !timeIsUp
		if d.buffer.wanted(d.waiting) > 0 {
			signal(d.wakeServe)
		}
		d.mu.Unlock()
		switch {
		case starts:
			return task, true
		case timeIsUp:
			return Task{}, false
		case !isReady:
			select {
			case <-d.wakeNext:
			case <-ctx.Done():
			}
		case d.noteStart(ctx, task):
			startNoted = task.CallKey + task.ID // to be handed out, if it is still the first
		default: // it has been recovered, or asynq's Redis does not answer: serve puts it back
			d.sleep(retryAfterError)
		}
	}
	d.sleep(retryAfterError) // asynq calls again at once
	return Task{}, false
}

// noteStart notes that a task starts. It reports false if the task has been recovered meanwhile, or the context ends.
func (d *Dispatcher) noteStart(ctx context.Context, task Task) bool {
	return insist(ctx, d, func(context.Context) (bool, error) { // with ctx: a lost answer does no harm here
		return d.Tasks.CheckActive(ctx, task.Ref, task.CallKey, asynqredis.NoteStart)
	})
}

// serve makes tasks ready while Next waits, or is about to. Only serve reads and changes the views of lines: others
// tell it news. When the dispatcher stops, serve puts back ready tasks, and asks others to keep its appointments.
func (d *Dispatcher) serve() {
	defer close(d.emptied)
	for !d.isStopped() {
		d.learn()
		d.mu.Lock()
		n := d.buffer.wanted(d.waiting)
		d.mu.Unlock()
		if n == 0 || !d.round(n) {
			d.restore(time.Now().Add(-bufferFor))
			until, idle := d.nextRound(time.Now())
			d.wait(until, idle)
		}
	}
	for !d.restore(time.Now()) && d.ctx.Err() == nil { // again: restore has slept since its error
	}
	for _, set := range d.sets {
		for _, l := range set.lines {
			if d.ctx.Err() == nil { // as in take
				d.RetryInBackground(d.Limiter.Line(l.name).Acknowledge) // makes no call if nothing is unacknowledged
			}
		}
		d.nudgeOthers(set, set.watched())
	}
}

// wait waits until a time, or for news. Meanwhile hear listens for nudges: it receives from idle, unless that is nil.
func (d *Dispatcher) wait(until time.Time, idle chan<- struct{}) {
	for {
		select {
		case idle <- struct{}{}:
		case <-d.wakeServe:
			return
		case <-time.After(time.Until(until)):
			return
		case <-d.serving.Done():
			return
		}
	}
}

// nextRound returns when to make the next round, or to put back what was ready for too long; and d.idle if Next waits.
func (d *Dispatcher) nextRound(now time.Time) (next time.Time, idle chan<- struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	next = now.Add(time.Hour)
	if ready := d.buffer.ready; len(ready) > 0 {
		next = latest(ready[0].activeSince.Add(bufferFor), now.Add(retryAfterError))
	}
	if !d.waiting {
		return next, nil
	}
	for _, set := range d.sets {
		next = earliest(next, latest(set.lookAt, now))
		for _, l := range set.lines {
			next = earliest(next, d.dueAt(l))
		}
	}
	return next, d.idle
}

// A buffer has the tasks that asynq gets next, also denied tasks, and counts the slots that are free.
type buffer struct {
	free   int         // slots
	ready  []Task      // the next first
	recent []time.Time // when tasks were handed out lately
}

// wanted returns how many tasks to make ready at once: one for each free slot, or more if slots become free quickly.
// It is 0 unless Next waits, or few tasks are left for the slots that become free, as slots should not wait for Redis:
// if 30 tasks were handed out within lookAhead, and only 10 are ready, it is at least 20.
func (b *buffer) wanted(waiting bool) int {
	since := time.Now().Add(-lookAhead)
	b.recent = slices.DeleteFunc(b.recent, func(at time.Time) bool { return at.Before(since) })
	freed := min(len(b.recent), takeMax) // within lookAhead: about as many as tasks were handed out lately
	takesAhead := freed >= aheadFrom && len(b.ready) <= freed/3
	if !waiting && !takesAhead {
		return 0
	}
	return min(max(1, b.free, freed-len(b.ready)), takeMax)
}

// makeReady makes tasks ready, and reports whether there are any.
func (d *Dispatcher) makeReady(tasks []Task) bool {
	if len(tasks) == 0 {
		return false
	}
	d.mu.Lock()
	d.buffer.ready = append(d.buffer.ready, tasks...)
	d.waiting = false
	d.mu.Unlock()
	signal(d.wakeNext)
	return true
}

// handOut returns the first task if one is ready, and removes it if it starts. A last attempt that is not denied starts
// only after Next has noted its start in Redis: then startNoted is its CallKey and ID.
func (b *buffer) handOut(startNoted string) (task Task, isReady, starts bool) {
	if len(b.ready) == 0 || time.Since(b.ready[0].activeSince) > staleAfter {
		return Task{}, false, false
	}
	task = b.ready[0]
	needsNote := !task.Verdict.isDenied() && task.Message.IsLastAttempt()
	if needsNote && startNoted != task.CallKey+task.ID {
		return task, true, false
	}
	b.ready = b.ready[1:]
	b.recent = append(b.recent, time.Now())
	b.free--
	return task, true, true
}

// Ended frees the slot of a task that was handed out.
func (d *Dispatcher) Ended() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.buffer.free++
}
