package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

const (
	// takeTimeout is how long a take may block asynq's dequeue.
	takeTimeout = 250 * time.Millisecond

	// askAgain is when to ask a line again that had more to look at and found nothing.
	askAgain = time.Millisecond

	// acknowledgeAfter is when a take is acknowledged by a call of its own: a server that has an
	// appointment asks within 2 s, and after 5 s others put back what was taken.
	acknowledgeAfter = 2500 * time.Millisecond
)

// A line is this server's view of a policy's line, for the queues of one group.
type line struct {
	name  string // that of the policy, unless it has shards
	group *group
	outage.Backoff
	due     time.Time // when its first ticket fits, by the last answer; zero: nobody waited
	empty   bool      // nobody waited when it was asked last
	next    time.Time // when to ask it next; if it is not empty
	nudged  string    // the queue for which somebody asked to ask it
	news    time.Time // when to ask it for what came since the last take was sent; zero: nothing
	passed  time.Time // when another server was asked to ask it
	retried time.Time // when it was asked last although it was empty
	share   share     // of the slots, among the lines of its policy's shards
	clock   clock     // of its Redis
}

// know adds the lines of all current policies, and drops the others.
func (d *Dispatcher) know(now time.Time) {
	names := d.Limiter.Lines()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.groups {
		for _, name := range names {
			if g.lines[name] == nil {
				g.lines[name] = &line{name: name, group: g, next: now}
			}
		}
		if len(g.lines) > len(names) {
			maps.DeleteFunc(g.lines, func(name string, _ *line) bool {
				return !slices.Contains(names, name)
			})
		}
	}
}

// due returns the lines of a group to ask now: policies in rotation, starting after the one served
// last, and the shards of each by what their tenants have had.
func (d *Dispatcher) due(g *group, now time.Time) []*line {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now.Before(d.silence.Until) {
		return nil
	}
	var due []*line
	for _, l := range g.lines {
		if !l.empty && !now.Before(l.next) && !now.Before(l.Until) {
			due = append(due, l)
		}
	}
	if l := d.emptyOne(now); l != nil && l.group == g {
		due = append(due, l)
	}
	slices.SortFunc(due, func(a, b *line) int {
		if after := a.family() > g.lastPolicy; after != (b.family() > g.lastPolicy) {
			if after {
				return -1
			}
			return 1
		}
		had := func(l *line) float64 { return max(l.share.at, g.reached[l.family()]) }
		return cmp.Or(strings.Compare(a.family(), b.family()),
			cmp.Compare(had(a), had(b)), strings.Compare(a.name, b.name))
	})
	return due
}

// emptyOne returns, if it is time to ask one of the empty lines, that for which this was done
// longest ago, and of several the first by name. The lock is held.
func (d *Dispatcher) emptyOne(now time.Time) (one *line) {
	if now.Before(d.emptyAt) {
		return nil
	}
	for _, g := range d.groups {
		for _, l := range g.lines {
			if !l.empty || now.Before(l.Until) {
				continue
			}
			if one == nil || cmp.Or(l.retried.Compare(one.retried), strings.Compare(l.name, one.name)) < 0 {
				one = l
			}
		}
	}
	return one
}

// takeFromGroup takes from the first line of a group that has a ticket that fits.
func (d *Dispatcher) takeFromGroup(ctx context.Context, g *group, n int, now time.Time) (found bool, err error) {
	due := d.due(g, now)
	if len(due) == 0 {
		return false, nil
	}
	queues, err := d.open(ctx, d.with(g), now)
	if err != nil {
		return false, err
	}
	identity, err := d.Asynq.Identity(ctx)
	if err != nil {
		return false, err
	}
	names := map[string]int{}
	for _, queue := range queues {
		names[identity+"/"+queue] = d.Queues[queue]
	}
	for _, l := range due {
		if len(names) == 0 {
			d.mu.Lock()
			l.next, l.empty, l.nudged = now.Add(pausedFor), false, ""
			d.mu.Unlock()
			continue
		}
		found, err := d.take(ctx, l, names, n)
		if err != nil || found || d.isStopped() || d.isSilent(time.Now()) {
			return found, err
		}
	}
	return false, nil
}

func (d *Dispatcher) isSilent(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return now.Before(d.silence.Until)
}

