// Package outage is what a worker does about a Redis that does not answer: it logs it, and waits briefly.
package outage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

const (
	stillEvery = time.Minute // it is logged that an outage lasts

	// overAfter is how long nothing must have failed before an outage counts as over. Tasks that failed
	// have come back by then. Otherwise one tenant's failure beside another's success would be logged at
	// every task.
	overAfter = 20 * time.Second

	// slowFor is how long answers may be late before that is an outage: a busy host misses time limits.
	slowFor = 2 * time.Second

	// clockBehindMax is how far behind its windows the clock of Redis may be. Disciplined clocks, and those
	// of two servers of a failover, differ by less. Until it has caught up no window frees any units.
	clockBehindMax = time.Second
)

// A Log logs that a Redis is unavailable: when it begins, every minute while it lasts, and when it is over,
// rather than for every task.
type Log struct {
	Logger  *slog.Logger
	Service string // such as "the limiter"

	mu       sync.Mutex
	since    time.Time // the first failure, or zero
	answered time.Time // the first answer after the last failure
	failures int
	cause    []any
	timer    *time.Timer // looks whether it lasts; nil: it is not logged
	looks    int
}

// Failed notes that a Redis failed, or was not asked. Details are those of slog.
func (o *Log) Failed(err error, details ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failures++; o.failures == 1 {
		o.since = time.Now()
	}
	o.answered = time.Time{}
	o.cause = append([]any{"err", err}, details...)
	late := errors.Is(err, context.DeadlineExceeded) && time.Since(o.since) < slowFor
	if o.timer == nil && !late {
		o.looks, o.timer = 0, time.AfterFunc(overAfter, o.look)
		o.Logger.Error("worker: "+o.Service+" is unavailable", o.cause...)
	}
}

// Answered notes that it has answered, and how far its clock is behind that of an answer before.
func (o *Log) Answered(behind time.Duration, details ...any) {
	if behind > clockBehindMax {
		o.Failed(fmt.Errorf("the clock of Redis was set back by %v: windows stand still until it has caught up", behind), details...)
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.timer == nil:
		o.failures = 0
	case o.answered.IsZero():
		o.answered = time.Now()
	}
}

// look logs that an outage lasts, or that it is over.
func (o *Log) look() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.looks++
	switch {
	case o.timer == nil: // closed
		return
	case o.answered.IsZero() && o.looks%int(stillEvery/overAfter) == 0:
		o.Logger.Error("worker: "+o.Service+" is still unavailable",
			append([]any{"for", time.Since(o.since).Round(time.Second), "failures", o.failures}, o.cause...)...)
	case !o.answered.IsZero() && time.Since(o.answered) >= overAfter:
		o.Logger.Info("worker: "+o.Service+" is available again",
			"after", o.answered.Sub(o.since).Round(time.Millisecond), "failures", o.failures)
		o.failures, o.timer = 0, nil
		return
	}
	o.timer.Reset(overAfter)
}

// Close logs nothing more of an outage that lasts.
func (o *Log) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.timer = nil
}
