package promthrottle_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/promthrottle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// series returns all series as lines such as `sluice_waiting{policy="api"} 2`, of histograms their counts.
func series(t *testing.T, registry *prometheus.Registry) (lines []string) {
	t.Helper()
	families := expect.Got(registry.Gather())(t)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, pair := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", pair.GetName(), pair.GetValue()))
			}
			value := m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			lines = append(lines, fmt.Sprintf("%s{%s} %g", family.GetName(), strings.Join(labels, ","), value))
		}
	}
	return lines
}

func wantSeries(t *testing.T, registry *prometheus.Registry, want ...string) {
	t.Helper()
	got := series(t, registry)
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("there is no %s, but\n%s", w, strings.Join(got, "\n"))
			return
		}
	}
}

func limiter(t *testing.T, client redis.UniversalClient, metrics *promthrottle.Metrics) *throttle.Limiter {
	t.Helper()
	return limitertest.NewFrom(t, throttle.Config{
		Client: client, Observer: metrics.Observe,
		Policies: []throttle.Policy{{Name: "api", Match: []string{"*"}, Windows: []throttle.Window{
			{Name: "hour", Limit: 2, Period: time.Hour}, {Name: "all", Limit: 10, Period: time.Hour, Shared: true},
			{Name: "burst", Algorithm: throttle.AlgorithmGCRA, Burst: 3, Limit: 9, Period: 900 * time.Hour, Shared: true},
		}}},
	})
}

func metrics(t *testing.T) (*promthrottle.Metrics, *prometheus.Registry) {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	return expect.Got(promthrottle.New(registry))(t), registry
}

// What a limiter does is counted, and the metrics are named as Prometheus has it.
func TestMetricsOfALimiter(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		ctx := t.Context()
		m, registry := metrics(t)
		l := limiter(t, client, m)
		wantSeries(t, registry)
		m.Watch(l)
		wantSeries(t, registry, `sluice_script_errors_total{kind="unavailable",policy="api",script="take"} 0`)
		wantSeries(t, registry, `sluice_waiting{policy="api"} 0`, `sluice_adapted_rate_ratio{policy="api"} 1`)

		ticket := func(tenant, id string) throttle.Request {
			return throttle.Request{Policy: "api", Tenant: tenant, Ticket: throttle.Ticket{Queue: "q", ID: id}}
		}
		var granted throttle.Decision
		for i := range 3 { // the third joins the line
			d := expect.Got(l.Reserve(ctx, ticket("a", fmt.Sprint(i))))(t)
			if d.Granted {
				granted = d
			}
		}
		join, full := ticket("b", "4"), ticket("a", "5")
		full.Backlog = 1
		expect.Must(t, expect.ErrOf(l.Line("api").Join(ctx, []throttle.Request{join, join, full})))
		wantSeries(t, registry, `sluice_grants_total{policy="api",source="reserve"} 2`,
			`sluice_denials_total{by="hour",policy="api"} 1`, `sluice_expected_wait_seconds{policy="api"} 2`,
			`sluice_waiting{policy="api"} 2`, `sluice_queue_waiting{class="live",policy="api",queue="q"} 2`,
			`sluice_window_used_ratio{policy="api",window="all"} 0.2`, `sluice_paused{by="upstream",policy="api"} 0`)
		taken, err := l.Line("api").Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 10})
		expect.Require(t, err == nil && len(taken.Tickets) == 1, taken, err)
		expect.Must(t, expect.ErrOf(granted.Reservation.Pause(ctx, 0, "")))
		m.Observe(throttle.Start{Late: time.Millisecond, Policy: "api", Tenant: "b", Waited: time.Second})
		m.Observe(throttle.Start{Late: -1, Policy: "api", Tenant: "b"})
		m.Observe(&throttle.DeniedError{Cause: throttle.ErrUnavailable, Decision: throttle.Decision{Policy: "api", Tenant: "b"}})
		m.Observe(throttle.Decision{FailedOpen: throttle.ErrUnavailable, Granted: true, Policy: "api", Tenant: "b"})
		m.Observe(throttle.Decision{Granted: true, Observed: &throttle.Observed{Binds: "hour", Wait: time.Second}, Policy: "api", Tenant: "b"})
		m.Observe(throttle.Decision{Granted: true, Observed: &throttle.Observed{Binds: "hour", NeverFits: true}, Policy: "api", Tenant: "b"})
		wantSeries(t, registry, `sluice_policies_unusable_total{} 0`)
		m.Observe(throttle.Publication{Err: throttle.ErrUnknownPolicy, Version: 8})
		wantSeries(t, registry, `sluice_policies_version{} 0`)
		m.Observe(throttle.Publication{Version: 7})
		m.Observe(throttle.Call{Err: fmt.Errorf("%w: gone", throttle.ErrUnavailable), Policy: "api", Script: "take", Took: time.Second})
		wantSeries(t, registry, `sluice_grants_total{policy="api",source="line"} 1`,
			`sluice_window_used_ratio{policy="api",window="burst"} 1`, `sluice_waiting{policy="api"} 1`,
			`sluice_refusals_total{policy="api"} 1`, `sluice_adapted_rate_ratio{policy="api"} 1`,
			`sluice_wait_seconds{policy="api"} 2`, `sluice_start_delay_seconds{policy="api"} 1`,
			`sluice_unavailable_requeues_total{policy="api"} 1`,
			`sluice_observed_denials_total{by="hour",policy="api"} 2`, `sluice_observed_wait_seconds{policy="api"} 1`,
			`sluice_policies_version{} 7`, `sluice_policies_unusable_total{} 1`,
			`sluice_grants_total{policy="api",source="failed_open"} 1`,
			`sluice_script_errors_total{kind="unavailable",policy="api",script="take"} 1`)

		families := expect.Got(registry.Gather())(t)
		problems, err := promlint.NewWithMetricFamilies(families).Lint()
		expect.That(t, err == nil && len(problems) == 0, "promlint", problems, err)
		expect.Equal(t, len(families), len(exported(m)), "metrics were tested")
	})
}

