package promthrottle_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/promthrottle"
)

var described = regexp.MustCompile(`fqName: "([^"]+)", help: "[^"]+",.* constLabels: \{\}, variableLabels: \{([^}]*)\}`)

// exported returns the metrics with their labels.
func exported(m *promthrottle.Metrics) map[string][]string {
	ch := make(chan *prometheus.Desc, 100)
	m.Describe(ch)
	close(ch)
	found := map[string][]string{}
	for desc := range ch {
		if d := described.FindStringSubmatch(desc.String()); d != nil {
			found[d[1]] = strings.Split(d[2], ",")
		}
	}
	return found
}

var (
	used     = regexp.MustCompile(`\b(sluice_[a-z_]+)(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`([a-z_]+) *(?:=~|!=|=|!~)`)
	grouping = regexp.MustCompile(`\b(?:by|without) *\(([^)]*)\)`)
	suffix   = regexp.MustCompile(`_(?:bucket|count|sum)$`)
)

// The page, the dashboard and the alert rules name only what is exported, and the page names all.
func TestDocsNameWhatIsExported(t *testing.T) {
	m, _ := metrics(t)
	all := exported(m)
	expect.Require(t, len(all) >= 15, len(all), "metrics: is the test looking in the wrong place?")
	labels := []string{"job", "le"} // Prometheus adds the job
	for _, names := range all {
		labels = append(labels, names...)
	}
	for name, leaveOut := range map[string]int{"metrics.md": 0, "metrics/alerts.yml": 12, "metrics/dashboard.json": 16} {
		text := expect.Got(os.ReadFile("../../docs/howto/" + name))(t)
		named := map[string]bool{}
		for _, use := range used.FindAllStringSubmatch(strings.ReplaceAll(string(text), `\"`, `"`), -1) {
			metric := use[1]
			if all[metric] == nil {
				metric = suffix.ReplaceAllString(metric, "")
			}
			names, ok := all[metric]
			expect.That(t, ok, name, "there is no metric", use[1])
			named[metric] = true
			for _, label := range matcher.FindAllStringSubmatch(use[2], -1) {
				expect.That(t, slices.Contains(names, label[1]) || label[1] == "le",
					name, metric, "has no label", label[1])
			}
		}
		for _, group := range grouping.FindAllStringSubmatch(string(text), -1) {
			for label := range strings.SplitSeq(group[1], ",") {
				label = strings.TrimSpace(label)
				expect.That(t, label == "" || slices.Contains(labels, label), name, "no metric has a label", label)
			}
		}
		for metric := range all {
			expect.That(t, leaveOut != 0 || named[metric], name, "does not name", metric)
		}
		expect.That(t, len(named)+leaveOut >= len(all), name, "names", len(named), len(all), "metrics")
	}
}
