// Package alerts evaluates the alert rules of docs/howto/metrics/alerts.yml on what was scraped from
// real outages. It is a module of its own, so that no other one needs Prometheus.
package alerts

import (
	"bufio"
	"compress/gzip"
	"context"
	"log/slog"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

const rulesFile = "../../docs/howto/metrics/alerts.yml"

var language = parser.NewParser(parser.Options{})

// rules returns the rules that users get.
func rules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(rulesFile, false, model.UTF8Validation, language, slog.New(slog.DiscardHandler))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	return groups.Groups[0].Rules
}

// got returns the value of a call, and ends the test if the call failed.
func got[V any](v V, err error) func(*testing.T) V {
	return func(t *testing.T) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// A scrape is what one process answered, or nothing if it did not. A step's name as instance marks the step's begin.
type scrape struct {
	at       time.Time
	instance string
	series   map[string]float64 // by `name{labels}`
}

// A recording is all scrapes of a scenario, in order.
type recording []scrape

func load(t *testing.T, path string) (r recording) {
	t.Helper()
	f := got(os.Open(path))(t)
	defer f.Close()
	for lines := bufio.NewScanner(got(gzip.NewReader(f))(t)); lines.Scan(); {
		line := lines.Text()
		if stamp, ok := strings.CutPrefix(line, "> "); ok {
			at, instance, _ := strings.Cut(stamp, " ")
			ms, _ := strconv.ParseInt(at, 10, 64)
			r = append(r, scrape{time.UnixMilli(ms), instance, map[string]float64{}})
			continue
		}
		i := strings.LastIndex(line, " ")
		r[len(r)-1].series[line[:i]] = got(strconv.ParseFloat(line[i+1:], 64))(t)
	}
	return r
}

// every keeps the scrapes that come at an interval in each process, from a phase on.
func (r recording) every(interval, phase time.Duration) (kept recording) {
	next := map[string]time.Time{}
	for _, s := range r {
		due, ok := next[s.instance]
		if !ok {
			due = r[0].at.Add(phase)
		}
		if !s.at.Before(due) {
			kept = append(kept, s)
			for !s.at.Before(due) {
				due = due.Add(interval)
			}
		}
		next[s.instance] = due
	}
	return kept
}

// A floatSample is a chunks.Sample of a number.
type floatSample struct {
	t int64
	v float64
}

func (f floatSample) T() int64                      { return f.t }
func (f floatSample) ST() int64                     { return 0 }
func (f floatSample) F() float64                    { return f.v }
func (f floatSample) H() *histogram.Histogram       { return nil }
func (f floatSample) FH() *histogram.FloatHistogram { return nil }
func (f floatSample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (f floatSample) Copy() chunks.Sample           { return f }

// A store keeps the series of a recording as Prometheus would.
type store map[string]*stored

type stored struct {
	labels  labels.Labels
	samples []chunks.Sample
}

func (r recording) store(t *testing.T) store {
	t.Helper()
	all, previous := store{}, map[string]map[string]float64{} // by instance: its previous scrape
	for _, s := range r {
		add := func(name string, v float64) {
			key := name + " " + s.instance
			if all[key] == nil {
				b := labels.NewBuilder(got(language.ParseMetric(name))(t))
				b.Set("instance", s.instance)
				b.Set("job", "workers")
				all[key] = &stored{labels: b.Labels()}
			}
			all[key].samples = append(all[key].samples, floatSample{s.at.UnixMilli(), v})
		}
		for name, v := range s.series {
			add(name, v)
		}
		for name := range previous[s.instance] {
			if _, still := s.series[name]; !still {
				add(name, math.Float64frombits(value.StaleNaN))
			}
		}
		previous[s.instance] = s.series
	}
	return all
}

// Querier is for the engine.
func (s store) Querier(int64, int64) (storage.Querier, error) {
	return &storage.MockQuerier{SelectMockFunction: func(_ bool, _ *storage.SelectHints, ms ...*labels.Matcher) storage.SeriesSet {
		found := &seriesSet{}
		for _, one := range s {
			if !slices.ContainsFunc(ms, func(m *labels.Matcher) bool { return !m.Matches(one.labels.Get(m.Name)) }) {
				found.all = append(found.all, storage.NewListSeries(one.labels, one.samples))
			}
		}
		return found
	}}, nil
}

type seriesSet struct { // a storage.SeriesSet
	all  []storage.Series
	next int
}

func (s *seriesSet) Next() bool                        { s.next++; return s.next <= len(s.all) }
func (s *seriesSet) At() storage.Series                { return s.all[s.next-1] }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }

// A firing is an alert, from when it fired until it no longer did.
type firing struct {
	alert    string // with its labels
	from, to time.Duration
}

// fired evaluates the rules every 15 s, and returns what fired, in order, by the time since the start.
func fired(t *testing.T, rules []rulefmt.Rule, r recording) (all []firing) {
	t.Helper()
	data := r.store(t)
	begun := r[0].at
	for _, rule := range rules {
		pending, open := map[string]time.Time{}, map[string]int{}
		for at := begun; at.Before(r[len(r)-1].at); at = at.Add(15 * time.Second) {
			active := map[string]bool{}
			for _, sample := range query(t, data, rule.Expr, at) {
				name := rule.Alert + sample.Metric.String()
				active[name] = true
				if pending[name].IsZero() {
					pending[name] = at
				}
				if _, fires := open[name]; !fires && at.Sub(pending[name]) >= time.Duration(rule.For) {
					open[name] = len(all)
					all = append(all, firing{alert: name, from: at.Sub(begun), to: 24 * time.Hour})
				}
			}
			for name := range pending {
				if !active[name] {
					if i, fires := open[name]; fires {
						all[i].to = at.Sub(begun)
					}
					delete(pending, name)
					delete(open, name)
				}
			}
		}
	}
	return all
}

var engine = sync.OnceValue(func() *promql.Engine {
	return promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: time.Minute, Parser: language})
})

// query evaluates an expression at a time.
func query(t *testing.T, data store, expr string, at time.Time) promql.Vector {
	t.Helper()
	q := got(engine().NewInstantQuery(context.Background(), data, nil, expr, at))(t)
	defer q.Close()
	return slices.Clone(got(q.Exec(context.Background()).Vector())(t))
}
