package alerts

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// An expected alert fires within two minutes of a time, and is over two and a half minutes after another.
type expected struct {
	alert     string
	from, end time.Duration
}

const (
	s      = time.Second
	minute = time.Minute
)

// The scenarios that scripts/drill records, and what has to fire.
var scenarios = map[string][]expected{
	"drill":    nil, // see steps
	"starving": {{`SluiceTenantStarves{job="workers", policy="api"}`, 90 * s, 320 * s}},
	"backlog":  {{`SluiceBacklogStands{job="workers", policy="api"}`, 2 * minute, 6 * minute}},
	"workers":  {{`SluiceNoServer{job="workers", policy="api", queue="default"}`, time.Minute, time.Hour}},
}

// stepSigns are what metrics and alerts must tell of a step of scripts/drill, which has what the page must tell.
type stepSigns struct {
	metrics []string // expressions of which each has a result, at some time of the step
	alerts  []string // that fire within two minutes of the step's begin, and end after it
}

var isDown = stepSigns{
	[]string{`max(sluice_redis_up{redis="limiter"}) == 0`, `max(sluice_redis_up{redis="queues",instance=~"worker.*"}) == 0`},
	[]string{`SluiceRedisDown{job="workers", redis="limiter"}`, `SluiceRedisDown{job="workers", redis="queues"}`},
}

// The steps of the drill.
var steps = map[string]stepSigns{
	"5,000 tasks of five tenants come": {metrics: []string{
		`min(sluice_redis_up) == 1`, `max(sluice_waiting{policy="api"}) > 4000`, `sum(rate(sluice_grants_total{policy="api"}[20s])) > 15`,
	}},
	"Redis is stopped for 27 s": isDown,
	"Redis is back":             {metrics: []string{`min(sluice_redis_up) == 1`}},
	"a worker is killed": {metrics: []string{
		`count(sluice_redis_up{redis="queues",instance=~"worker.*"}) == 2`, `sum(rate(sluice_grants_total{policy="api"}[20s])) > 15`,
	}},
	"the API answers 429 with Retry-After 60": {metrics: []string{
		`max(sluice_paused{policy="api",by="upstream"}) == 1`, `sum(sluice_refusals_total{policy="api"}) == 1`,
		`max(sluice_paused{policy="api",by="operator"}) == 0`, `sum(rate(sluice_grants_total{policy="api"}[20s])) == 0`,
	}},
	"a limit is cut to a tenth": {metrics: []string{
		`sum(rate(sluice_grants_total{policy="api"}[20s])) < 3`, `max(sluice_paused{policy="api"}) == 0`,
	}},
	"Redis hangs for 44 s": isDown,
	"Redis goes on":        {metrics: []string{`min(sluice_redis_up) == 1`}},
	"a policy is removed, for which tasks wait": {metrics: []string{
		`max(sluice_waiting{policy="mail"}) > 0`, `min(sluice_policies_version) == max(sluice_policies_version)`,
	}},
	"a queue is paused": {
		[]string{`max(sluice_queue_waiting{queue="bulk"}) >= 50`, `min(sluice_queue_asked_seconds{queue="bulk"}) > 60`},
		[]string{`SluiceNoServer{job="workers", policy="api", queue="bulk"}`},
	},
	"the queue goes on":                      {metrics: []string{`(max(sluice_queue_waiting{queue="bulk"}) or vector(0)) == 0`}},
	"50,000 poison tasks of one tenant come": {metrics: []string{`max(sluice_waiting{policy="api"}) > 40000`, `max(sluice_starving_tenants) == 0`}},
	"they fail and come again": {
		[]string{`max(sluice_waiting{policy="api"}) > 40000`, `max(sluice_starving_tenants) == 0`},
		[]string{`SluiceBacklogStands{job="workers", policy="api"}`},
	},
	"they are dropped":               {metrics: []string{`max(sluice_waiting{policy="api"}) < 1000`}},
	"Redis is stopped for 5 minutes": isDown,
	"all is well":                    {metrics: []string{`min(sluice_redis_up) == 1`, `max(sluice_waiting) == 0`}},
}

// A recordedStep is a step as it was recorded.
type recordedStep struct {
	stepSigns
	name     string
	from, to time.Time
}

// steps returns the steps of a recording.
func (r recording) steps() (all []recordedStep) {
	for _, mark := range r {
		if step, ok := steps[mark.instance]; ok {
			if len(all) > 0 {
				all[len(all)-1].to = mark.at
			}
			all = append(all, recordedStep{step, mark.instance, mark.at, r[len(r)-1].at})
		}
	}
	return all
}

// alerts returns what has to fire.
func (r recording) alerts() (all []expected) {
	for _, step := range r.steps() {
		for _, alert := range step.alerts {
			all = append(all, expected{alert, step.from.Sub(r[0].at), step.to.Sub(r[0].at)})
		}
	}
	return all
}

// Metrics tell each step of the drill.
func TestMetricsTellTheDrill(t *testing.T) {
	t.Parallel()
	all := load(t, "testdata/drill.gz")
	data, recorded := all.store(t), all.steps()
	if len(recorded) != len(steps) {
		t.Errorf("%d steps are recorded, want %d", len(recorded), len(steps))
	}
	for _, step := range recorded {
		for _, expr := range step.metrics {
			holds := false
			for at := step.from; at.Before(step.to) && !holds; at = at.Add(5 * s) {
				holds = len(query(t, data, expr, at)) > 0
			}
			if !holds {
				t.Errorf("%s, but %s never holds", step.name, expr)
			}
		}
	}
}

// A program that cannot use what is published from its start on has an alert, though its counter never increases.
func TestPoliciesThatWereNeverUsableAreTold(t *testing.T) {
	t.Parallel()
	var all recording
	for at := time.Unix(1e9, 0); len(all) < 60; at = at.Add(15 * s) {
		all = append(all, scrape{at, "w", map[string]float64{"sluice_policies_unusable_total": 1, "sluice_policies_version": 0}})
	}
	if got := fired(t, rules(t), all); len(got) != 1 || !strings.HasPrefix(got[0].alert, "SluicePoliciesUnusable") {
		t.Error(got)
	}
}

// Each alert fires within two minutes when it is meant to, whenever Prometheus scrapes, and only then.
func TestAlertsFireWhenTheyAreMeantTo(t *testing.T) {
	t.Parallel()
	for scenario, want := range scenarios {
		all := load(t, "testdata/"+scenario+".gz")
		want = append(want, all.alerts()...)
		for _, phase := range []time.Duration{0, 5 * s, 10 * s} {
			t.Run(fmt.Sprint(scenario, "/", phase), func(t *testing.T) {
				t.Parallel()
				kept := all.every(15*s, phase)
				got := fired(t, rules(t), kept)
				for i := range got { // by the time since the first scrape of all
					got[i].from += kept[0].at.Sub(all[0].at)
					got[i].to += kept[0].at.Sub(all[0].at)
				}
				var text []string
				for _, f := range got {
					text = append(text, fmt.Sprintf("%s from %v to %v", f.alert, f.from, f.to))
				}
				ok := len(got) == len(want)
				for _, want := range want {
					found := false
					for _, f := range got {
						found = found || f.alert == want.alert && f.from > want.from && f.from <= want.from+2*minute &&
							(want.end == time.Hour || f.to > want.end && f.to <= want.end+150*s)
					}
					ok = ok && found
				}
				if !ok {
					t.Errorf("fired:\n%s\nwant %v", strings.Join(text, "\n"), want)
				}
			})
		}
	}
}
