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
	found   bool // by the last round
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

// wanted returns how many tasks to take at once, 0 while none is to be made ready: one for each free slot,
// or more if slots become free quickly.
func (d *Dispatcher) wanted() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := &d.buffer
	if !d.waiting && !b.wantsMore() {
		return 0
	}
	return min(max(1, b.slots-b.running, b.freeSoon()-len(b.ready)), batchMax)
}

// wantsMore reports whether to make a round ahead of time, so that slots do not wait for Redis: they
// become free quickly, and the tasks that are ready run out.
func (b *buffer) wantsMore() bool {
	if !b.found || len(b.recent) < aheadFrom {
		return false
	}
	n := b.freeSoon()
	return n >= aheadFrom && len(b.ready) <= n/3
}

// freeSoon returns how many slots become free soon, by what was handed out lately.
func (b *buffer) freeSoon() int {
	b.recent = slices.DeleteFunc(b.recent, func(at time.Time) bool { return time.Since(at) > soon })
	return min(len(b.recent), soonMax)
}

// since returns how many tasks have been ready since before a time: the first ones.
func (b *buffer) since(before time.Time) (n int) {
	for n < len(b.ready) && !b.ready[n].active.After(before) {
		n++
	}
	return n
}
