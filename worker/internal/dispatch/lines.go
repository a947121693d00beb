package dispatch

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

const (
	// acknowledgeAfter is how long after a take a call of its own acknowledges it, unless the next take has done so: a
	// server with an appointment asks within 2 s. After 5 s others put back what was taken.
	acknowledgeAfter = 2500 * time.Millisecond

	askAgain    = time.Millisecond // delays the take after one that stopped before it had looked at everything
	transitMost = time.Millisecond // bounds how much a slow reply delays the next take

	// watchEvery: servers say which lines they watch at most this often. A watch lapses after 1.5 s (dequeue.lua).
	watchEvery = 750 * time.Millisecond

	// maxTenants bounds the tenants of a line that are remembered. Beyond it, all are forgotten.
	maxTenants = 10_000
)

var never = time.Unix(math.MaxInt32*1000, 0) // a time that does not come

// A queueSet is the queues that are asked together: all, or with strict priorities one.
type queueSet struct {
	queues      []string
	takesOf     []string         // the queues of this set and of more important sets: a take names them all
	outranks    bool             // other sets are less important: it looks for pending tasks in every round, before them
	sinceTurn   int              // tasks from lines, less tasksPerPending for each pending task: 7 mean two turns
	lines       map[string]*line // by name
	lookAt      time.Time        // when to look for pending tasks again, after there were none
	virtualTime float64          // the start tag of the line whose turn was last
	watchedAt   time.Time        // when this server last told Redis which lines it watches
}

// A line is this server's view of a policy's line, for a set of queues.
//
//	event                                              it is asked
//	a take is answered, tickets wait                   at its appointment; this server watches the line
//	a take is answered, nobody waits                   when there is news: it is idle
//	a take fails                                       after a delay, which doubles
//	news: a join, a nudge, units that are back,        now, or at a time, but not before that delay ends
//	  nobody watches the line
//
// News that comes while a take is on its way may be unknown to that take: serve learns it after the answer.
type line struct {
	name        string // the policy's, unless that has shards
	set         *queueSet
	askAt       time.Time      // when to ask it next, unless takes fail; never while it is idle
	appointment time.Time      // by the last answer; zero: nobody waited, or the take failed
	backoff     outage.Backoff // of takes
	redisTime   time.Time      // of the latest answer, by the clock of Redis
	nudged      bool           // only this server got the line's nudge: it asks the line, or passes the nudge on

	acknowledge *time.Timer // acknowledges the last take, unless another take follows; nil: there was none

	lastStart float64            // the virtual time at which the task that was taken last starts
	finishBy  map[string]float64 // by queue and tenant: the virtual time at which its last task ends
}

// round makes up to n tasks ready, and reports whether it found any. Set by set, it asks the lines that are due, and
// looks for pending tasks. Pending tasks that have a turn come first.
func (d *Dispatcher) round(n int) bool {
	names := d.Limiter.Lines()
	for _, set := range d.sets {
		set.update(names)
		turns := set.sinceTurn / tasksPerPending
		if turns > 0 && d.takePending(set, min(n, turns)) {
			return true
		}
		now := time.Now()
		for l := d.firstDue(set, now); l != nil; l = d.firstDue(set, now) {
			if d.take(l, n) {
				return true
			}
		}
		if d.takePending(set, n) {
			return true
		}
	}
	return false
}

// firstDue returns the line of a set to ask now, or nil.
func (d *Dispatcher) firstDue(set *queueSet, now time.Time) (first *line) {
	for _, l := range set.lines {
		isDue := !now.Before(d.dueAt(l)) && !d.isStopped()
		if isDue && (first == nil || l.precedes(first)) {
			first = l
		}
	}
	return first
}

func (d *Dispatcher) dueAt(l *line) time.Time      { return latest(l.askAt, d.backoffEnd(l)) }
func (d *Dispatcher) backoffEnd(l *line) time.Time { return latest(l.backoff.Until, d.backoff.Until) }

