package page

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle/inspect"
)

const (
	sampleEvery = 2 * time.Second
	watchEvery  = 10 * time.Second
	keepFor     = 30 * time.Minute
	gapAfter    = 30 * time.Second // without a sample a line is broken
)

// A sample is how a policy stood.
type sample struct {
	at      time.Time
	waiting int64
	oldest  time.Duration // that the oldest ticket has waited, of the tenants that are shown
}

// history keeps how policies stood in the last half hour, as far as somebody looked.
type history struct {
	mu      sync.Mutex
	samples map[string][]sample
}

// note notes how a policy stands, at most every 2 s.
func (h *history) note(s inspect.PolicyState, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	samples := h.samples[s.Policy]
	if n := len(samples); n > 0 && now.Sub(samples[n-1].at) < sampleEvery {
		return
	}
	for len(samples) > 0 && now.Sub(samples[0].at) > keepFor {
		samples = samples[1:]
	}
	oldest := time.Duration(0)
	for _, t := range s.Tenants {
		if !t.Oldest.IsZero() {
			oldest = max(oldest, s.At.Sub(t.Oldest))
		}
	}
	h.samples[s.Policy] = append(samples, sample{now, s.Waiting, oldest})
}

// Run notes how all policies stand every 10 s, until ctx ends. So the charts know the last half hour
// when somebody opens the page. Without it they know what was seen while somebody looked.
func (p *Page) Run(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		for _, policy := range p.config.Limiter.Policies() {
			// The page shows errors.
			_, _ = p.state(ctx, inspect.Query{Policy: policy.Name, Limit: tenantsAtOnce})
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// The size of a chart, in its own units.
const (
	chartWidth  = 600
	chartHeight = 80
)

// A chart is a line over the last half hour.
type chart struct {
	Title string
	Lines []string // points of a polyline, one for each stretch without a gap
	Most  string   // the value at its top
	Now   string
	Since string // how far back it goes
}

// charts returns those of a policy, or none if there is too little to show.
func (h *history) charts(policy string, now time.Time) []chart {
	h.mu.Lock()
	samples := slices.Clone(h.samples[policy])
	h.mu.Unlock()
	if len(samples) < 2 {
		return nil
	}
	waiting := func(s sample) float64 { return float64(s.waiting) }
	oldest := func(s sample) float64 { return s.oldest.Seconds() }
	tasks := func(v float64) string { return number(int64(v)) }
	wait := func(v float64) string { return long(time.Duration(v * float64(time.Second))) }
	return []chart{
		newChart("Waiting", samples, now, waiting, tasks),
		newChart("Longest wait so far", samples, now, oldest, wait),
	}
}

func newChart(
	title string, samples []sample, now time.Time,
	value func(sample) float64, text func(float64) string,
) chart {
	most := 0.0
	for _, s := range samples {
		most = max(most, value(s))
	}
	span := max(now.Sub(samples[0].at), time.Minute)
	last := value(samples[len(samples)-1])
	c := chart{Title: title, Most: text(most), Now: text(last), Since: long(now.Sub(samples[0].at))}
	var line strings.Builder
	for i, s := range samples {
		if i > 0 && s.at.Sub(samples[i-1].at) > gapAfter {
			c.Lines = append(c.Lines, line.String())
			line.Reset()
		}
		x := chartWidth * (1 - float64(now.Sub(s.at))/float64(span))
		y := float64(chartHeight)
		if most > 0 {
			y = 1 + (chartHeight-2)*(1-value(s)/most)
		}
		fmt.Fprintf(&line, "%.1f,%.1f ", x, y)
	}
	c.Lines = append(c.Lines, line.String())
	return c
}
