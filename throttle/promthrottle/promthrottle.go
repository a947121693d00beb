// Package promthrottle exports Prometheus metrics of a throttle.Limiter.
//
//	metrics, err := promthrottle.New(prometheus.DefaultRegisterer)
//	limiter, err := throttle.New(throttle.Config{Client: client, Observer: metrics.Observe})
//	metrics.Watch(limiter)
//
// docs/howto/metrics.md lists the metrics, with a dashboard and alert rules.
package promthrottle

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

// Metrics are the metrics of one limiter. It is safe for concurrent use.
type Metrics struct {
	call, expected, late, observedWait, wait  *prometheus.HistogramVec
	denials, errors, grants                   *prometheus.CounterVec
	observed, refusals, unavailable, unusable *prometheus.CounterVec
	version                                   *prometheus.GaugeVec

	events                   *prometheus.Registry
	states                   map[string]*prometheus.Desc // by name
	limiterRedis, asynqRedis outages
	starvation               inspect.StarvationDetector
	watched                  atomic.Pointer[throttle.Limiter] // its policies are read at each scrape
}

// Buckets, in seconds.
var (
	forCalls  = []float64{.0002, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	forStarts = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	forWaits  = []float64{.01, .1, .5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600}
)

// New registers the metrics of one limiter. Each limiter of a process needs a registerer of its own:
// prometheus.WrapRegistererWith adds a label that tells them apart. The error wraps the registerer's.
func New(registerer prometheus.Registerer) (*Metrics, error) {
	if registerer == nil {
		return nil, errors.New("promthrottle: the registerer is nil: must be such as prometheus.DefaultRegisterer")
	}
	m := &Metrics{events: prometheus.NewRegistry(), states: map[string]*prometheus.Desc{}}
	factory := promauto.With(m.events)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return factory.NewCounterVec(prometheus.CounterOpts{Name: "sluice_" + name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return factory.NewHistogramVec(prometheus.HistogramOpts{Name: "sluice_" + name, Help: help, Buckets: buckets}, labels)
	}
	state := func(name, help string, labels ...string) {
		m.states[name] = prometheus.NewDesc("sluice_"+name, help, labels, nil)
	}
	m.grants = counter("grants_total", "Requests granted: at once, from the line, or uncounted as the policy fails open.",
		"policy", "source")
	m.denials = counter("denials_total", "Requests denied, by what denied for longest.", "policy", "by")
	m.observed = counter("observed_denials_total", "Requests that an observing policy would deny.", "policy", "by")
	m.observedWait = histogram("observed_wait_seconds", "How long these requests would wait.", forWaits, "policy")
	m.expected = histogram("expected_wait_seconds", "Expected wait of tickets when they joined.", forWaits, "policy")
	m.wait = histogram("wait_seconds", "How long work waited from its join to its start.", forWaits, "policy")
	m.late = histogram("start_delay_seconds", "How long after it fitted work started.", forStarts, "policy")
	m.refusals = counter("refusals_total", "Calls that the upstream refused.", "policy")
	m.unavailable = counter("unavailable_requeues_total", "Tasks requeued because nothing was decided.", "policy")
	m.call = histogram("script_seconds", "How long calls of scripts in Redis took.", forCalls, "policy", "script")
	m.errors = counter("script_errors_total", "Calls of scripts in Redis that failed.", "policy", "script", "kind")
	m.unusable = counter("policies_unusable_total", "Published versions of policies that are not in force.")
	m.unusable.WithLabelValues()
	m.version = factory.NewGaugeVec(prometheus.GaugeOpts{
		Name: "sluice_policies_version", Help: "The version of the published policies that is in force.",
	}, nil)
	state("redis_up", "Whether the Redis of the limiter, or of asynq's queues, answered last.", "redis")
	state("redis_down_seconds_total", "For how long it did not answer.", "redis")
	state("adapted_rate_ratio", "The lowest rate after refusals, as a part of the published one.", "policy")
	state("waiting", "Tickets in line.", "policy")
	state("queue_waiting", "Tickets in line, by queue and class.", "policy", "queue", "class")
	state("queue_asked_seconds", "Time since a server asked for the queue.", "policy", "queue", "class")
	state("oldest_wait_seconds", "The longest wait of a ticket, of about 16 tenants.", "policy")
	state("starving_tenants", "Of about 16 tenants, those granted nothing, though others are.", "policy")
	state("paused", "Whether the upstream or an operator pauses the policy.", "policy", "by")
	state("window_used_ratio", "Units counted by a shared window, as a part of its limit, or of its burst.", "policy", "window")
	if err := registerer.Register(m); err != nil {
		return nil, fmt.Errorf("promthrottle: %w", err)
	}
	return m, nil
}

// Describe is for the Registerer.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	m.events.Describe(ch)
	for _, desc := range m.states {
		ch <- desc
	}
}

// Collect is for the Registerer.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.watch(ch)
	m.events.Collect(ch)
	for redis, o := range map[string]*outages{"limiter": &m.limiterRedis, "queues": &m.asynqRedis} {
		up, seconds := o.totals()
		ch <- prometheus.MustNewConstMetric(m.states["redis_up"], prometheus.GaugeValue, up, redis)
		ch <- prometheus.MustNewConstMetric(m.states["redis_down_seconds_total"], prometheus.CounterValue, seconds, redis)
	}
}