// precedes reports whether a line's turn comes before another's of its set. Each line is fair between its own tenants.
// Here the tenants of all lines share this server's slots: evenly, or by weight if their policy has shards, as no line
// compares the tenants of all shards (start-time fair queueing, Goyal et al., 1996).
func (l *line) precedes(other *line) bool {
	tag, asked := cmp.Compare(l.startTag(), other.startTag()), l.redisTime.Compare(other.redisTime)
	return cmp.Or(tag, asked, strings.Compare(l.name, other.name)) < 0
}

// startTag returns when a line's next task starts, in virtual time: a task of a tenant of weight 1 takes 1.
// A line without tickets does not save up turns.
func (l *line) startTag() float64 { return max(l.lastStart, l.set.virtualTime) }

// noteAnswer notes the answer of a take: whose turn it was, and when to ask next.
func (l *line) noteAnswer(taken throttle.Taken, sent, now time.Time) {
	l.backoff = outage.Backoff{}
	l.noteServed(taken.Tickets)
	l.appointment, l.askAt = time.Time{}, never
	if taken.Next >= 0 {
		// The next take may reach Redis faster than this one did. So it is delayed by what this one took, at most transitMost.
		l.appointment = latest(now, sent.Add(taken.Next+min(now.Sub(sent), transitMost)))
		l.askAt = l.appointment
	}
	if stoppedEarly := len(taken.Tickets) == 0 && taken.Next == 0; stoppedEarly {
		l.askAt = now.Add(askAgain)
	}
}

// noteServed moves the tags of the line's tenants: tasks of a, a, and b of weight 2, at tag 5, end at 6, 7 and 6.5.
func (l *line) noteServed(tickets []throttle.TakenTicket) {
	if len(tickets) == 0 {
		return
	}
	l.lastStart = l.startTag()
	l.set.virtualTime = l.lastStart
	for _, t := range tickets {
		tenant := t.Queue + " " + t.Decision.Tenant
		l.lastStart = max(l.lastStart, l.finishBy[tenant])
		l.finishBy[tenant] = l.lastStart + 1/cmp.Or(t.Weight, 1)
	}
	if len(l.finishBy) > maxTenants {
		clear(l.finishBy)
	}
}

// isWatched reports whether the last take was answered, and tickets wait: this server keeps their appointment.
func (l *line) isWatched() bool { return !l.appointment.IsZero() }

// line returns the view of a line. A new line is asked at once.
func (set *queueSet) line(name string) *line {
	l := set.lines[name]
	if l == nil {
		l = &line{name: name, set: set, askAt: time.Now(), finishBy: map[string]float64{}}
		set.lines[name] = l
	}
	return l
}

// askBy sets when to ask the line, unless it is to be asked sooner.
func (l *line) askBy(at time.Time) { l.askAt = earliest(l.askAt, at) }

// update adds the lines of all current policies, and drops the others.
func (set *queueSet) update(names []string) {
	for _, name := range names {
		set.line(name)
	}
	if len(set.lines) > len(names) {
		maps.DeleteFunc(set.lines, func(name string, _ *line) bool { return !slices.Contains(names, name) })
	}
}

func (set *queueSet) watched() (names []any) {
	for _, l := range set.lines {
		if l.isWatched() {
			names = append(names, l.name)
		}
	}
	return names
}

func queueSetsOf(queues map[string]int, strict bool) (all []*queueSet) {
	names := slices.Sorted(maps.Keys(queues))
	together, n := len(names), 0
	if strict {
		slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(queues[b], queues[a]) })
		together = 1
	}
	for some := range slices.Chunk(names, together) {
		n += len(some)
		all = append(all, &queueSet{queues: some, takesOf: names[:n], outranks: n < len(names), lines: map[string]*line{}})
	}
	return all
}

func (d *Dispatcher) setOf(queue string) *queueSet {
	for _, set := range d.sets {
		if slices.Contains(set.queues, queue) {
			return set
		}
	}
	return d.sets[0] // no set has it: asynq ends a task by the queue in its message, not by the queue that it came from
}

func latest(times ...time.Time) time.Time   { return slices.MaxFunc(times, time.Time.Compare) }
func earliest(times ...time.Time) time.Time { return slices.MinFunc(times, time.Time.Compare) }
