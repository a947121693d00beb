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
	index   int
	draws   []string // the queues, each as often as its priority says
	ordered []string // the queues
	strict  bool     // less important groups follow, and must not go before its pending tasks

	earned int              // hand-outs from the line that earned pending ones no turn yet
	lines  map[string]*line // by name
	pollAt time.Time        // when pending tasks are looked for, after there were none
	served string           // the policy of which something was taken last

	reached map[string]float64 // by policy with shards: where the shard was whose turn it was last
}

func groups(queues map[string]int, strict bool) []*group {
	names := slices.Sorted(maps.Keys(queues))
	if !strict {
		g := &group{ordered: names, lines: map[string]*line{}, reached: map[string]float64{}}
		divisor := 0
		for _, priority := range queues {
			for divisor, priority = priority, divisor; priority > 0; {
				divisor, priority = priority, divisor%priority
			}
		}
		for _, name := range names {
			for range queues[name] / max(1, divisor) {
				g.draws = append(g.draws, name)
			}
		}
		return []*group{g}
	}
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(queues[b], queues[a]) })
	var gs []*group
	for i, name := range names {
		one := []string{name}
		gs = append(gs, &group{index: i, draws: one, ordered: one, strict: i+1 < len(names), lines: map[string]*line{}, reached: map[string]float64{}})
	}
	return gs
}

func (d *Dispatcher) groupOf(queue string) *group {
	for _, g := range d.groups {
		if slices.Contains(g.ordered, queue) {
			return g
		}
	}
	return d.groups[0] // asynq runs what its queue held, whatever queue the message names
}

// draw returns the queues in the order of this round. Asynq draws them in the same way.
func (g *group) draw() []string {
	if len(g.ordered) == 1 {
		return g.ordered
	}
	names := slices.Clone(g.draws)
	rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	order := names[:0]
	for _, name := range names {
		if !slices.Contains(order, name) {
			order = append(order, name)
		}
	}
	return order
}

// round makes tasks ready, if there are any. It repeats unanswered calls first. Then it asks, group
// by group, the lines that are due and the pending tasks.
func (d *Dispatcher) round(ctx context.Context) error {
	before := d.madeReady()
	found := func() bool { return d.madeReady() > before }
	if err := d.askAgain(ctx); err != nil || found() {
		return err
	}
	n := d.wanted()
	now := time.Now()
	d.know(now)
	for _, g := range d.groups {
		queues := g.draw()
		if turns := d.turns(g); turns > 0 {
			if err := d.pending(ctx, g, queues, min(n, turns), now); err != nil || found() {
				return err
			}
		}
		if err := d.lines(ctx, g, queues, n, now); err != nil || found() {
			return err
		}
		if err := d.pending(ctx, g, queues, n, now); err != nil || found() {
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
	quick := d.pace.within(soon, d.Concurrency, recentMax) - len(d.buffer)
	return min(max(1, d.Concurrency-d.running, quick), batchMax)
}

// turns returns how many turns before the line the pending tasks have earned.
func (d *Dispatcher) turns(g *group) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return g.earned / pendingFor
}

// pending dequeues pending tasks, unless there were none a moment ago.
func (d *Dispatcher) pending(ctx context.Context, g *group, queues []string, n int, now time.Time) error {
	d.mu.Lock()
	rests := now.Before(g.pollAt) && !g.strict
	d.mu.Unlock()
	if rests {
		return nil
	}
	for _, queue := range queues {
		p := &popping{queue: queue, call: d.Asynq.Call(), n: n}
		found, err := d.pop(ctx, p)
		if err != nil || found {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	g.earned = 0
	g.pollAt = now.Add(d.Poll/2 + rand.N(max(1, d.Poll)))
	return nil
}

// pop makes one dequeue. If it gets no answer it must be repeated before anything else.
func (d *Dispatcher) pop(ctx context.Context, p *popping) (found bool, err error) {
	messages, paused, err := d.Asynq.DequeuePending(ctx, p.queue, p.call, p.n)
	if err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.lostPops = append(d.lostPops, p)
		return false, err
	}
	if paused {
		d.pause(p.queue)
	}
	d.mu.Lock()
	d.full = len(messages) >= p.n
	d.mu.Unlock()
	tasks := make([]Task, len(messages))
	for i, m := range messages {
		tasks[i] = Task{Message: m}
		tasks[i].Queue, tasks[i].ID = p.queue, m.ID()
	}
	d.reserve(ctx, p.queue, tasks)
	d.ready(&batch{queue: p.queue, call: p.call, at: time.Now()}, tasks)
	return len(tasks) > 0, nil
}

// askAgain repeats calls that were not answered.
func (d *Dispatcher) askAgain(ctx context.Context) error {
	for {
		d.mu.Lock()
		var lost *picking
		var pop *popping
		if len(d.lost) > 0 {
			lost, d.lost = d.lost[0], d.lost[1:]
		} else if len(d.lostPops) > 0 {
			pop, d.lostPops = d.lostPops[0], d.lostPops[1:]
		}
		d.mu.Unlock()
		var err error
		switch {
		case lost != nil:
			err = d.pick(ctx, lost)
		case pop != nil:
			_, err = d.pop(ctx, pop)
		default:
			return nil
		}
		if err != nil {
			return err
		}
	}
}

const pausedFor = time.Second

// pause notes that a queue is paused. Its lines are not taken from until it has been checked again.
func (d *Dispatcher) pause(queue string) {
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
				d.pause(queue)
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
