package dispatch

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// aheadFrom is how many slots that become free soon start a fetch ahead.
const aheadFrom = 8

// A fetch is one call that makes tasks of a queue active: a pick of tickets that were taken from a
// line, or a dequeue of pending tasks.
type fetch struct {
	queue  string
	callID string // by which it can be repeated, and its tasks put back
	n      int    // the most tasks of a dequeue

	line    string // of a pick; "" for a dequeue
	tickets []throttle.TakenTicket
	due     time.Time // of the first ticket; zero: unknown
	sent    time.Time // the take
	taken   time.Time // by the clock of Redis

	at    time.Time // when its tasks were ready
	ready []Task    // that are active in asynq's Redis and run nowhere yet, the next first
}

// fetch makes a call, and returns how many tasks it has made ready. If it gets no answer it must be
// repeated before anything else, as some tasks may be active.
func (d *Dispatcher) fetch(ctx context.Context, f *fetch) (n int, err error) {
	call := d.pick
	if f.line == "" {
		call = d.dequeue
	}
	ready, err := call(ctx, f)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err != nil:
		d.lost = append(d.lost, f)
		if timer := d.acks[f.line]; timer != nil {
			timer.Stop()
		}
		return 0, err
	case f.line != "":
		d.acknowledgeLater(f.line)
	}
	if len(ready) > 0 {
		f.at, f.ready = time.Now(), ready
		d.buffer = append(d.buffer, f)
		d.expiry.Reset(bufferFor)
	}
	return len(ready), nil
}

// handOut returns the next task that is ready. Answered means that the previous call already found
// all queues empty, so this one returns at once.
func (d *Dispatcher) handOut() (task Task, ok, answered bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.buffer) == 0 {
		if answered = d.skips > 0; answered {
			d.skips--
		}
		return Task{}, false, answered
	}
	from := d.buffer[0]
	task, from.ready = from.ready[0], from.ready[1:]
	if len(from.ready) == 0 {
		d.buffer = d.buffer[1:]
	}
	d.skips = 0
	d.pace.note(time.Now(), d.running)
	d.running++
	g := d.groupOf(task.Queue)
	if from.line != "" {
		g.earned++
	} else {
		g.earned = max(0, g.earned-pendingFor)
	}
	if d.running >= d.Concurrency {
		d.passOnLater()
	}
	return task, true, false
}

// buffered returns how many tasks are ready. The lock is held.
func (d *Dispatcher) buffered() (n int) {
	for _, f := range d.buffer {
		n += len(f.ready)
	}
	return n
}

// fetchAhead makes the next tasks ready in the background while slots become free quickly, so that
// they do not wait for Redis.
func (d *Dispatcher) fetchAhead() {
	d.mu.Lock()
	soon := d.freeSoon()
	ahead := d.full && !d.fetching && !d.closed && !d.isStopped() &&
		soon >= aheadFrom && d.buffered() <= soon/3
	d.fetching = d.fetching || ahead
	d.mu.Unlock()
	if !ahead {
		return
	}
	d.inBackground(func() {
		d.rounds <- struct{}{}
		err := d.round(d.ctx)
		<-d.rounds
		d.mu.Lock()
		d.fetching, d.full = false, d.full && err == nil // Next meets the same trouble
		d.mu.Unlock()
		if d.isStopped() {
			d.Later(d.empty)
		}
	})
}

// roundUnlessReady makes a round, unless the round that was under way has made tasks ready.
func (d *Dispatcher) roundUnlessReady(ctx context.Context) error {
	d.rounds <- struct{}{}
	defer func() { <-d.rounds }()
	d.mu.Lock()
	ready := len(d.buffer) > 0
	d.mu.Unlock()
	if ready {
		return nil
	}
	return d.round(ctx)
}

// expire puts back tasks for which no slot has become free.
func (d *Dispatcher) expire() {
	d.Later(func(ctx context.Context) error { return d.restore(ctx, time.Now().Add(-bufferFor)) })
}

