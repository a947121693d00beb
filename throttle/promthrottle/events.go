package promthrottle

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// Observe counts an event of the limiter: it is the Observer of the limiter's Config, or a part of it.
func (m *Metrics) Observe(event any) {
	switch e := event.(type) {
	case throttle.Call:
		m.noteCall(e)
	case throttle.Decision:
		m.noteDecision(e)
	case *throttle.DeniedError:
		m.unavailable.WithLabelValues(e.Decision.Policy).Inc()
	case throttle.LineDecision:
		if e.Err == nil && !e.Exempt && !e.AlreadyQueued {
			m.expected.WithLabelValues(e.Policy).Observe(e.RetryIn.Seconds())
		}
	case throttle.Publication:
		if e.Err != nil {
			m.unusable.WithLabelValues().Inc()
			m.version.WithLabelValues() // 0 before the first one, for the alert SluiceVersionsDiffer
		} else {
			m.version.WithLabelValues().Set(float64(e.Version))
		}
	case throttle.Refusal:
		m.refusals.WithLabelValues(e.Policy).Inc()
	case throttle.Start:
		m.wait.WithLabelValues(e.Policy).Observe(e.Waited.Seconds())
		if e.Late >= 0 {
			m.late.WithLabelValues(e.Policy).Observe(e.Late.Seconds())
		}
	case throttle.TakenTicket:
		if e.Decision.Granted {
			m.grants.WithLabelValues(e.Decision.Policy, "line").Inc()
		}
	}
}

func (m *Metrics) noteCall(c throttle.Call) {
	if kind := kindOf(c.Err); kind != "" {
		m.errors.WithLabelValues(c.Policy, c.Script, kind).Inc()
	}
	if c.Script == dequeue {
		m.asynqRedis.note("", c.Took, c.Err)
		return
	}
	m.noteAnswer(c.Policy, c.Took, c.Err)
	m.call.WithLabelValues(c.Policy, c.Script).Observe(c.Took.Seconds())
}

// noteAnswer notes whether the limiter's Redis answered a call. Errors of other kinds say nothing about that.
func (m *Metrics) noteAnswer(policy string, took time.Duration, err error) {
	switch kindOf(err) {
	case "", "unavailable", "timeout":
		m.limiterRedis.note(policy, took, err)
	}
}

const dequeue = "dequeue" // the script that package worker names for its calls to asynq's Redis

// kinds are the values of the label "kind", by error.
var kinds = []struct {
	err  error
	name string
}{
	{throttle.ErrForbidden, "forbidden"}, {throttle.ErrUnavailable, "unavailable"},
	{throttle.ErrState, "state"}, {throttle.ErrClock, "clock"},
	{throttle.ErrReply, "reply"}, {context.DeadlineExceeded, "timeout"}, {context.Canceled, "canceled"},
}

// kindOf returns the kind of an error, "" for nil.
func kindOf(err error) string {
	if err == nil {
		return ""
	}
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	return "other"
}

func (m *Metrics) noteDecision(d throttle.Decision) {
	if d.Observed != nil {
		m.observed.WithLabelValues(d.Policy, d.Observed.Binds).Inc()
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
