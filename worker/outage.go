package worker

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// outages log that the limiter cannot decide: once when it begins and once when it is over,
// per class of error, and not for every task.
type outages struct {
	logger *slog.Logger

	mu      sync.Mutex
	byClass map[error]*outage
}

type outage struct {
	since, last time.Time
	tasks       int
}

// overAfter is how long no decision must have failed before an outage counts as over: those
// that failed have come back by then. One tenant's trouble beside another's success would
// otherwise be logged at every task.
const overAfter = 2 * undecidedMax

func newOutages(logger *slog.Logger) *outages {
	return &outages{logger: logger, byClass: map[error]*outage{}}
}

func (o *outages) failed(err error, details ...any) {
	var class error
	for _, c := range []error{throttle.ErrUnavailable, throttle.ErrState, throttle.ErrReply} {
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