// take takes from a line, and picks. Found reports that a task has become ready. The error is that
// of asynq's Redis.
func (d *Dispatcher) take(ctx context.Context, l *line, queues map[string]int, n int) (found bool, err error) {
	d.mu.Lock()
	if timer := d.acks[l.name]; timer != nil {
		timer.Stop() // this take says it
	}
	nudged, due, sent := l.nudged, l.due, time.Now()
	l.news = time.Time{}
	if l.nudged = ""; l.empty {
		l.retried, d.emptyAt = sent, sent.Add(emptyEvery)
	}
	d.mu.Unlock()

	call, cancel := context.WithTimeout(ctx, takeTimeout)
	taken, err := d.Limiter.Line(l.name).Take(call, throttle.TakeOptions{Queues: queues, Strict: d.Strict, Max: n})
	cancel()
	if err != nil {
		d.failed(l, err)
		return false, nil
	}
	d.answered(l, taken, sent)
	d.Answered(l.name, taken.At)
	d.mu.Lock()
	d.full = len(taken.Tickets) >= n
	d.mu.Unlock()
	if len(taken.Tickets) == 0 {
		if nudged != "" && d.Asynq.Changed(ctx) {
			d.Expect(l.name, nudged, 0)
		}
		return false, nil
	}
	if nudged != "" && len(taken.Tickets) >= n {
		d.nudgeAnother(nudged, l.name)
	}
	picks := d.picksOf(l, taken, sent)
	picks[0].due = later(due, sent.Add(-taken.Tickets[0].Waited))
	for _, p := range picks {
		n, failed := d.fetch(ctx, p)
		if failed != nil {
			err = failed // the other queues' tickets are picked all the same, or kept to be picked
		}
		found = found || n > 0
	}
	return found, err
}

// failed notes that a take failed. The line is skipped for a while. If it was not the first
// failure, all lines are.
func (d *Dispatcher) failed(l *line, err error) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if errors.Is(err, throttle.ErrUnknownPolicy) {
		delete(l.group.lines, l.name)
		return
	}
	l.Fail(now)
	if d.silence.Failed {
		d.silence.Fail(now)
	}
	d.silence.Failed = true
	l.empty, l.next = false, l.Until
	d.Failed(l.name, unavailable(err))
}

// unavailable returns the error of a limiter that did not answer in time.
func unavailable(err error) error {
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, throttle.ErrUnavailable) {
		return fmt.Errorf("%w: %w", throttle.ErrUnavailable, err)
	}
	return err
}

// answered notes the answer of a take.
func (d *Dispatcher) answered(l *line, taken throttle.Taken, sent time.Time) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	l.Backoff, d.silence = outage.Backoff{}, outage.Backoff{}
	l.empty = taken.Next < 0
	l.clock.learn(taken.At, sent, now)
	in := l.clock.here(taken.At.Add(taken.Next)).Sub(now)
	l.next, l.due = now.Add(max(0, in)), time.Time{}
	if !l.empty {
		l.due = l.next
	}
	if len(taken.Tickets) > 0 {
		family := l.family()
		l.group.lastPolicy = family
		if family != l.name {
			l.share.at = max(l.share.at, l.group.reached[family]) // nobody saves up turns
			l.group.reached[family] = l.share.at
			l.share.had(taken.Tickets)
		}
	} else if taken.Next == 0 {
		l.next = now.Add(askAgain)
	}
	if !l.news.IsZero() { // the take may not have seen it, whichever reply came first
		d.expect(l, l.news)
	}
}

// Expect notes that a task waits in a line for a queue, and when to ask for it.
func (d *Dispatcher) Expect(name, queue string, in time.Duration) {
	at := time.Now().Add(min(in, waitMax)) // limits may be raised meanwhile
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.groupOf(queue)
	l := g.lines[name]
	if l == nil {
		l = &line{name: name, group: g, empty: true}
		g.lines[name] = l
	}
	d.expect(l, at)
}

// expect has a line asked at a time for what a take under way may not have seen. The lock is held.
func (d *Dispatcher) expect(l *line, at time.Time) {
	if l.news.IsZero() || at.Before(l.news) {
		l.news = at
	}
	if l.empty || at.Before(l.next) {
		l.empty, l.next = false, at
		d.signal()
	}
}

// acknowledgeLater acknowledges the last take from a line after a while, unless another take
// follows or some of its tickets are not picked yet. The lock is held.
func (d *Dispatcher) acknowledgeLater(line string) {
	if d.closed || slices.ContainsFunc(d.lost, func(f *fetch) bool { return f.line == line }) {
		return
	}
	if timer := d.acks[line]; timer != nil {
		timer.Reset(acknowledgeAfter)
		return
	}
	d.acks[line] = time.AfterFunc(acknowledgeAfter, func() { d.acknowledge(line) })
}

func (d *Dispatcher) acknowledge(line string) {
	d.Later(func(ctx context.Context) error {
		err := d.Limiter.Line(line).Acknowledge(ctx)
		if errors.Is(err, throttle.ErrUnknownPolicy) {
			return nil
		}
		return err
	})
}

// acknowledgeAll acknowledges at once all takes that are not acknowledged yet.
func (d *Dispatcher) acknowledgeAll() {
	d.mu.Lock()
	var lines []string
	for line, timer := range d.acks {
		if timer.Stop() {
			lines = append(lines, line)
		}
	}
	d.mu.Unlock()
	for _, line := range lines {
		d.acknowledge(line)
	}
}
