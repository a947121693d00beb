package dispatch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// batchMax is the most tasks that one take or dequeue asks for. More cost Redis less for each, and
	// each waits longer for the others.
	batchMax = 20

	// soon is how long a task that is taken may wait for a slot, about. soonMax is the most tasks that
	// do.
	soon    = 10 * time.Millisecond
	soonMax = 64

	// aheadFrom is how many slots that become free soon start a round ahead of time.
	aheadFrom = 8

	// bufferFor is how long a task is kept ready for a slot.
	bufferFor = 500 * time.Millisecond

	// pendingFor is how many hand-outs from the line earn pending tasks one.
	pendingFor = 3
)

// A fetch is one call that makes tasks of a queue active: a pick of tickets that were taken from a
// line, or a dequeue of pending tasks.
type fetch struct {
	group  *group
	queue  string
	callID string // by which it can be repeated, and its tasks put back

	n       int   // the most tasks of a dequeue
	watched []any // lines that this server watches, to be said by a dequeue

	line    string // of a pick; "" for a dequeue
	tickets []throttle.TakenTicket
	due     time.Time // of the first ticket; zero: unknown
	sent    time.Time // the take
	taken   time.Time // by the clock of Redis

	at    time.Time // when its tasks were ready
	ready []Task    // that are active in asynq's Redis and run nowhere yet, the next first
}

// A buffer has the tasks that are ready for a slot, and counts the slots.
type buffer struct {
	sync.Mutex
	fetched []*fetch    // with tasks to hand out, the next first
	lost    []*fetch    // whose reply has not come
	recent  []time.Time // of the last hand-outs
	running int         // tasks handed out that have not ended
	slots   int
	found   bool // by the last round
	ahead   bool // a round is under way ahead of time
}

// wanted returns how many tasks to take at once: one for each free slot, or more if slots become
// free quickly. It returns, too, how many turns before lines the pending tasks of a group have earned.
func (b *buffer) wanted(g *group) (n, turns int) {
	b.Lock()
	defer b.Unlock()
	n = max(1, b.slots-b.running, b.freeSoon()-b.count())
	return min(n, batchMax), g.earned / pendingFor
}

// count returns how many tasks are ready. The lock is held.
func (b *buffer) count() (n int) {
	for _, f := range b.fetched {
		n += len(f.ready)
	}
	return n
}

// freeSoon returns how many slots become free soon, by what was handed out lately. The lock is held.
func (b *buffer) freeSoon() int {
	b.recent = slices.DeleteFunc(b.recent, func(at time.Time) bool { return time.Since(at) > soon })
	return min(len(b.recent), soonMax)
}

// begins reports whether to make a round ahead of time, which is under way from now on: slots become
// free quickly, and the tasks that are ready run out.
func (b *buffer) begins() bool {
	b.Lock()
	defer b.Unlock()
	if b.ahead || !b.found || len(b.recent) < aheadFrom {
		return false
	}
	soon := b.freeSoon()
	b.ahead = soon >= aheadFrom && b.count() <= soon/3
	return b.ahead
}

// ended notes what a round found.
func (b *buffer) ended(found, ahead bool) {
	b.Lock()
	defer b.Unlock()
	b.found, b.ahead = found, b.ahead && !ahead
}

// handOut returns the next task that is ready.
func (b *buffer) handOut() (task Task, ok bool) {
	b.Lock()
	defer b.Unlock()
	if len(b.fetched) == 0 {
		return Task{}, false
	}
	from := b.fetched[0]
	task, from.ready = from.ready[0], from.ready[1:]
	if len(from.ready) == 0 {
		b.fetched = b.fetched[1:]
	}
	b.recent = append(b.recent, time.Now())
	b.running++
	if from.line != "" {
		from.group.earned++
	} else {
		from.group.earned = max(0, from.group.earned-pendingFor)
	}
	return task, true
}

