package dispatch

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

const (
	// askAgain is when to ask a line again that had more to look at and found nothing.
	askAgain = time.Millisecond

	// transitMost bounds how much later a line is asked than it is due, if a reply took long.
	transitMost = time.Millisecond

	// watchEvery is how often a server says which lines it watches, at most. A watch lapses after
	// 1.5 s: worker/internal/asynqredis/lua/dequeue.lua.
	watchEvery = 750 * time.Millisecond
)

// Lines are this server's views of all lines, which are in the groups, and of queues and their tasks.
type lines struct {
	sync.Mutex
	groups  []*group
	paused  map[string]bool              // queues
	stuck   map[asynqredis.Ref]time.Time // since when tasks were active that were to be picked
	silence outage.Backoff               // of the limiter as a whole
}

// A line is this server's view of a policy's line, for the queues of a group.
type line struct {
	schedule
	name   string // that of the policy, unless it has shards
	group  *group
	due    time.Time // when its first ticket fits, by the last answer; zero: nobody waited
	nudged bool      // nobody else asks it for its news
	share  share     // of the slots, among the lines of its policy's shards
}

// line returns the view of a line. A new one is asked at once. The lock is held.
func (g *group) line(name string) *line {
	l := g.lines[name]
	if l == nil {
		l = &line{name: name, group: g}
		l.expect(time.Now())
		g.lines[name] = l
	}
	return l
}

// know adds the lines of all current policies, and drops the others.
func (ls *lines) know(names []string) {
	ls.Lock()
	defer ls.Unlock()
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
func (ls *lines) due(g *group, now time.Time) (first *line) {
	ls.Lock()
	defer ls.Unlock()
	if now.Before(ls.silence.Until) {
		return nil
	}
	for _, l := range g.lines {
		if isDue(l.next(actionAsk), now) && (first == nil || l.before(first)) {
			first = l
		}
	}
	return first
}

// before reports whether a line of the same group comes first.
func (l *line) before(other *line) bool {
	a, b := l.family(), other.family()
	if after := a > l.group.served; after != (b > l.group.served) {
		return after
	}
	return cmp.Or(strings.Compare(a, b), cmp.Compare(l.had(), other.had()), strings.Compare(l.name, other.name)) < 0
}

// answering returns the line of a name, or nil while the limiter does not answer.
func (ls *lines) answering(g *group, name string, now time.Time) *line {
	ls.Lock()
	defer ls.Unlock()
	l := g.lines[name]
	if l == nil || now.Before(l.failed.Until) || now.Before(ls.silence.Until) {
		return nil
	}
	return l
}

// sent notes that a take is on its way, or is not as all queues are paused. It returns when the first
// ticket fits, and whether a nudge asks for the take.
func (ls *lines) sent(l *line, paused bool) (due time.Time, nudged bool) {
	ls.Lock()
	defer ls.Unlock()
	l.sent()
	if paused {
		l.state, l.at = stateWaiting, time.Now().Add(pausedFor)
	}
	nudged, l.nudged = l.nudged, false
	return l.due, nudged
}

// answered notes the answer of a take.
func (ls *lines) answered(l *line, taken throttle.Taken, sent time.Time) {
	ls.Lock()
	defer ls.Unlock()
	now := time.Now()
	ls.silence = outage.Backoff{}
	l.serves(taken.Tickets)
	l.due = time.Time{}
	if taken.Next >= 0 {
		// A take that is sent then arrives then, if it takes as long to get there as this one.
		l.due = later(now, sent.Add(taken.Next+min(now.Sub(sent), transitMost)))
	}
	if len(taken.Tickets) == 0 && taken.Next == 0 {
		l.answered(now.Add(askAgain))
	} else {
		l.answered(l.due)
	}
}

// failed notes that a take failed. If it was not the first failure, all lines pause, not only this
// one. It returns false if the line is gone.
func (ls *lines) failed(l *line, err error, now time.Time) bool {
	ls.Lock()
	defer ls.Unlock()
	if errors.Is(err, throttle.ErrUnknownPolicy) {
		delete(l.group.lines, l.name)
		return false
	}
	l.fails(now)
	if ls.silence.Failed {
		ls.silence.Fail(now)
	}
	ls.silence.Failed = true
	return true
}

// picked notes that tasks of a line were picked. Open means that some of the same take are not yet.
func (ls *lines) picked(g *group, name string, open bool) {
	ls.Lock()
	defer ls.Unlock()
	if l := g.lines[name]; l != nil {
		l.taken = time.Now()
		if open {
			l.taken = time.Time{}
		}
	}
}

// tend has lines acknowledged, and if no slot is free passed on, of which it is time. It returns when
// to do so again, and when this server asks a line itself.
func (ls *lines) tend(now time.Time, full bool, acknowledge, passOn func(*line)) (again, ask time.Time) {
	ls.Lock()
	defer ls.Unlock()
	for _, g := range ls.groups {
		for _, l := range g.lines {
			if isDue(l.next(actionAcknowledge), now) {
				l.taken = time.Time{}
				acknowledge(l)
			}
			if full && isDue(l.next(actionPassOn), now) {
				l.state, l.passed = statePassed, now
				passOn(l)
			}
			again = sooner(again, l.next(actionAcknowledge))
			if full {
				again = sooner(again, l.next(actionPassOn))
			}
			if at := l.next(actionAsk); !at.IsZero() {
				ask = sooner(ask, later(at, ls.silence.Until))
			}
		}
	}
	return again, ask
}

// watched returns the lines that this server watches, if it is time to say so.
func (ls *lines) watched(g *group, now time.Time) (names []any) {
	ls.Lock()
	defer ls.Unlock()
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
func (ls *lines) unwatched(g *group, names []any) {
	ls.Lock()
	defer ls.Unlock()
	for _, name := range names {
		if l := g.lines[fmt.Sprint(name)]; l != nil {
			l.nudged = true
			l.expect(time.Now())
		}
	}
}
