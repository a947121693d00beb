// Package promthrottle makes Prometheus metrics of what a throttle.Limiter does.
//
//	metrics, err := promthrottle.New(promthrottle.Config{Registerer: prometheus.DefaultRegisterer})
//	limiter, err := throttle.New(throttle.Config{Client: client, Observer: metrics.Observer()})
//	metrics.Watch(limiter)
//
// docs/howto/metrics.md lists the metrics, with a dashboard and alert rules.
package promthrottle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-go/sluice/internal/isnil"
	"github.com/sluice-go/sluice/throttle"
)

// MaxTenants bounds Config.Tenants: each is a series of several metrics, and ten or more of a
// histogram.
const MaxTenants = 200

// Config configures New.
type Config struct {
	// Registerer gets the metrics. It is required. Each limiter of a process needs one of its own:
	// prometheus.WrapRegistererWith adds a label that tells them apart.
	Registerer prometheus.Registerer

	// Tenants is how many tenants are told apart, by a label tenant: those with the most events, and
	// the rest together as "other". It is at most MaxTenants. The default, 0, is no such label.
	Tenants int
}

// Metrics are the metrics of one limiter. It is safe for concurrent use.
type Metrics struct {
	batch, call, expected, late, wait, would   *prometheus.HistogramVec
	denials, errors, grants, joins             *prometheus.CounterVec
	observed, paused, refusals                 *prometheus.CounterVec
	unavailable, unusable                      *prometheus.CounterVec
	version                                    *prometheus.GaugeVec
	adaptedCounts, adaptedRate, waitingTickets *prometheus.Desc

	all     []*prometheus.MetricVec
	limiter atomic.Pointer[throttle.Limiter]
	rates   rates
	tenants tenants
}

// Buckets, in seconds.
var (
	forCalls  = []float64{.0002, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	forStarts = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	forWaits  = []float64{.01, .1, .5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600}
)

// New returns metrics that are registered. The error is that of the Registerer, or names the field
// that is invalid.
func New(c Config) (*Metrics, error) {
	if isnil.Value(c.Registerer) {
		return nil, errors.New("promthrottle: Config.Registerer is nil: must be such as prometheus.DefaultRegisterer")
	}
	if c.Tenants < 0 || c.Tenants > MaxTenants {
		return nil, fmt.Errorf("promthrottle: Config.Tenants %d: must be 0 to %d", c.Tenants, MaxTenants)
	}
	m := &Metrics{rates: rates{byCount: map[string]rate{}}, tenants: tenants{most: c.Tenants}}
	ofTenant := func(labels ...string) []string {
		if c.Tenants > 0 {
			labels = append(labels, tenantLabel)
		}
		return labels
	}
	counter := func(name, help string, labels []string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sluice_" + name, Help: help}, labels)
		m.all = append(m.all, v.MetricVec)
		return v
	}
	histogram := func(name, help string, buckets []float64, labels []string) *prometheus.HistogramVec {
		opts := prometheus.HistogramOpts{Name: "sluice_" + name, Help: help, Buckets: buckets}
		v := prometheus.NewHistogramVec(opts, labels)
		m.all = append(m.all, v.MetricVec)
		return v
	}
	policy := []string{"policy"}
	m.grants = counter("grants_total",
		"Requests that were granted: at once, from the line, or uncounted as the policy fails open.",
		ofTenant("policy", "source"))
	m.denials = counter("denials_total",
		"Requests that were denied, by the window that denied for longest.", ofTenant("policy", "by"))
	m.observed = counter("observed_denials_total",
		"Requests that would be denied, by the window that would deny for longest: the policy observes only.",
		ofTenant("policy", "by"))
	m.would = histogram("observed_wait_seconds", "How long requests would wait that would be denied.", forWaits, policy)
	m.joins = counter("joins_total",
		"Tickets that were to join the line, by what became of them.", []string{"policy", "result"})
	m.expected = histogram("expected_wait_seconds",
		"The expected wait of tickets, as of their joins.", forWaits, policy)
	m.wait = histogram("wait_seconds",
		"How long work waited from its join until it started.", forWaits, ofTenant("policy"))
	m.late = histogram("start_delay_seconds",
		"How long after it fitted work started, with the wait for a free slot.", forStarts, policy)
	m.refusals = counter("refusals_total", "Calls that the upstream refused.", ofTenant("policy"))
	m.paused = counter("pauses_seconds_total", "Length of the pauses that began by a refusal.", policy)
	m.unavailable = counter("unavailable_requeues_total",
		"Tasks that were requeued because the limiter could not decide.", policy)
	m.call = histogram("script_seconds",
		"How long calls of scripts in Redis took, as the caller sees it.", forCalls, []string{"policy", "script"})
	m.errors = counter("script_errors_total",
		"Calls of scripts in Redis that failed.", []string{"policy", "script", "class"})
	m.batch = histogram("script_batch_size",
		"Requests that one call decided, or tickets that it took.",
		[]float64{0, 1, 2, 4, 8, 16, 32, 64}, []string{"policy", "script"})
	m.unusable = counter("policies_unusable_total",
		"Published versions of policies that could not be put in force.", nil)
	m.version = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "sluice_policies_version", Help: "The version of the published policies that is in force.",
	}, nil)
	m.all = append(m.all, m.version.MetricVec)
	m.adaptedRate = prometheus.NewDesc("sluice_adapted_rate_ratio",
		"The lowest rate in force after refusals, as a part of the published one.", policy, nil)
	m.adaptedCounts = prometheus.NewDesc("sluice_adapted_counts",
		"How many counts of windows have adapted their rate, such as one of each tenant.", policy, nil)
	m.waitingTickets = prometheus.NewDesc("sluice_waiting", "Tickets in line.", policy, nil)
	if err := c.Registerer.Register(m); err != nil {
		return nil, fmt.Errorf("promthrottle: %w", err)
	}
	return m, nil
}

