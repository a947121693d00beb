package promthrottle

import (
	"cmp"
	"context"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

const (
	scrapeTimeout  = 1500 * time.Millisecond // how long a scrape waits for Redis
	readAtOnce     = 16                      // policies
	sampledTenants = 16                      // of a policy
)

// Watch adds the metrics that only Redis knows, such as sluice_waiting. Each scrape then reads the
// state of every policy, and waits at most 1.5 seconds for them. A policy that was not read in time
// has no such metrics, and counts as a failure of Redis.
func (m *Metrics) Watch(l *throttle.Limiter) { m.watched.Store(l) }

// watch exports the state of each policy, if Redis returns it in time.
func (m *Metrics) watch(ch chan<- prometheus.Metric) {
	l := m.watched.Load()
	if l == nil {
		return
	}
	m.createSeries(l.Policies())
	policies := inspect.Of(l).Policies()
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	answers, slots := make(chan inspect.PolicyState, len(policies)), make(chan struct{}, readAtOnce)
	for _, policy := range policies {
		go func() {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return
			}
			begun := time.Now()
			s, err := inspect.Of(l).State(ctx, inspect.Query{Policy: policy, Limit: sampledTenants})
			<-slots
			m.noteAnswer(policy, time.Since(begun), err)
			answers <- s // zero after an error
		}()
	}
	for range policies {
		select {
		case s := <-answers:
			if !s.At.IsZero() {
				m.export(ch, s)
			}
		case <-ctx.Done():
			m.limiterRedis.note("", scrapeTimeout, ctx.Err())
			return
		}
	}
	m.limiterRedis.note("", 0, nil)
}

// export exports the state of one policy.
func (m *Metrics) export(ch chan<- prometheus.Metric, s inspect.PolicyState) {
	gauge := func(name string, value float64, labels ...string) {
		labels = append([]string{s.Policy}, labels...)
		ch <- prometheus.MustNewConstMetric(m.states[name], prometheus.GaugeValue, value, labels...)
	}
	rate, oldest := 1.0, s.At
	for _, t := range append(s.Tenants, s.State) { // the state of the whole policy may be adapted, too
		if a := t.Adapted; a != nil {
			rate = min(rate, a.Rate/a.Published)
		}
		if !t.Oldest.IsZero() && t.Oldest.Before(oldest) {
			oldest = t.Oldest
		}
	}
	queues := map[[2]string]inspect.QueueState{} // by name and class: several asynqs may have a queue of the same name
	for _, q := range s.Queues {
		_, name, _ := strings.Cut(q.Queue, "/") // package worker puts the ID of its asynq's Redis in front
		labels := [2]string{strings.ToValidUTF8(cmp.Or(name, q.Queue), "\uFFFD"), string(q.Class)}
		sum := queues[labels]
		sum.Waiting += q.Waiting
		if q.Asked.After(sum.Asked) {
			sum.Asked = q.Asked
		}
		queues[labels] = sum
	}
	for labels, q := range queues {
		gauge("queue_waiting", float64(q.Waiting), labels[:]...)
		gauge("queue_asked_seconds", s.At.Sub(q.Asked).Seconds(), labels[:]...)
	}
	for _, w := range s.Windows {
		gauge("window_used_ratio", float64(w.Used)/float64(w.Burst), w.Name)
	}
	gauge("adapted_rate_ratio", rate)
	gauge("waiting", float64(s.Waiting))
	gauge("oldest_wait_seconds", s.At.Sub(oldest).Seconds())
	gauge("starving_tenants", float64(len(m.starvation.Note(s))))
	for by, byHand := range map[string]bool{"operator": true, "upstream": false} {
		paused := s.Pause != nil && s.Pause.ByHand == byHand
		gauge("paused", map[bool]float64{true: 1}[paused], by)
	}
}

// createSeries creates series of 0 for events that have not happened yet. Prometheus sees no increase from no
// series to 1, so otherwise the first event would go unnoticed.
func (m *Metrics) createSeries(policies []throttle.Policy) {
	for _, p := range policies {
		for _, source := range []string{"failed_open", "line", "reserve"} {
			m.grants.WithLabelValues(p.Name, source)
		}
		for _, w := range p.Windows {
			m.denials.WithLabelValues(p.Name, w.Name)
		}
		for _, script := range []string{"decide", "take"} {
			for _, k := range kinds {
				m.errors.WithLabelValues(p.Name, script, k.name)
			}
		}
		m.refusals.WithLabelValues(p.Name)
		m.unavailable.WithLabelValues(p.Name)
	}
}

// outages are the times in which a Redis did not answer.
type outages struct {
	mu     sync.Mutex
	failed map[string]time.Time // policies whose last call failed, and when: an outage lasts while there is one
	began  time.Time            // when the last outage began; it may be under way
	ended  time.Time            // when the last one that is over ended
	past   time.Duration        // of all outages that are over
}

// note records the end of a call about a policy, or with "" of a scrape, or of any call to asynq's Redis. An outage
// begins when the failed call began, not when it ended: go-redis may repeat a call that hangs.
func (o *outages) note(policy string, took time.Duration, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch isDown := len(o.failed) > 0; {
	case err != nil && !isDown:
		o.failed = map[string]time.Time{policy: time.Now()}
		o.began = time.Now().Add(-min(took, time.Since(o.ended))) // outages do not overlap
	case err != nil:
		o.failed[policy] = time.Now()
	case isDown:
		maps.DeleteFunc(o.failed, func(other string, at time.Time) bool { // calls about other policies may be rare
			return other == policy || time.Since(at) > 10*time.Second
		})
		if len(o.failed) == 0 {
			o.past, o.ended = o.past+time.Since(o.began), time.Now()
		}
	}
}

// totals returns 1 if Redis answers and 0 if not, and the seconds of all outages together.
func (o *outages) totals() (up, seconds float64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.failed) == 0 {
		return 1, o.past.Seconds()
	}
	return 0, (o.past + time.Since(o.began)).Seconds()
}