// noPending notes that there is no pending task to take a turn.
func (b *buffer) noPending(g *group) {
	b.Lock()
	defer b.Unlock()
	g.earned = 0
}

// Ended frees the slot of a task that was handed out.
func (d *Dispatcher) Ended() {
	d.buffer.Lock()
	defer d.buffer.Unlock()
	d.buffer.running--
}

// load returns whether no slot is free, and when the first tasks were ready that still are.
func (b *buffer) load() (full bool, ready time.Time) {
	b.Lock()
	defer b.Unlock()
	if len(b.fetched) > 0 {
		ready = b.fetched[0].at
	}
	return b.running >= b.slots, ready
}

// put notes the answer of a fetch. Open reports whether one of the same line has no answer.
func (b *buffer) put(f *fetch, ready []Task, err error) (open bool) {
	b.Lock()
	defer b.Unlock()
	if err != nil {
		b.lost = append(b.lost, f)
	} else if len(ready) > 0 {
		f.at, f.ready = time.Now(), ready
		b.fetched = append(b.fetched, f)
	}
	return slices.ContainsFunc(b.lost, func(l *fetch) bool { return l.line == f.line })
}

// lostOne removes and returns a fetch whose reply has not come, or nil.
func (b *buffer) lostOne() (f *fetch) {
	b.Lock()
	defer b.Unlock()
	if len(b.lost) > 0 {
		f, b.lost = b.lost[0], b.lost[1:]
	}
	return f
}

// since removes and returns the fetches whose tasks have been ready since before a time.
func (b *buffer) since(before time.Time) (old []*fetch) {
	b.Lock()
	defer b.Unlock()
	for len(b.fetched) > 0 && !b.fetched[0].at.After(before) {
		old, b.fetched = append(old, b.fetched[0]), b.fetched[1:]
	}
	return old
}

// fetch makes a call, and returns how many tasks it has made ready. If it gets no answer it must be
// repeated before anything else, as some tasks may be active.
func (d *Dispatcher) fetch(ctx context.Context, f *fetch) (n int, err error) {
	call := d.pick
	if f.line == "" {
		call = d.dequeue
	}
	ready, err := call(ctx, f)
	if open := d.buffer.put(f, ready, err); f.line != "" {
		d.lines.picked(f.group, f.line, open)
	}
	return len(ready), err
}

// restore puts back tasks that have been ready since before the given time, and their tickets to
// their ranks. Tasks that cannot be put back stay ready.
func (d *Dispatcher) restore(ctx context.Context, before time.Time) (failed error) {
	for _, f := range d.buffer.since(before) {
		if err := d.undo(ctx, f); err != nil {
			failed = errors.Join(failed, err)
			d.buffer.put(f, f.ready, nil)
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
	d.tend()
	return failed
}

// putBack returns tickets to their ranks, with their units, and asks their line after the given
// time. One that was taken without units has no rank in the line as it is now: its task, which is at
// rest, is due at once, and joins again.
func (d *Dispatcher) putBack(line, queue string, again time.Duration, tickets []throttle.TakenTicket) {
	d.back(line, queue, again, tickets, func(ctx context.Context) error {
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
		return d.Limiter.Line(line).PutBack(ctx, tickets)
	})
}

// GiveBack refunds tickets that leave, in the background, and asks their line again: other tickets
// may fit.
func (d *Dispatcher) GiveBack(line, queue string, tickets ...throttle.TakenTicket) {
	d.back(line, queue, 0, tickets, func(ctx context.Context) error {
		return d.Limiter.Line(line).Refund(ctx, tickets)
	})
}

func (d *Dispatcher) back(
	line, queue string, again time.Duration, tickets []throttle.TakenTicket, give func(context.Context) error) {
	if len(tickets) == 0 {
		return
	}
	d.Later(func(ctx context.Context) error {
		err := give(ctx)
		if err == nil {
			d.Expect(line, queue, again)
		}
		return err
	})
}
