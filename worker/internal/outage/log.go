// Package outage logs that a limiter does not answer, and that the clock of its Redis was set back.
package outage

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const Limiter, Queues = "the limiter", "asynq's Redis" // what may be unavailable

// A Log logs that the limiter, or asynq's Redis, is unavailable: for each class of error when it begins,
// every minute while it lasts, and when it is over, rather than for every task. It also logs that the
// clock of Redis was set back.
type Log struct {
	logger *slog.Logger

	mu        sync.Mutex
	byClass   map[string]*outage
	catchesUp time.Time // when the clock of Redis will be where it was before it was set back
}

// An outage is of one class of errors.
type outage struct {
	service  string
	since    time.Time // the first failure
	answered time.Time // the first answer after the last failure
	failures int
	cause    []any
	timer    *time.Timer // says that it lasts, or that it is over; nil: it is not logged
}

// stillEvery is how often it is logged that an outage lasts.
const stillEvery = time.Minute

// overAfter is how long no decision must have failed before an outage counts as over. Tasks that
// failed have come back by then. Otherwise one tenant's failure beside another's success would be
// logged at every task.
const overAfter = 20 * time.Second

// slowFor is how long answers may be late before that is an outage: a busy host misses time limits.
const slowFor = 2 * time.Second

// clockBehindMax is how far behind its windows the clock of Redis may be without being logged.
// Disciplined clocks, and those of two servers of a failover, differ by less.
const clockBehindMax = time.Second

// NewLog returns a log of one server.
func NewLog(logger *slog.Logger) *Log {
	return &Log{logger: logger, byClass: map[string]*outage{}}
}

// Failed notes that what may be unavailable failed, or was not asked. Details are those of slog.
func (o *Log) Failed(service string, err error, details ...any) {
	class := service
	for _, c := range []error{
		throttle.ErrUnavailable, throttle.ErrState, throttle.ErrReply, throttle.ErrClock, throttle.ErrForbidden,
	} {
		if errors.Is(err, c) {
			class = service + c.Error()
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	out := o.byClass[class]
	if out == nil {
		out = &outage{service: service, since: now}
		o.byClass[class] = out
	}
	out.failures++
	out.cause = append([]any{"err", err}, details...)
	if !out.answered.IsZero() {
		out.answered = time.Time{}
		out.timer.Reset(stillEvery)
	}
	if out.timer == nil && (!errors.Is(err, context.DeadlineExceeded) || now.Sub(out.since) >= slowFor) {
		out.timer = time.AfterFunc(stillEvery, func() { o.goesOn(class, out) })
		o.logger.Error("worker: "+out.service+" is unavailable", out.cause...)
	}
}

// Decided notes that the limiter has decided, or that asynq's Redis answers again.
func (o *Log) Decided() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for class, out := range o.byClass {
		switch {
		case out.timer == nil:
			delete(o.byClass, class)
		case out.answered.IsZero():
			out.answered = time.Now()
			out.timer.Reset(overAfter)
		}
	}
}

// goesOn logs that an outage lasts, or that it is over.
func (o *Log) goesOn(class string, out *outage) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.byClass[class] != out: // closed
	case out.answered.IsZero():
		out.timer.Reset(stillEvery)
		o.logger.Error("worker: "+out.service+" is still unavailable",
			append([]any{"for", time.Since(out.since).Round(time.Second), "failures", out.failures}, out.cause...)...)
	case time.Since(out.answered) >= overAfter:
		delete(o.byClass, class)
		o.logger.Info("worker: "+out.service+" is available again",
			"after", out.answered.Sub(out.since).Round(time.Millisecond), "failures", out.failures)
	}
}

// Close logs nothing more of the outages that last.
func (o *Log) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	clear(o.byClass)
}

// OfLine is what a log says of a line: its policy, and which of its shards it is if it has some.
func OfLine(line string) []any {
	if policy := throttle.PolicyOf(line); policy != line {
		return []any{"policy", policy, "line", line}
	}
	return []any{"policy", line}
}

// Answered notes that a take was answered, and how far the clock of Redis is behind that of an answer before.
func (o *Log) Answered(line string, behind time.Duration) {
	o.Decided()
	o.ClockBehind(behind, OfLine(line)...)
}

// ClockBehind logs once that the clock of Redis was set back. Until it has caught up no window
// frees any units.
func (o *Log) ClockBehind(behind time.Duration, details ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := time.Now(); behind > clockBehindMax && now.After(o.catchesUp) {
		o.logger.Warn("worker: the clock of Redis was set back: windows stand still until it has caught up",
			append(details, "behind", behind)...)
		o.catchesUp = now.Add(behind)
	}
}
