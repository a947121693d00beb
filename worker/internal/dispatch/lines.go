package dispatch

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/internal/breaker"
	"github.com/sluice-go/sluice/throttle"
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
)

// Lines are this server's views of all lines, by groups of queues. They are serve's alone.
type lines struct {
	groups  []*group
	paused  map[string]bool // queues
	failed  bool            // the last take
	silence breaker.Backoff // of the limiter as a whole
}

// A group is the queues that are asked together: all of them, or one with strict priorities.
type group struct {
	queues []string
	named  []string // these, and the queues of more important groups: a take names them, too
	strict bool     // less important groups follow, and must not go before its pending tasks

	earned    int                // tasks from lines that earned pending tasks no turn yet
	lines     map[string]*line   // by name
	lookAt    time.Time          // when to look at its queues, after there was nothing
	reached   map[string]float64 // by policy with shards: where the shard was whose turn it was last
	served    string             // the policy of which something was taken last
	watchedAt time.Time          // when this server said last which lines it watches
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
			lines: map[string]*line{}, reached: map[string]float64{},
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

// draw returns the queues in the order of this round: each is the next with a chance by its
// priority, as in asynq.
func (g *group) draw(priorities map[string]int) []string {
	drawn := map[string]float64{}
	for _, queue := range g.queues {
		drawn[queue] = rand.ExpFloat64() / float64(priorities[queue])
	}
	return slices.SortedFunc(maps.Keys(drawn), func(a, b string) int { return cmp.Compare(drawn[a], drawn[b]) })
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

// due returns the line of a group to ask now, or nil: policies in rotation, starting after the one
// served last, and the shards of each by what their tenants have had.
func (d *Dispatcher) due(g *group, now time.Time) (first *line) {
	if d.isStopped() || now.Before(d.lines.silence.Until) {
		return nil
	}
	for _, l := range g.lines {
		if !l.next.IsZero() && !now.Before(l.next) && (first == nil || l.before(first)) {
			first = l
		}
	}
	return first
}

// freed makes a line due at a time if tickets wait there.
func (ls *lines) freed(name string, at time.Time) {
	for _, g := range ls.groups {
		if l := g.lines[name]; l != nil && !l.due.IsZero() {
			l.expect(at)
		}
	}
}

// watched returns the lines that this server watches, if it is time to say so.
func (g *group) watched(now time.Time) (names []any) {
	if now.Sub(g.watchedAt) < watchEvery {
		return nil
	}
	g.watchedAt = now
	for _, l := range g.lines {
		if l.state == stateWaiting && !l.due.IsZero() {
			names = append(names, l.name)
		}
	}
	return names
}

// unwatched notes lines that nobody watched: they are asked now.
func (g *group) unwatched(names []any) {
	for _, name := range names {
		if l := g.lines[fmt.Sprint(name)]; l != nil {
			l.nudged = true
			l.expect(time.Now())
		}
	}
}

// A line is this server's view of a policy's line, for the queues of a group.
//
//	state    what is known                                     it is asked
//	resting  nobody waits, or another server watches the line  when there is news
//	waiting  tickets wait, and this server watches the line    at its appointment
//	failing  the last take failed                              after a pause, which doubles
//
//	event                                resting  waiting          failing
//	a take is answered, tickets wait     waiting  waiting          waiting
//	a take is answered, nobody waits     resting  resting          resting
//	a take fails                         failing  failing          failing
//	news: a join, a nudge, units that    waiting  waiting, sooner  -
//	  are back, nobody watches the line
//
// A take that is on its way may not have seen what is news meanwhile: serve learns that after the answer.
type line struct {
	name   string // that of the policy, unless it has shards
	group  *group
	state  state
	next   time.Time       // take; zero while it rests
	due    time.Time       // when its first ticket fits, by the last answer; zero: nobody waited
	failed breaker.Backoff // of takes
	latest time.Time       // of the answers, by the clock of Redis
	nudged bool            // nobody else asks it for its news
	share  share           // of the slots, among the lines of its policy's shards
	taken  time.Time       // when tickets were picked that are not acknowledged yet; zero: none
}

type state int

const (
	stateResting state = iota
	stateWaiting
	stateFailing
)

// line returns the view of a line. A new one is asked at once.
func (g *group) line(name string) *line {
	l := g.lines[name]
	if l == nil {
		l = &line{name: name, group: g}
		l.expect(time.Now())
		g.lines[name] = l
	}
	return l
}

// expect notes that there is news, for which to ask at a time.
func (l *line) expect(at time.Time) {
	if l.state != stateFailing {
		l.state, l.next = stateWaiting, sooner(l.next, at)
	}
}

// answered notes the answer of a take.
func (l *line) answered(taken throttle.Taken, sent, now time.Time) {
	l.failed = breaker.Backoff{}
	l.serves(taken.Tickets)
	l.state, l.due = stateResting, time.Time{}
	if taken.Next >= 0 {
		// A take that is sent then arrives then, if it takes as long to get there as this one.
		l.state, l.due = stateWaiting, later(now, sent.Add(taken.Next+min(now.Sub(sent), transitMost)))
	}
	if l.next = l.due; len(taken.Tickets) == 0 && taken.Next == 0 {
		l.next = now.Add(askAgain)
	}
}

// before reports whether a line of the same group comes first.
func (l *line) before(other *line) bool {
	a, b := l.family(), other.family()
	if after := a > l.group.served; after != (b > l.group.served) {
		return after
	}
	had := cmp.Compare(l.had(), other.had())
	return cmp.Or(strings.Compare(a, b), had, strings.Compare(l.name, other.name)) < 0
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
