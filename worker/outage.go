package worker

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// outages log that the limiter cannot decide: once when it begins and once when it is over,
// per class of error, and not for every task. So too that the clock of Redis was set back.
type outages struct {
	logger *slog.Logger

	mu        sync.Mutex
	byClass   map[error]*outage
	catchesUp time.Time            // when the clock of Redis will be where it was before it was set back
	latest    map[string]time.Time // by policy: what that clock has said at most
}

type outage struct {
	since, last time.Time
	tasks       int
}

// overAfter is how long no decision must have failed before an outage counts as over: those
// that failed have come back by then. One tenant's trouble beside another's success would
// otherwise be logged at every task.
const overAfter = 20 * time.Second

// clockBehindMost is how far behind its windows the clock of Redis may be without a word: clocks
// that are disciplined, and those of a failover's two servers, differ by less.
const clockBehindMost = time.Second

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
		o.logger.Error("worker: tasks go undecided", append([]any{"err", err}, details...)...)
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
			o.logger.Info("worker: tasks are decided again", "after", out.last.Sub(out.since), "undecided", out.tasks)
		}
	}
}

// clockAt notes what the clock of Redis said when a policy's line was asked. It may have been set back since it was asked before.
func (o *outages) clockAt(policy string, at time.Time) {
	o.mu.Lock()
	latest := o.latest[policy]
	if at.After(latest) {
		o.latest[policy] = at
	}
	o.mu.Unlock()
	o.clockBehind(latest.Sub(at), "policy", policy)
}

// clockBehind logs once that the clock of Redis was set back: until it has caught up, nothing that was
// counted before leaves a window.
func (o *outages) clockBehind(behind time.Duration, details ...any) {
	if behind <= clockBehindMost {
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
