package promthrottle

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-go/sluice/throttle"
)

// with returns labels, and that of the tenant if tenants are told apart. The tenants' lock is held.
func (m *Metrics) with(tenant string, labels ...string) []string {
	if m.tenants.most > 0 {
		labels = append(labels, m.tenants.label(tenant, time.Now(), m.forget))
	}
	return labels
}

func (m *Metrics) forget(label string) {
	for _, v := range m.all {
		v.DeletePartialMatch(prometheus.Labels{tenantLabel: label})
	}
}

func (m *Metrics) called(c throttle.Call) {
	m.call.WithLabelValues(c.Policy, c.Script).Observe(c.Took.Seconds())
	if c.Err != nil {
		m.errors.WithLabelValues(c.Policy, c.Script, classOf(c.Err)).Inc()
		return
	}
	m.batch.WithLabelValues(c.Policy, c.Script).Observe(float64(c.N))
}

func classOf(err error) string {
	for _, c := range []struct {
		err  error
		name string
	}{
		{throttle.ErrForbidden, "forbidden"}, {throttle.ErrUnavailable, "unavailable"},
		{throttle.ErrState, "state"}, {throttle.ErrClock, "clock"},
		{throttle.ErrReply, "reply"}, {context.DeadlineExceeded, "timeout"}, {context.Canceled, "canceled"},
	} {
		if errors.Is(err, c.err) {
			return c.name
		}
	}
	return "other"
}

func (m *Metrics) decided(d throttle.Decision) {
	defer m.tenants.lock()()
	if d.Observed != nil {
		m.observed.WithLabelValues(m.with(d.Tenant, d.Policy, d.Observed.By)...).Inc()
		if !d.Observed.NeverFits {
			m.would.WithLabelValues(d.Policy).Observe(d.Observed.Wait.Seconds())
		}
	}
	if d.Granted {
		source := "reserve"
		if d.FailedOpen != nil {
			source = "failed_open"
		}
		m.grants.WithLabelValues(m.with(d.Tenant, d.Policy, source)...).Inc()
		return
	}
	m.denials.WithLabelValues(m.with(d.Tenant, d.Policy, d.Binds())...).Inc()
	if d.Queued && !d.AlreadyQueued {
		m.expected.WithLabelValues(d.Policy).Observe(d.RetryIn.Seconds())
	}
	if d.Adapted != nil {
		m.rates.note(d.Policy, *d.Adapted, d.At)
	}
}

func (m *Metrics) followed(version int64, err error) {
	unusable := m.unusable.WithLabelValues() // it is exported from the first version on
	if err != nil {
		unusable.Inc()
		return
	}
	m.version.WithLabelValues().Set(float64(version))
}

func (m *Metrics) joined(policy, _ string, p throttle.Place) {
	result := resultOf(p)
	m.joins.WithLabelValues(policy, result).Inc()
	if result == "joined" {
		m.expected.WithLabelValues(policy).Observe(p.Expected.Seconds())
	}
}

func resultOf(p throttle.Place) string {
	switch {
	case errors.As(p.Err, new(*throttle.BacklogError)):
		return "backlog"
	case errors.As(p.Err, new(*throttle.TooLateError)):
		return "too_late"
	case errors.As(p.Err, new(*throttle.NeverFitsError)):
		return "never_fits"
	case p.Err != nil:
		return "invalid"
	case p.Exempt:
		return "exempt"
	case p.AlreadyQueued:
		return "already_queued"
	}
	return "joined"
}

func (m *Metrics) refused(r throttle.Refusal) {
	defer m.tenants.lock()()
	m.refusals.WithLabelValues(m.with(r.Tenant, r.Policy)...).Inc()
	m.paused.WithLabelValues(r.Policy).Add(r.Pause.Seconds())
	if r.Adapted != nil {
		m.rates.note(r.Policy, *r.Adapted, r.Adapted.Changed)
	}
}

func (m *Metrics) started(s throttle.Start) {
	defer m.tenants.lock()()
	m.wait.WithLabelValues(m.with(s.Tenant, s.Policy)...).Observe(s.Waited.Seconds())
	if s.Late >= 0 {
		m.late.WithLabelValues(s.Policy).Observe(s.Late.Seconds())
	}
}

func (m *Metrics) taken(policy string, tickets []throttle.TakenTicket) {
	defer m.tenants.lock()()
	for _, t := range tickets {
		if t.Decision.Granted {
			m.grants.WithLabelValues(m.with(t.Decision.Tenant, policy, "line")...).Inc()
		}
	}
}

func (m *Metrics) wasUnavailable(policy, _ string, _ error) {
	m.unavailable.WithLabelValues(policy).Inc()
}