// restore puts back tasks that have been ready since before the given time, and their tickets to
// their ranks. Tasks that cannot be put back stay ready.
func (d *Dispatcher) restore(ctx context.Context, before time.Time) error {
	var old, kept []*fetch
	d.mu.Lock()
	for _, f := range d.buffer {
		if f.at.After(before) {
			kept = append(kept, f)
		} else {
			old = append(old, f)
		}
	}
	if d.buffer = kept; len(kept) > 0 {
		d.expiry.Reset(max(time.Millisecond, time.Until(kept[0].at.Add(bufferFor))))
	}
	d.mu.Unlock()
	var failed error
	for _, f := range old {
		if err := d.undo(ctx, f); err != nil {
			failed = errors.Join(failed, err)
			d.mu.Lock()
			d.buffer = append([]*fetch{f}, d.buffer...)
			if !d.closed {
				d.expiry.Reset(bufferFor)
			}
			d.mu.Unlock()
		}
	}
	return failed
}

// undo puts the tasks of a fetch back that are ready.
func (d *Dispatcher) undo(ctx context.Context, f *fetch) error {
	var ids []string
	var tickets []throttle.TakenTicket
	for _, task := range f.ready {
		ids = append(ids, task.ID)
		if task.Grant != nil {
			tickets = append(tickets, task.Grant.TakenTicket)
		}
	}
	var at time.Time // to pending
	if f.line != "" {
		at = time.Now().Add(fallbackMin)
	}
	if err := d.Asynq.Restore(ctx, f.queue, f.callID, ids, at); err != nil {
		return err
	}
	if f.line != "" {
		d.putBack(f.line, f.queue, 0, tickets)
		return nil
	}
	for _, task := range f.ready {
		if task.Grant != nil {
			d.GiveBack(task.Grant.Line, f.queue, task.Grant.TakenTicket)
		}
	}
	return nil
}

// empty puts back all tasks that are ready, and those whose reply was lost: it asks for them again.
func (d *Dispatcher) empty(ctx context.Context) error {
	_, failed := d.askAgain(ctx)
	failed = errors.Join(failed, d.restore(ctx, time.Now()))
	d.acknowledgeAll()
	return failed
}

func tasksOf(queue string, messages []asynqredis.Message) []Task {
	tasks := make([]Task, len(messages))
	for i, m := range messages {
		tasks[i] = Task{Ref: asynqredis.Ref{Queue: queue, ID: m.ID()}, Message: m}
	}
	return tasks
}

// putBack returns tickets to their ranks, with their units, and asks their line after the given
// time. One that was taken without units has no rank in the line as it is now: its task, which is at
// rest, is due at once, and joins again.
func (d *Dispatcher) putBack(line, queue string, again time.Duration, tickets []throttle.TakenTicket) {
	if len(tickets) == 0 {
		return
	}
	d.Later(func(ctx context.Context) error {
		var without []asynqredis.Arranged
		for _, t := range tickets {
			if !t.Decision.Granted {
				task := asynqredis.Waiting{ID: t.ID, JoinKey: t.Key}
				without = append(without, asynqredis.Arranged{Waiting: task, At: time.Now()})
			}
		}
		if len(without) > 0 {
			if err := d.Asynq.Arrange(ctx, queue, without); err != nil {
				return err
			}
			d.WakeAt(queue, time.Now())
		}
		err := d.Limiter.Line(line).PutBack(ctx, tickets)
		if err == nil {
			d.Expect(line, queue, again)
		}
		return err
	})
}

// GiveBack refunds tickets that leave, in the background, and asks their line again: other tickets
// may fit.
func (d *Dispatcher) GiveBack(line, queue string, tickets ...throttle.TakenTicket) {
	if len(tickets) == 0 {
		return
	}
	d.Later(func(ctx context.Context) error {
		err := d.Limiter.Line(line).Refund(ctx, tickets)
		if err == nil {
			d.Expect(line, queue, 0)
		}
		return err
	})
}
