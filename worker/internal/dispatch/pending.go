package dispatch

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// lookEvery, give or take a quarter, is how often a server looks for pending tasks, and at unwatched lines.
	lookEvery = time.Second
	// tasksPerPending is the number of tasks from lines after which one pending task has a turn, ahead of the lines.
	tasksPerPending = 3
)

// takePending dequeues up to n pending tasks of a set, and reports whether any came. If none came, it does not ask
// again until set.lookAt, unless the set outranks others.
func (d *Dispatcher) takePending(set *queueSet, n int) (found bool) {
	now := time.Now()
	if !set.outranks && now.Before(set.lookAt) {
		return false
	}
	var watched []any
	if now.Sub(set.watchedAt) >= watchEvery {
		watched, set.watchedAt = set.watched(), now
	}
	for _, queue := range set.draw(d.Queues) {
		if d.dequeue(set, queue, n, watched) {
			return true
		}
	}
	every := min(d.Poll, lookEvery)
	set.sinceTurn, set.lookAt = 0, now.Add(every*3/4+rand.N(max(1, every/2)))
	return false
}

// draw returns the queues in a random order for this round: a queue's chances follow its priority, as in asynq.
func (set *queueSet) draw(priorities map[string]int) []string {
	drawn := map[string]float64{}
	for _, queue := range set.queues {
		drawn[queue] = rand.ExpFloat64() / float64(priorities[queue])
	}
	return slices.SortedFunc(maps.Keys(drawn), func(a, b string) int { return cmp.Compare(drawn[a], drawn[b]) })
}

// dequeue makes pending tasks of a queue ready, and reserves for them. The same call tells Redis which lines
// this server watches, and returns the queue's lines that no server watches: they are asked now.
func (d *Dispatcher) dequeue(set *queueSet, queue string, n int, watched []any) bool {
	call := d.Tasks.NewCall()
	found := insist(d.ctx, d, func(ctx context.Context) (asynqredis.DequeueReply, error) {
		return d.Tasks.DequeuePending(ctx, queue, call, n, watched...)
	})
	for _, name := range found.Unwatched {
		if line := fmt.Sprint(name); set.lines[line] != nil {
			d.Nudge(queue, line)
		}
	}
	d.paused[queue] = found.Paused
	tasks := make([]Task, len(found.Messages))
	for i, m := range found.Messages {
		tasks[i] = d.newTask(queue, call, m, nil)
	}
	d.reserve(set, tasks)
	set.sinceTurn = max(0, set.sinceTurn-tasksPerPending*len(tasks))
	return d.makeReady(tasks) // also denied tasks: the middleware reports them, and puts them back
}
