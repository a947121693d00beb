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

	// pendingFor is how many hand-outs from the line earn pending tasks one.
	pendingFor = 3
)

// A fetched is what one call has made active: a pick of tickets that were taken from a line, or a
// dequeue of pending tasks.
type fetched struct {
	group  *group
	queue  string
	callID string // by which its tasks can be put back
	line   string // "" for pending tasks
	at     time.Time
	tasks  []Task // that run nowhere yet, the next first
}

// A buffer has the tasks that are ready for a slot, and counts the slots.
type buffer struct {
	fetched []*fetched  // the next first
	recent  []time.Time // of the last hand-outs
	running int         // tasks handed out that have not ended
	slots   int
	found   bool // by the last round
}

// handOut returns the next task that is ready.
func (b *buffer) handOut() (task Task, ok bool) {
	if len(b.fetched) == 0 {
		return Task{}, false
	}
	from := b.fetched[0]
	task, from.tasks = from.tasks[0], from.tasks[1:]
	if len(from.tasks) == 0 {
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

// Ended frees the slot of a task that was handed out.
func (d *Dispatcher) Ended() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.buffer.running--
}

// wanted returns how many tasks to take at once: one for each free slot, or more if slots become
// free quickly.
func (b *buffer) wanted() int {
	return min(max(1, b.slots-b.running, b.freeSoon()-b.count()), batchMax)
}

// wantsMore reports whether to make a round ahead of time, so that slots do not wait for Redis: they
// become free quickly, and the tasks that are ready run out.
func (b *buffer) wantsMore() bool {
	if !b.found || len(b.recent) < aheadFrom {
		return false
	}
	n := b.freeSoon()
	return n >= aheadFrom && b.count() <= n/3
}

// count returns how many tasks are ready.
func (b *buffer) count() (n int) {
	for _, f := range b.fetched {
		n += len(f.tasks)
	}
	return n
}

// freeSoon returns how many slots become free soon, by what was handed out lately.
func (b *buffer) freeSoon() int {
	b.recent = slices.DeleteFunc(b.recent, func(at time.Time) bool { return time.Since(at) > soon })
	return min(len(b.recent), soonMax)
}

// since removes and returns what has been ready since before a time.
func (b *buffer) since(before time.Time) (old []*fetched) {
	for len(b.fetched) > 0 && !b.fetched[0].at.After(before) {
		old, b.fetched = append(old, b.fetched[0]), b.fetched[1:]
	}
	return old
}
