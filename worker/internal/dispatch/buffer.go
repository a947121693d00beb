package dispatch

import (
	"slices"
	"time"
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

	// pendingFor is how many tasks from lines earn pending tasks one.
	pendingFor = 3
)

// A buffer has the tasks that are ready for a slot, and counts the slots.
type buffer struct {
	ready   []Task      // the next first
	recent  []time.Time // of the last hand-outs
	running int         // tasks handed out that have not ended
	slots   int
}

// handOut returns the next task that is ready.
func (b *buffer) handOut() (task Task, ok bool) {
	if len(b.ready) == 0 {
		return Task{}, false
	}
	task, b.ready = b.ready[0], b.ready[1:]
	b.recent = append(b.recent, time.Now())
	b.running++
	return task, true
}

// Ended frees the slot of a task that was handed out.
func (d *Dispatcher) Ended() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.buffer.running--
}

// wanted returns how many tasks to make ready at once: one for each free slot, or more if slots become free
// quickly. It is 0 unless Next waits, or the tasks that are ready run out: those that slots need soon are
// made ready ahead of time, so that slots do not wait for Redis.
func (b *buffer) wanted(waiting bool) int {
	since := time.Now().Add(-soon)
	b.recent = slices.DeleteFunc(b.recent, func(at time.Time) bool { return at.Before(since) })
	freed := min(len(b.recent), soonMax) // soon, by what was handed out lately
	if ahead := freed >= aheadFrom && len(b.ready) <= freed/3; !waiting && !ahead {
		return 0
	}
	return min(max(1, b.slots-b.running, freed-len(b.ready)), batchMax)
}

// since returns how many tasks have been ready since before a time: the first ones.
func (b *buffer) since(before time.Time) (n int) {
	for n < len(b.ready) && !b.ready[n].active.After(before) {
		n++
	}
	return n
}
