package promthrottle

import (
	"cmp"
	"context"
	"errors"

	"github.com/sluice-go/sluice/throttle"
)

func (m *Metrics) called(c throttle.Call) {
	class := classOf(c.Err)
	if class != "" {
		m.errors.WithLabelValues(c.Policy, c.Script, class).Inc()
	}
	if c.Script == dequeue {
		m.down[1].note("", c.Took, c.Err)
		return
	}
	switch class {
	case "", "unavailable", "timeout":
		m.down[0].note(c.Policy, c.Took, c.Err)
	}
	m.call.WithLabelValues(c.Policy, c.Script).Observe(c.Took.Seconds())
}

// dequeue is the script that package worker names for its calls to asynq's Redis.
const dequeue = "dequeue"

// classes are errors, and their names as labels.
var classes = []struct {
	err  error
	name string
}{
	{throttle.ErrForbidden, "forbidden"}, {throttle.ErrUnavailable, "unavailable"},
	{throttle.ErrState, "state"}, {throttle.ErrClock, "clock"},
	{throttle.ErrReply, "reply"}, {context.DeadlineExceeded, "timeout"}, {context.Canceled, "canceled"},
}

// classOf returns the class of an error, "" for nil.
func classOf(err error) string {
	if err == nil {
		return ""
	}
	for _, c := range classes {
		if errors.Is(err, c.err) {
			return c.name
		}
	}
	return "other"
}

func (m *Metrics) decided(d throttle.Decision) {
	if d.Observed != nil {
		m.observed.WithLabelValues(d.Policy, d.Observed.By).Inc()
		if !d.Observed.NeverFits {
			m.observedWait.WithLabelValues(d.Policy).Observe(d.Observed.Wait.Seconds())
		}
	}
	if d.Granted {
		source := "reserve"
		if d.FailedOpen != nil {
			source = "failed_open"
		}
		m.grants.WithLabelValues(d.Policy, source).Inc()
		return
	}
	m.denials.WithLabelValues(d.Policy, cmp.Or(d.Binds, throttle.ByLine)).Inc()
	if d.Queued && !d.AlreadyQueued {
		m.expected.WithLabelValues(d.Policy).Observe(d.RetryIn.Seconds())
	}
}

func (m *Metrics) followed(p throttle.Publication) {
	if p.Err != nil {
		m.unusable.WithLabelValues().Inc()
		return
	}
	m.version.WithLabelValues().Set(float64(p.Version))
}

func (m *Metrics) joined(p throttle.Place) {
	if p.Err == nil && !p.Exempt && !p.AlreadyQueued {
		m.expected.WithLabelValues(p.Policy).Observe(p.RetryIn.Seconds())
	}
}

func (m *Metrics) started(s throttle.Start) {
	m.wait.WithLabelValues(s.Policy).Observe(s.Waited.Seconds())
	if s.Late >= 0 {
		m.late.WithLabelValues(s.Policy).Observe(s.Late.Seconds())
	}
}

func (m *Metrics) taken(tickets []throttle.TakenTicket) {
	for _, t := range tickets {
		if t.Decision.Granted {
			m.grants.WithLabelValues(t.Decision.Policy, "line").Inc()
		}
	}
}