// Observer returns the observer for throttle.Config.
func (m *Metrics) Observer() throttle.Observer {
	return throttle.Observer{
		Called: m.called, Decided: m.decided, Followed: m.followed, Joined: m.joined, Refused: m.refused,
		Started: m.started, Taken: m.taken, Unavailable: m.wasUnavailable,
	}
}

// Watch adds what only the limiter knows: the metric sluice_waiting. Each scrape then asks Redis
// for one number a policy, for a second at most. Numbers that do not come are left out.
func (m *Metrics) Watch(l *throttle.Limiter) { m.limiter.Store(l) }

// Describe is for the Registerer.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range m.all {
		v.Describe(ch)
	}
	ch <- m.adaptedRate
	ch <- m.adaptedCounts
	ch <- m.waitingTickets
}

const scrapeTimeout = time.Second

// Collect is for the Registerer.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, policy string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, policy)
	}
	for _, v := range m.all {
		v.Collect(ch)
	}
	var lines, policies []string
	limiter := m.limiter.Load()
	if limiter != nil {
		lines = limiter.Lines()
	}
	for _, line := range lines { // of a policy with shards there are several
		if policy := throttle.PolicyOf(line); !slices.Contains(policies, policy) {
			policies = append(policies, policy)
		}
	}
	for policy, now := range m.rates.inForce(time.Now(), policies) {
		gauge(m.adaptedRate, now.lowest, policy)
		gauge(m.adaptedCounts, float64(now.counts), policy)
	}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	waiting, silent := map[string]int64{}, map[string]bool{}
	for _, line := range lines {
		policy := throttle.PolicyOf(line)
		n, err := limiter.Line(line).Len(ctx)
		waiting[policy] += n
		silent[policy] = silent[policy] || err != nil
	}
	for policy, n := range waiting {
		if !silent[policy] {
			gauge(m.waitingTickets, float64(n), policy)
		}
	}
}
