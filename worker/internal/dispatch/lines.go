package dispatch

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

const (
	// acknowledgeAfter is when a take is acknowledged by a call of its own: a server that has an
	// appointment asks within 2 s, and after 5 s others put back what was taken.
	acknowledgeAfter = 2500 * time.Millisecond

	// askAgain is when to ask a line again that had more to look at and found nothing.
	askAgain = time.Millisecond

	// transitMost bounds how much later a line is asked than it is due, if a reply took long.
	transitMost = time.Millisecond

	// watchEvery is how often a server says which lines it watches, at most. A watch lapses after
	// 1.5 s: worker/internal/asynqredis/lua/dequeue.lua.
	watchEvery = 750 * time.Millisecond

	// endsMost is of how many tenants of a line is known what they had. If there are more all are forgotten.
	endsMost = 10_000
)

// Lines are this server's views of all lines, by groups of queues. They are serve's alone.
type lines struct {
	groups  []*group
	paused  map[string]bool // queues
	failed  bool            // the last take
	silence outage.Backoff  // of the limiter as a whole
}

// A group is the queues that are asked together: all of them, or one with strict priorities.
type group struct {
	queues []string
	named  []string // these, and the queues of more important groups: a take names them, too
	strict bool     // less important groups follow, and must not go before its pending tasks

	earned    int              // tasks from lines that earned pending tasks no turn yet
	lines     map[string]*line // by name
	lookAt    time.Time        // when to look at its queues, after there was nothing
	reached   float64          // where the line was whose turn it was last
	watchedAt time.Time        // when this server said last which lines it watches
}

// round makes up to n tasks ready, and reports whether it found any. It asks, group by group, the lines
// that are due and the pending tasks. Pending tasks that have earned a turn come first.
func (d *Dispatcher) round(n int) (found bool) {
	d.lines.know(d.Limiter.Lines())
	for _, g := range d.lines.groups {
		turns := g.earned / pendingFor
		found = turns > 0 && d.pending(g, min(n, turns))
		now := time.Now()
		for l := d.due(g, now); l != nil && !found; l = d.due(g, now) {
			found = d.take(l, n)
		}
		if found = found || d.pending(g, n); found {
			break
		}
	}
	return found
}

// due returns the line of a group to ask now, or nil.
func (d *Dispatcher) due(g *group, now time.Time) (first *line) {
	for _, l := range g.lines {
		next := d.lines.next(l)
		if !d.isStopped() && !next.IsZero() && !now.Before(next) && (first == nil || l.before(first)) {
			first = l
		}
	}
	return first
}

// next returns when to ask a line, and the zero time while it rests.
func (ls *lines) next(l *line) time.Time {
	if l.ask.IsZero() {
		return time.Time{}
	}
	return later(l.ask, later(l.failed.Until, ls.silence.Until))
}

// before reports whether a line's turn comes before that of another one of its group. Each line is fair
// between its tenants. The lines of all policies, and of their shards, share this server's slots so that all
// tenants get theirs: the line goes first whose tenants have had the least (start-time fair queueing, Goyal
// et al., 1996). Tenants of shards go by weight, the others are equals.
func (l *line) before(other *line) bool {
	had, asked := cmp.Compare(l.had(), other.had()), l.asked.Compare(other.asked)
	return cmp.Or(had, asked, strings.Compare(l.name, other.name)) < 0
}

// had returns how much the tenants of a line have had. Nobody saves up turns.
func (l *line) had() float64 { return max(l.began, l.group.reached) }

// serves notes tickets that were taken.
func (l *line) serves(tickets []throttle.TakenTicket) {
	if len(tickets) == 0 {
		return
	}
	l.began = l.had()
	l.group.reached = l.began
	for _, t := range tickets {
		whose := t.Queue + " " + t.Decision.Tenant
		l.began = max(l.began, l.ends[whose])
		l.ends[whose] = l.began + 1/cmp.Or(t.Weight, 1)
	}
	if len(l.ends) > endsMost {
		clear(l.ends)
	}
}

// A line is this server's view of a policy's line, for the queues of a group.
//
//	event                                              it is asked
//	a take is answered, tickets wait                   at its appointment; this server watches the line
//	a take is answered, nobody waits                   when there is news: it rests
//	a take fails                                       after a pause, which doubles
//	news: a join, a nudge, units that are back,        now, or at a time, but not before a pause ends
//	  nobody watches the line
//
// A take that is on its way may not have seen what is news meanwhile: serve learns that after the answer.
type line struct {
	name   string // that of the policy, unless it has shards
	group  *group
	ask    time.Time      // when, unless takes fail; zero while it rests
	due    time.Time      // when its first ticket fits, by the last answer; zero: nobody waited, or it failed
	failed outage.Backoff // of takes
	latest time.Time      // of the answers, by the clock of Redis
	nudged bool           // nobody else asks it now
	asked  time.Time      // last
	taken  time.Time      // when tickets were picked that are not acknowledged yet; zero: none

	began float64            // where the task began that was taken last: one of a tenant of weight 1 takes 1
	ends  map[string]float64 // by queue and tenant: where its last one ended
}

// line returns the view of a line. A new one is asked at once.
func (g *group) line(name string) *line {
	l := g.lines[name]
	if l == nil {
		l = &line{name: name, group: g, ends: map[string]float64{}}
		l.expect(time.Now())
		g.lines[name] = l
	}
	return l
}

// expect notes that there is news, for which to ask at a time.
func (l *line) expect(at time.Time) { l.ask = sooner(l.ask, at) }

// nudge notes that it is for this server to ask the line now.
func (l *line) nudge() {
	l.nudged = true
	l.expect(time.Now())
}

// answered notes the answer of a take.
func (l *line) answered(taken throttle.Taken, sent, now time.Time) {
	l.failed = outage.Backoff{}
	l.serves(taken.Tickets)
	l.due = time.Time{}
	if taken.Next >= 0 {
		// A take that is sent then arrives then, if it takes as long to get there as this one.
		l.due = later(now, sent.Add(taken.Next+min(now.Sub(sent), transitMost)))
	}
	if l.ask = l.due; len(taken.Tickets) == 0 && taken.Next == 0 {
		l.ask = now.Add(askAgain)
	}
}

// know adds the lines of all current policies, and drops the others.
func (ls *lines) know(names []string) {
	for _, g := range ls.groups {
		for _, name := range names {
			g.line(name)
		}
		if len(g.lines) > len(names) {
			maps.DeleteFunc(g.lines, func(name string, _ *line) bool { return !slices.Contains(names, name) })
		}
	}
}

// watched returns the lines that this server watches.
func (g *group) watched() (names []any) {
	for _, l := range g.lines {
		if !l.due.IsZero() {
			names = append(names, l.name)
		}
	}
	return names
}

// unwatched notes lines that nobody watched: they are asked now.
func (g *group) unwatched(names []any) {
	for _, name := range names {
		if l := g.lines[fmt.Sprint(name)]; l != nil {
			l.nudge()
		}
	}
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
			queues: queues, named: slices.Concat(together[:i+1]...), strict: i+1 < len(together),
			lines: map[string]*line{},
		})
	}
	return all
}

func (ls *lines) groupOf(queue string) *group {
	for _, g := range ls.groups {
		if slices.Contains(g.queues, queue) {
			return g
		}
	}
	return ls.groups[0] // asynq runs what its queue held, whatever queue the message names
}

// later returns the later of two times, sooner the earlier one, where the zero time is never.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
