package dispatch

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// pendingFor is how many hand-outs from the line earn pending tasks one.
	pendingFor = 3

	// emptyEvery is how often one of the empty lines is asked.
	emptyEvery = 5 * time.Second
)

// A group is the queues that are asked together: all of them, or one with strict priorities.
type group struct {
	queues []string
	strict bool // less important groups follow, and must not go before its pending tasks

	earned     int              // hand-outs from the line that earned pending ones no turn yet
	lines      map[string]*line // by name
	pollAt     time.Time        // when pending tasks are looked for, after there were none
	lastPolicy string           // of which something was taken last

	reached map[string]float64 // by policy with shards: where the shard was whose turn it was last
}

func groups(queues map[string]int, strict bool) (all []*group) {
	names := slices.Sorted(maps.Keys(queues))
	together := [][]string{names}
	if strict {
		slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(queues[b], queues[a]) })
		together = slices.Collect(slices.Chunk(names, 1))
	}
	for i, names := range together {
		all = append(all, &group{
			queues: names, strict: i+1 < len(together),
			lines: map[string]*line{}, reached: map[string]float64{},
		})
	}
	return all
}

func (d *Dispatcher) groupOf(queue string) *group {
	for _, g := range d.groups {
		if slices.Contains(g.queues, queue) {
			return g
		}
	}
	return d.groups[0] // asynq runs what its queue held, whatever queue the message names
}

// with returns the queues of a group, and those of more important ones.
func (d *Dispatcher) with(g *group) (queues []string) {
	for _, other := range d.groups {
		queues = append(queues, other.queues...)
		if other == g {
			break
		}
	}
	return queues
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

// round makes tasks ready, if there are any. It repeats unanswered calls first. Then it asks, group
// by group, the lines that are due and the pending tasks.
func (d *Dispatcher) round(ctx context.Context) error {
	if found, err := d.askAgain(ctx); err != nil || found {
		return err
	}
	n, now := d.wanted(), time.Now()
	d.know(now)
	for _, g := range d.groups {
		queues := g.draw(d.Queues)
		if turns := d.turns(g); turns > 0 {
			if found, err := d.pending(ctx, g, queues, min(n, turns), now); err != nil || found {
				return err
			}
		}
		if found, err := d.takeFromGroup(ctx, g, n, now); err != nil || found {
			return err
		}
		if found, err := d.pending(ctx, g, queues, n, now); err != nil || found {
			return err
		}
	}
	return nil
}

// wanted returns how many tasks to take at once: one for each free slot, or more if slots become
// free quickly.
func (d *Dispatcher) wanted() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return min(max(1, d.Concurrency-d.running, d.freeSoon()-d.buffered()), batchMax)
}

// freeSoon returns how many slots become free soon, if all are taken. The lock is held.
func (d *Dispatcher) freeSoon() int { return d.pace.within(soon, d.Concurrency, soonMax) }

// turns returns how many turns before the line the pending tasks have earned.
func (d *Dispatcher) turns(g *group) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return g.earned / pendingFor
}

// pending dequeues pending tasks, unless there were none a moment ago.
func (d *Dispatcher) pending(ctx context.Context, g *group, queues []string, n int, now time.Time) (
	found bool, err error) {
	d.mu.Lock()
	rests := now.Before(g.pollAt) && !g.strict
	d.mu.Unlock()
	if rests {
		return false, nil
	}
	for _, queue := range queues {
		n, err := d.fetch(ctx, &fetch{queue: queue, callID: d.Asynq.Call(), n: n})
		if err != nil || n > 0 {
			return true, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	g.earned = 0
	g.pollAt = now.Add(d.Poll/2 + rand.N(max(1, d.Poll)))
	return false, nil
}

// dequeue returns pending tasks, with what was decided about them.
func (d *Dispatcher) dequeue(ctx context.Context, f *fetch) ([]Task, error) {
	messages, paused, err := d.Asynq.DequeuePending(ctx, f.queue, f.callID, f.n)
	if err != nil {
		return nil, err
	}
	if paused {
		d.notePaused(f.queue)
	}
	d.mu.Lock()
	d.full = len(messages) >= f.n
	d.mu.Unlock()
	tasks := tasksOf(f.queue, messages)
	d.reserve(ctx, f.queue, tasks)
	return tasks, nil
}

// askAgain repeats calls that were not answered.
func (d *Dispatcher) askAgain(ctx context.Context) (found bool, err error) {
	for {
		d.mu.Lock()
		if len(d.lost) == 0 {
			d.mu.Unlock()
			return found, nil
		}
		f := d.lost[0]
		d.lost = d.lost[1:]
		d.mu.Unlock()
		n, err := d.fetch(ctx, f)
		if err != nil {
			return found, err
		}
		found = found || n > 0
	}
}

const pausedFor = time.Second

// notePaused notes that a queue is paused. Its lines are not taken from until it has been checked
// again.
func (d *Dispatcher) notePaused(queue string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.paused[queue] = time.Now().Add(pausedFor)
}

// open returns the queues that are not paused.
func (d *Dispatcher) open(ctx context.Context, queues []string, now time.Time) ([]string, error) {
	d.mu.Lock()
	paused := maps.Clone(d.paused)
	d.mu.Unlock()
	if len(paused) == 0 {
		return queues, nil
	}
	var open []string
	for _, queue := range queues {
		again, is := paused[queue]
		if is && now.After(again) {
			var err error
			if is, err = d.Asynq.IsPaused(ctx, queue); err != nil {
				return nil, err
			}
			if is {
				d.notePaused(queue)
			} else {
				d.mu.Lock()
				delete(d.paused, queue)
				d.mu.Unlock()
			}
		}
		if !is {
			open = append(open, queue)
		}
	}
	return open, nil
}
