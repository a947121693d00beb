package dispatch

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// aheadFrom is how many hand-outs within recently start a fetch ahead.
const aheadFrom = 8

// A buffered task is active in asynq's Redis and runs nowhere yet.
type buffered struct {
	Task
	from *batch
}

// A batch is the tasks that one call made active.
type batch struct {
	queue string
	call  string // by which it can be put back
	line  string // "" if the tasks were pending
	at    time.Time
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
	task, fromLine := d.buffer[0].Task, d.buffer[0].from.line != ""
	d.buffer[0] = buffered{}
	d.buffer = d.buffer[1:]
	d.skips = 0
	now := time.Now()
	d.pace.note(now, d.running)
	d.running++
	d.handed.add(now)
	g := d.groupOf(task.Queue)
	if fromLine {
		g.earned++
	} else {
		g.earned = max(0, g.earned-pendingFor)
	}
	if d.running >= d.Concurrency {
		d.passOnLater()
	}
	return task, true, false
}

// ready adds tasks to the buffer.
func (d *Dispatcher) ready(from *batch, tasks []Task) {
	if len(tasks) == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, task := range tasks {
		d.buffer = append(d.buffer, buffered{task, from})
	}
	d.made += len(tasks)
	d.expiry.Reset(bufferFor)
}

func (d *Dispatcher) madeReady() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.made
}

// fetchAhead makes the next tasks ready in the background while hand-outs follow one another
// quickly, so that slots do not wait for Redis.
func (d *Dispatcher) fetchAhead() {
	d.mu.Lock()
	rate := d.handed.since(time.Now().Add(-recently))
	ahead := d.full && !d.fetching && !d.closed && !d.isStopped() && rate >= aheadFrom && len(d.buffer) <= rate/2
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
	d.mu.Lock()
	old := map[*batch][]buffered{}
	var order []*batch
	kept := make([]buffered, 0, len(d.buffer))
	for _, b := range d.buffer {
		if b.from.at.After(before) {
			kept = append(kept, b)
			continue
		}
		if old[b.from] == nil {
			order = append(order, b.from)
		}
		old[b.from] = append(old[b.from], b)
	}
	if d.buffer = kept; len(kept) > 0 {
		d.expiry.Reset(max(time.Millisecond, time.Until(kept[0].from.at.Add(bufferFor))))
	}
	d.mu.Unlock()
	var failed error
	for _, from := range order {
		if err := d.restoreBatch(ctx, from, old[from]); err != nil {
			failed = errors.Join(failed, err)
			d.mu.Lock()
			d.buffer = append(old[from], d.buffer...)
			if !d.closed {
				d.expiry.Reset(bufferFor)
			}
			d.mu.Unlock()
		}
	}
	return failed
}

func (d *Dispatcher) restoreBatch(ctx context.Context, from *batch, tasks []buffered) error {
	var ids []string
	var tickets []throttle.TakenTicket
	for _, b := range tasks {
		ids = append(ids, b.ID)
		if b.Grant != nil {
			tickets = append(tickets, b.Grant.TakenTicket)
		}
	}
	var at time.Time // to pending
	if from.line != "" {
		at = time.Now().Add(fallbackMin)
	}
	if err := d.Asynq.Restore(ctx, from.queue, from.call, ids, at); err != nil {
		return err
	}
	if from.line != "" {
		d.putBack(from.line, from.queue, 0, tickets)
		return nil
	}
	for _, b := range tasks {
		if b.Grant != nil {
			d.GiveBack(b.Grant.Line, from.queue, b.Grant.TakenTicket)
		}
	}
	return nil
}

// empty puts back all tasks that are ready, and all whose reply was lost.
func (d *Dispatcher) empty(ctx context.Context) error {
	failed := d.restore(ctx, time.Now())
	d.mu.Lock()
	lost, pops := d.lost, d.lostPops
	d.lost, d.lostPops = nil, nil
	d.mu.Unlock()
	for _, p := range lost {
		var ids []string
		for _, ticket := range p.tickets {
			ids = append(ids, ticket.ID)
		}
		if err := d.Asynq.Restore(ctx, p.queue, p.call, ids, time.Now().Add(fallbackMin)); err != nil {
			failed = errors.Join(failed, err)
			d.mu.Lock()
			d.lost = append(d.lost, p)
			d.mu.Unlock()
			continue
		}
		d.putBack(p.line, p.queue, 0, p.tickets)
	}
	for _, p := range pops {
		messages, _, err := d.Asynq.DequeuePending(ctx, p.queue, p.call, p.n)
		if err == nil && len(messages) > 0 {
			var ids []string
			for _, m := range messages {
				ids = append(ids, m.ID())
			}
			err = d.Asynq.Restore(ctx, p.queue, p.call, ids, time.Time{})
		}
		if err != nil {
			failed = errors.Join(failed, err)
			d.mu.Lock()
			d.lostPops = append(d.lostPops, p)
			d.mu.Unlock()
		}
	}
	d.acknowledgeAll()
	return failed
}

// putBack returns tickets to their ranks, with their units, and asks their line after the given
// time. One that was taken without units has no rank in the line as it is now: forward has its task
// join again, as soon as it comes.
func (d *Dispatcher) putBack(line, queue string, again time.Duration, tickets []throttle.TakenTicket) {
	if len(tickets) == 0 {
		return
	}
	d.Later(func(ctx context.Context) error {
		var without []asynqredis.Rescored
		for _, t := range tickets {
			if !t.Decision.Granted {
				task := asynqredis.Waiting{ID: t.ID, JoinKey: t.Key}
				without = append(without, asynqredis.Rescored{Waiting: task, At: time.Now()})
			}
		}
		if len(without) > 0 {
			_ = d.Asynq.Rescore(ctx, queue, without) // else forward finds it two minutes later
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

// A popping is one dequeue of pending tasks.
type popping struct {
	queue, call string
	n           int
}

// A stuck ticket's task was active when it was to be picked.
type stuck struct {
	since time.Time
	pause time.Duration
}
