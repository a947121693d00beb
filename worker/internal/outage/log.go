// Package outage handles a Redis that does not answer: it logs the outage, and delays the next attempt.
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
	stillEvery = time.Minute // between two logs of an outage that lasts

	// overAfter is how long nothing must have failed before an outage counts as over. Failed tasks have come
	// back by then. Otherwise, if one tenant's calls fail and another's succeed, each task would log a change.
	overAfter = 20 * time.Second

	// tolerance is how long answers may be late, and how far the clock of Redis may be set back, before that is an
	// outage: a busy host misses time limits, and clocks of a failover differ by less. Other errors log at once.
	tolerance = 2 * time.Second
)

// A Log logs that a Redis is unavailable: when it begins, every minute while calls fail, and when calls are
// answered again, rather than for every task.
type Log struct {
	Logger  *slog.Logger
	Service string // such as "the limiter"

	mu       sync.Mutex
	since    time.Time // the first failure
	answered time.Time // the first answer after the last failure, or zero
	failures int
	logged   time.Time // when the outage was last logged; zero: no outage is logged
}

// Failed notes that a Redis failed, or was not asked. Details are attributes for slog.
func (o *Log) Failed(err error, details ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	if o.failures++; o.failures == 1 {
		o.since = now
	}
	o.answered = time.Time{}
	details = append([]any{"err", err}, details...)
	lasts := now.Sub(o.since)
	switch {
	case o.logged.IsZero() && errors.Is(err, context.DeadlineExceeded) && lasts < tolerance:
		return
	case o.logged.IsZero():
		o.Logger.Error("worker: "+o.Service+" is unavailable", details...)
	case now.Sub(o.logged) >= stillEvery:
		o.Logger.Error("worker: "+o.Service+" is still unavailable",
			append([]any{"for", lasts.Round(time.Second), "failures", o.failures}, details...)...)
	default:
		return
	}
	o.logged = now
}

// Answered notes that Redis has answered, and how far its clock is behind the time of an earlier answer.
func (o *Log) Answered(behind time.Duration, details ...any) {
	if behind > tolerance {
		o.Failed(fmt.Errorf("the clock of Redis was set back by %v: windows stand still until it has caught up", behind), details...)
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.logged.IsZero():
		o.failures = 0
	case o.answered.IsZero():
		o.answered = time.Now()
	case time.Since(o.answered) >= overAfter:
		o.Logger.Info("worker: "+o.Service+" is available again",
			"after", o.answered.Sub(o.since).Round(time.Millisecond), "failures", o.failures)
		o.failures, o.logged = 0, time.Time{}
	}
}