// The shards of a policy are one series.
func TestMetricsOfAPolicyWithShards(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		m, registry := metrics(t)
		l := limiter(t, client, m)
		m.Watch(l)
		p := throttle.Policy{Name: "api", Shards: 4, Windows: []throttle.Window{{Name: "hour", Limit: 2, Period: time.Hour}}}
		expect.Must(t, l.SetPolicies([]throttle.Policy{p}))
		for i := range 8 {
			r := throttle.Request{Tenant: fmt.Sprint("tenant", i), Ticket: throttle.Ticket{Queue: "q\xff", ID: fmt.Sprint(i)}} // data: any bytes
			expect.Must(t, expect.ErrOf(l.Line(l.LineOf("api", r.Tenant)).Join(t.Context(), []throttle.Request{r})))
		}
		wantSeries(t, registry, `sluice_waiting{policy="api"} 8`, `sluice_expected_wait_seconds{policy="api"} 8`,
			`sluice_queue_waiting{class="live",policy="api",queue="q�"} 8`)
	})
}

// What hangs is down since the call began that failed at last.
func TestACallThatHangsCountsAsDowntime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, registry := metrics(t)
		m.Observe(throttle.Call{Err: io.EOF, Script: "dequeue", Took: 13 * time.Second})
		time.Sleep(91 * time.Second) // nobody calls
		wantSeries(t, registry, `sluice_redis_up{redis="queues"} 0`, `sluice_redis_down_seconds_total{redis="queues"} 104`)
		m.Observe(throttle.Call{Script: "dequeue"})
		wantSeries(t, registry, `sluice_redis_up{redis="queues"} 1`, `sluice_redis_down_seconds_total{redis="queues"} 104`)
		m.Observe(throttle.Call{Err: io.EOF, Script: "dequeue", Took: 13 * time.Second}) // it hung during that outage
		wantSeries(t, registry, `sluice_redis_up{redis="queues"} 0`, `sluice_redis_down_seconds_total{redis="queues"} 104`)
	})
}

// One call of a policy fails, about which nobody asks again: other policies' calls show that Redis answers.
func TestOneLostCallIsNoLongOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, registry := metrics(t)
		m.Observe(throttle.Call{Err: throttle.ErrUnavailable, Policy: "rare", Script: "decide"})
		for range 20 {
			time.Sleep(time.Second)
			m.Observe(throttle.Call{Policy: "busy", Script: "decide"})
		}
		wantSeries(t, registry, `sluice_redis_up{redis="limiter"} 1`)
	})
}

// While Redis hangs each scrape says so within 1.5 s, also beside others.
func TestAScrapeWhileRedisHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client := redis.NewClient(&redis.Options{Dialer: func(context.Context, string, string) (net.Conn, error) {
			hangs, _ := net.Pipe() // nobody reads
			return hangs, nil
		}})
		defer client.Close()
		m, registry := metrics(t)
		m.Watch(limiter(t, client, m))
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				begun := time.Now()
				wantSeries(t, registry, `sluice_redis_up{redis="limiter"} 0`, `sluice_redis_up{redis="queues"} 1`)
				took := time.Since(begun)
				expect.That(t, took <= 1500*time.Millisecond, "a scrape took", took)
			})
		}
		all.Wait()
		for _, line := range series(t, registry) {
			expect.That(t, !strings.HasPrefix(line, "sluice_waiting"), "nobody knows", line)
		}
		time.Sleep(time.Minute) // until all calls have ended
	})
}

// What a lookup of tenants fails by is no outage.
func TestALookupThatFailsIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, registry := metrics(t)
		var failing atomic.Bool
		l := limitertest.NewFrom(t, throttle.Config{
			Client: throttletest.InMemory(t).Client(t), Observer: m.Observe,
			Policies: []throttle.Policy{{Name: "p", Windows: []throttle.Window{{Name: "hour", Limit: 1, Period: time.Hour}}}},
			Tenants: func(context.Context, string, string) (t throttle.Tenant, found bool, err error) {
				if failing.Load() {
					err = io.EOF
				}
				return t, false, err
			},
		})
		m.Watch(l)
		limitertest.Join(t, l, throttle.Request{Policy: "p", Tenant: "acme", Ticket: limitertest.Ticket("a1")})
		failing.Store(true)
		wantSeries(t, registry, `sluice_redis_up{redis="limiter"} 1`)
	})
}

func TestRegistererIsChecked(t *testing.T) {
	_, err := promthrottle.New(nil)
	expect.Equal(t, fmt.Sprint(err), "promthrottle: the registerer is nil: must be such as prometheus.DefaultRegisterer")
	_, registry := metrics(t)
	_, err = promthrottle.New(registry)
	expect.That(t, errors.As(err, new(prometheus.AlreadyRegisteredError)), "a second time", err)
}
