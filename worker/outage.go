package worker

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// outages logs that the limiter is unavailable: for each class of error once when it begins and
// once when it is over, rather than for every task. It also logs that the clock of Redis was set
// back.
type outages struct {
	logger *slog.Logger

	mu        sync.Mutex
	byClass   map[error]*outage
	catchesUp time.Time            // when the clock of Redis will be where it was before it was set back
	latest    map[string]time.Time // by policy: the latest time of that clock
}

type outage struct {
	since, last time.Time
	tasks       int
}

// overAfter is how long no decision must have failed before an outage counts as over. Tasks that
// failed have come back by then. Otherwise one tenant's failure beside another's success would be
// logged at every task.
const overAfter = 20 * time.Second

// clockBehindMax is how far behind its windows the clock of Redis may be without being logged.
// Disciplined clocks, and those of two servers of a failover, differ by less.
const clockBehindMax = time.Second

func newOutages(logger *slog.Logger) *outages {
	return &outages{logger: logger, byClass: map[error]*outage{}, latest: map[string]time.Time{}}
}

func (o *outages) failed(err error, details ...any) {
	var class error
	for _, c := range []error{throttle.ErrUnavailable, throttle.ErrState, throttle.ErrReply, throttle.ErrClock} {
		if errors.Is(err, c) {
			class = c
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	out := o.byClass[class]
	if out == nil {
		out = &outage{since: now}
		o.byClass[class] = out
		o.logger.Error("worker: the limiter is unavailable", append([]any{"err", err}, details...)...)
	}
	out.last = now
	out.tasks++
}

func (o *outages) decided() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for class, out := range o.byClass {
		if time.Since(out.last) > overAfter {
			delete(o.byClass, class)
			o.logger.Info("worker: the limiter is available again", "after", out.last.Sub(out.since), "tasks", out.tasks)
		}
	}
}

// clockAt notes what the clock of Redis said when a policy's line was asked. It may have been set
// back since it was asked before.
func (o *outages) clockAt(policy string, at time.Time) {
	o.mu.Lock()
	latest := o.latest[policy]
	if at.After(latest) {
		o.latest[policy] = at
	}
	o.mu.Unlock()
	o.clockBehind(latest.Sub(at), "policy", policy)
}

// clockBehind logs once that the clock of Redis was set back. Until it has caught up no window
// frees any units.
func (o *outages) clockBehind(behind time.Duration, details ...any) {
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
