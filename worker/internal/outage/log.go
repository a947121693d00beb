// Package outage is about a limiter that does not answer, or whose Redis has a clock that was set:
// what is logged of it, and when it is asked again.
package outage

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// A Log logs that the limiter is unavailable: for each class of error when it begins, every minute
// while it lasts, and when it is over, rather than for every task. It also logs that the clock of
// Redis was set back, or went ahead.
type Log struct {
	logger *slog.Logger

	mu        sync.Mutex
	byClass   map[error]*outage
	catchesUp time.Time            // when the clock of Redis will be where it was before it was set back
	latest    map[string]time.Time // by line: the latest time of that clock

	begun  time.Time        // of this process's own clock
	clocks map[string]clock // by line: in a Redis Cluster they may be on several servers
	ahead  *time.Duration   // the offset of the clock that went ahead last, until one is set back
}

// A clock is that of a Redis, by its offset to our own, which never jumps. Replies may be late, and
// then the offset seems smaller. So the largest one counts.
type clock struct {
	offset time.Duration
	less   time.Duration // the largest of the smaller ones seen since
	times  int           // how often
}

type outage struct {
	since, last, logged time.Time
	tasks               int
}

// stillEvery is how often it is logged that an outage lasts.
const stillEvery = time.Minute

// overAfter is how long no decision must have failed before an outage counts as over. Tasks that
// failed have come back by then. Otherwise one tenant's failure beside another's success would be
// logged at every task.
const overAfter = 20 * time.Second

// clockBehindMax is how far behind its windows the clock of Redis may be without being logged.
// Disciplined clocks, and those of two servers of a failover, differ by less.
const clockBehindMax = time.Second

// clockAheadMax is how far that clock may go ahead of our own without being logged. Replies may be
// late by a little less.
const clockAheadMax = 5 * time.Second

// clockSlower is how many smaller offsets in a row show that a clock was set back.
const clockSlower = 20

// NewLog returns a log of one server.
func NewLog(logger *slog.Logger) *Log {
	return &Log{
		logger: logger, begun: time.Now(),
		byClass: map[error]*outage{}, clocks: map[string]clock{}, latest: map[string]time.Time{},
	}
}

// Failed notes that the limiter could not decide, or was not asked. Details are those of slog.
func (o *Log) Failed(err error, details ...any) {
	var class error
	for _, c := range []error{
		throttle.ErrUnavailable, throttle.ErrState, throttle.ErrReply, throttle.ErrClock, throttle.ErrForbidden,
	} {
		if errors.Is(err, c) {
			class = c
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	out := o.byClass[class]
	if out == nil {
		out = &outage{since: now, logged: now}
		o.byClass[class] = out
		o.logger.Error("worker: the limiter is unavailable", append([]any{"err", err}, details...)...)
	}
	out.last = now
	out.tasks++
	if now.Sub(out.logged) >= stillEvery {
		out.logged = now
		o.logger.Error("worker: the limiter is still unavailable",
			append([]any{"for", now.Sub(out.since).Round(time.Second), "tasks", out.tasks, "err", err}, details...)...)
	}
}

// Decided notes that the limiter has decided.
func (o *Log) Decided() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for class, out := range o.byClass {
		if time.Since(out.last) > overAfter {
			delete(o.byClass, class)
			o.logger.Info("worker: the limiter is available again",
				"after", out.last.Sub(out.since), "tasks", out.tasks)
		}
	}
}

// OfLine is what a log says of a line: its policy, and which of its shards it is if it has some.
func OfLine(line string) []any {
	if policy := throttle.PolicyOf(line); policy != line {
		return []any{"policy", policy, "line", line}
	}
	return []any{"policy", line}
}

// ClockAt notes what the clock of Redis said when a line was asked. It may have been set back since
// it was asked before.
func (o *Log) ClockAt(line string, at time.Time) {
	o.mu.Lock()
	latest := o.latest[line]
	if at.After(latest) {
		o.latest[line] = at
	}
	o.mu.Unlock()
	o.ClockBehind(latest.Sub(at), OfLine(line)...)
	o.ClockAhead(line, at)
}

// ClockAhead logs once if the clock of Redis went ahead since it was asked before: what the windows
// count became older at once, and they grant more than they would by a true clock.
func (o *Log) ClockAhead(line string, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	offset := at.Sub(o.begun) - time.Since(o.begun)
	c, known := o.clocks[line]
	switch {
	case !known || offset >= c.offset:
		by := offset - c.offset
		if known && by > clockAheadMax && (o.ahead == nil || (offset-*o.ahead).Abs() > clockAheadMax) {
			o.ahead = &offset
			o.logger.Warn("worker: the clock of Redis went ahead: each window may grant up to its limit once more",
				append(OfLine(line), "by", by.Round(time.Millisecond))...)
		}
		c = clock{offset: offset}
	case c.times == 0 || offset > c.less:
		c.less = offset
		fallthrough
	default:
		if c.times++; c.times == clockSlower {
			if c.offset-c.less > clockAheadMax {
				o.ahead = nil
			}
			c = clock{offset: c.less}
		}
	}
	o.clocks[line] = c
}

// ClockBehind logs once that the clock of Redis was set back. Until it has caught up no window
// frees any units.
func (o *Log) ClockBehind(behind time.Duration, details ...any) {
	if behind <= clockBehindMax {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	if now.After(o.catchesUp) {
		o.logger.Warn("worker: the clock of Redis was set back: windows stand still until it has caught up",
			append(details, "behind", behind)...)
	}
	if at := now.Add(behind); at.After(o.catchesUp) {
		o.catchesUp = at
	}
}
