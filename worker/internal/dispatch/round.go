package dispatch

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// pausedFor is when to ask again a line all of whose queues are paused.
	pausedFor = time.Second

	// lookMost bounds the time between two looks at the lines that nobody watches, but in a test kit.
	lookMost    = time.Second
	lookMostKit = time.Minute
)

// A group is the queues that are asked together: all of them, or one with strict priorities.
type group struct {
	queues []string
	with   []string // and those of more important groups: a take names them, too
	strict bool     // less important groups follow, and must not go before its pending tasks

	// Of Dispatcher.buffer.
	earned int // hand-outs from lines that earned pending tasks no turn yet

	// Of Dispatcher.lines.
	lines     map[string]*line   // by name
	reached   map[string]float64 // by policy with shards: where the shard was whose turn it was last
	served    string             // the policy of which something was taken last
	watchedAt time.Time          // when this server said last which lines it watches
	lookAt    time.Time          // when to look at its queues, after there was nothing
	pollAt    time.Time          // from when on a look is for pending tasks, too
}

func groups(queues map[string]int, strict bool) (all []*group) {
	names := slices.Sorted(maps.Keys(queues))
	together := [][]string{names}
	if strict {
		slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(queues[b], queues[a]) })
		together = slices.Collect(slices.Chunk(names, 1))
	}
	for i, queues := range together {
		all = append(all, &group{
			queues: queues, with: slices.Concat(together[:i+1]...), strict: i+1 < len(together),
			lines: map[string]*line{}, reached: map[string]float64{},
		})
	}
	return all
}

func (d *Dispatcher) groupOf(queue string) *group {
	for _, g := range d.lines.groups {
		if slices.Contains(g.queues, queue) {
			return g
		}
	}
	return d.lines.groups[0] // asynq runs what its queue held, whatever queue the message names
}

// draw returns the queues in the order of this round: each is the next with a chance by its
// priority, as in asynq.
func (g *group) draw(priorities map[string]int) []string {
	at := map[string]float64{}
	for _, queue := range g.queues {
		at[queue] = rand.ExpFloat64() / float64(priorities[queue])
	}
	return slices.SortedFunc(maps.Keys(at), func(a, b string) int { return cmp.Compare(at[a], at[b]) })
}

// roundUnlessReady makes a round, unless the one that was under way has made tasks ready.
func (d *Dispatcher) roundUnlessReady(ctx context.Context) (found bool, err error) {
	d.rounds <- struct{}{}
	defer func() { <-d.rounds }()
	if _, ready := d.buffer.load(); !ready.IsZero() {
		return true, nil
	}
	found, err = d.round(ctx)
	d.buffer.ended(found && err == nil, false)
	return found, err
}

// fetchAhead makes a round in the background while slots become free quickly, so that they do not wait
// for Redis.
func (d *Dispatcher) fetchAhead() {
	if d.isStopped() || !d.buffer.begins() {
		return
	}
	d.inBackground(func() {
		d.rounds <- struct{}{}
		found, err := d.round(d.ctx)
		<-d.rounds
		d.buffer.ended(found && err == nil, true) // Next meets the same trouble
		if d.isStopped() {
			d.Later(d.empty)
		}
	})
}

// round makes tasks ready, and reports whether there are any. It repeats unanswered calls first. Then
// it asks, group by group, the lines that are due and the pending tasks.
func (d *Dispatcher) round(ctx context.Context) (found bool, err error) {
	if found, err = d.askAgain(ctx); err != nil || found {
		return found, err
	}
	now := time.Now()
	d.lines.know(d.Limiter.Lines())
	for _, g := range d.lines.groups {
		n, turns := d.buffer.wanted(g)
		if turns > 0 {
			found, err = d.pending(ctx, g, min(n, turns), now)
		}
		if err == nil && !found {
			found, err = d.takeFrom(ctx, g, n, now)
		}
		if err == nil && !found {
			found, err = d.pending(ctx, g, n, now)
		}
		if err != nil || found {
			return found, err
		}
	}
	return false, nil
}

// askAgain repeats calls that were not answered.
func (d *Dispatcher) askAgain(ctx context.Context) (found bool, err error) {
	for f := d.buffer.lostOne(); f != nil; f = d.buffer.lostOne() {
		n, err := d.fetch(ctx, f)
		if err != nil {
			return found, err
		}
		found = found || n > 0
	}
	return found, nil
}

// pending dequeues pending tasks, unless there were none a moment ago.
func (d *Dispatcher) pending(ctx context.Context, g *group, n int, now time.Time) (found bool, err error) {
	d.lines.Lock()
	poll, look := g.strict || !now.Before(g.pollAt), g.strict || !now.Before(g.lookAt)
	d.lines.Unlock()
	if !look {
		return false, nil
	}
	if !poll {
		n = 0
	}
	if !d.isQuiet(g, now) {
		watched := d.lines.watched(g, now)
		for _, queue := range g.draw(d.Queues) {
			n, err := d.fetch(ctx, &fetch{group: g, queue: queue, callID: d.Asynq.Call(), n: n, watched: watched})
			if err != nil || n > 0 {
				return true, err
			}
		}
	}
	d.buffer.noPending(g)
	d.lines.Lock()
	defer d.lines.Unlock()
	every := min(d.Poll, lookMost)
	g.lookAt = now.Add(every*3/4 + rand.N(max(1, every/2)))
	if poll {
		g.pollAt = now.Add(d.Poll * 3 / 4)
	}
	return false, nil
}

// isQuiet reports, in a test kit, that a look at the queues of a group would find nothing.
func (d *Dispatcher) isQuiet(g *group, now time.Time) bool {
	if d.HasPending == nil || now.Sub(g.watchedAt) >= lookMostKit {
		return false
	}
	d.lines.Lock()
	defer d.lines.Unlock()
	return !slices.ContainsFunc(g.queues, func(queue string) bool {
		return d.lines.paused[queue] || d.HasPending(queue)
	})
}

// pendingNow has Next look for pending tasks at once.
func (d *Dispatcher) pendingNow(queue string) {
	d.lines.Lock()
	defer d.lines.Unlock()
	g := d.groupOf(queue)
	g.lookAt, g.pollAt = time.Time{}, time.Time{}
	d.nudges.signal()
}

// dequeue returns pending tasks, with what was decided about them. It also looks at the list of the
// lines in which tasks of the queue wait.
func (d *Dispatcher) dequeue(ctx context.Context, f *fetch) ([]Task, error) {
	found, err := d.Asynq.DequeuePending(ctx, f.queue, f.callID, f.n, f.watched...)
	if err != nil {
		return nil, err
	}
	d.lines.unwatched(f.group, found.Unwatched)
	d.setPaused(f.queue, found.Paused)
	tasks := make([]Task, len(found.Messages))
	for i, m := range found.Messages {
		tasks[i] = Task{Ref: asynqredis.Ref{Queue: f.queue, ID: m.ID()}, Message: m}
	}
	d.reserve(ctx, f.group, f.queue, tasks)
	return tasks, nil
}

// setPaused notes whether a queue is paused. Its lines are not taken from until it is not.
func (d *Dispatcher) setPaused(queue string, is bool) {
	d.lines.Lock()
	defer d.lines.Unlock()
	d.lines.paused[queue] = is
}
