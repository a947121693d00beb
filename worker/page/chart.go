package page

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/usage"
)

// Spans of the charts.
var spans = []struct {
	Name   string
	Length time.Duration
}{{"30m", 30 * time.Minute}, {"6h", 6 * time.Hour}, {"24h", 24 * time.Hour}}

// Run records how many tasks wait, every 10 s until ctx ends. Processes with a usage.Counter record that, too, with
// what they grant.
func (p *Page) Run(ctx context.Context) {
	defer usage.New().Start(p.config.Limiter)()
	<-ctx.Done()
}

// points returns the history of policies, from `back` ago on.
func (p *Page) points(ctx context.Context, policies []string, back time.Duration) map[string][]usage.Point {
	key := fmt.Sprint("history", back, policies)
	points, _ := remember(&p.recent, ctx, key, func(ctx context.Context) (map[string][]usage.Point, error) {
		return usage.History(ctx, p.config.Limiter, policies, time.Now().Add(-back))
	})
	return points
}

const sparkHeight = 30

// sparkOf returns the line of a small chart of the grants of the last half hour.
func sparkOf(points []usage.Point) string {
	points = points[max(0, len(points)-31):max(0, len(points)-1)] // the last minute is under way
	most := int64(0)
	for _, p := range points {
		most = max(most, p.Granted)
	}
	if most == 0 {
		return ""
	}
	var line strings.Builder
	for i, p := range points {
		fmt.Fprintf(&line, "%.1f,%.1f ", 100*float64(i)/float64(len(points)-1),
			2+(sparkHeight-2)*(1-float64(p.Granted)/float64(most)))
	}
	return line.String()
}

// The size of a chart, in its own units.
const (
	chartWidth  = 600
	chartHeight = 100
)

// A chart is one of a policy's charts, which share a time axis.
type chart struct {
	Title, Now, Note, Text string
	Bars, Line, Area       string
	Ticks                  []string // of the axis, from its top
	Low                    bool
}

// charts are the charts of a policy.
type charts struct {
	All    []chart
	Span   string
	Step   string
	Clocks []string // of the time axis
	Table  []row
}

// A row is a point in the table.
type row struct {
	At                        time.Time
	PerSecond                 string
	Granted, Refused, Waiting int64
}

// chartsOf draws points, and returns nil if there is nothing to draw.
func chartsOf(points []usage.Point, span string, pv policyView) *charts {
	points = points[:max(0, len(points)-1)]
	group := max(1, len(points)/60) // minutes a point
	var steps []usage.Point
	known := false
	for i := 0; i+group <= len(points); i += group {
		sum := usage.Point{At: points[i].At}
		for _, p := range points[i : i+group] {
			sum.Granted += p.Granted
			sum.Refused += p.Refused
			sum.Waiting = max(sum.Waiting, p.Waiting)
			known = known || p.Known
		}
		steps = append(steps, sum)
	}
	if !known || len(steps) < 2 {
		return nil
	}
	step := time.Duration(group) * usage.Step
	c := &charts{Span: span, Step: words.Span(step)}
	for i := range 4 {
		at := steps[0].At.Add(time.Duration(i) * time.Duration(len(steps)) * step / 3)
		c.Clocks = append(c.Clocks, at.UTC().Format("15:04"))
	}
	granted := func(p usage.Point) float64 { return float64(p.Granted) / step.Seconds() }
	waiting := func(p usage.Point) float64 { return float64(p.Waiting) }
	refused := func(p usage.Point) float64 { return float64(p.Refused) }
	last := steps[len(steps)-1]
	c.All = []chart{
		newChart("Granted per second", perSecond(granted(last))+" lately", steps, granted, ""),
		newChart("Waiting", number(pv.Waiting)+" now", steps, waiting, "area"),
		newChart("Refusals by the upstream", "", steps, refused, "bars"),
	}
	for i := len(steps) - 1; i >= 0; i-- {
		p := steps[i]
		c.Table = append(c.Table, row{p.At, perSecond(granted(p)), p.Granted, p.Refused, p.Waiting})
	}
	return c
}

func newChart(title, now string, steps []usage.Point, value func(usage.Point) float64, kind string) chart {
	most, sum := 0.0, 0.0
	for _, p := range steps {
		most, sum = max(most, value(p)), sum+value(p)
	}
	top := nice(most)
	c := chart{Title: title, Now: now, Note: "at most " + perSecond(most), Ticks: []string{perSecond(top), perSecond(top / 2), "0"}}
	c.Text = fmt.Sprintf("%s, %s to %s UTC: %s", title, steps[0].At.UTC().Format("15:04"),
		steps[len(steps)-1].At.UTC().Format("15:04"), c.Note)
	var line strings.Builder
	width := float64(chartWidth) / float64(len(steps)-1)
	for i, p := range steps {
		x, y := float64(i)*width, chartHeight*(1-value(p)/top)
		if kind == "bars" {
			if value(p) > 0 {
				fmt.Fprintf(&line, "M%.0f %dv-%.1fh%.1fv%.1fz", x*0.98, chartHeight, chartHeight-y, width*0.7, chartHeight-y)
			}
			continue
		}
		fmt.Fprintf(&line, "%.0f,%.1f ", x, y)
	}
	switch kind {
	case "bars":
		c.Bars, c.Low, c.Ticks, c.Now, c.Note = line.String(), true, []string{c.Ticks[0], "0"}, number(int64(sum)), ""
	case "area":
		c.Area = fmt.Sprintf("0,%d %s%d,%d", chartHeight, line.String(), chartWidth, chartHeight)
		fallthrough
	default:
		c.Line = line.String()
	}
	return c
}

// nice returns a round number that is v or the next above it.
func nice(v float64) float64 {
	if v <= 0 {
		return 1
	}
	for unit := math.Pow(10, math.Floor(math.Log10(v))); ; unit *= 10 {
		for _, n := range []float64{1, 2, 4, 6, 10} {
			if n*unit >= v {
				return n * unit
			}
		}
	}
}

// perSecond writes a rate.
func perSecond(v float64) string {
	switch {
	case v >= 100:
		return number(int64(math.Round(v)))
	case v >= 9.95:
		return fmt.Sprintf("%.0f", v)
	case v == 0:
		return "0"
	}
	return fmt.Sprintf("%.2g", v)
}

// window describes in words how full a window is.
func window(w throttle.WindowState) string {
	text := fmt.Sprintf("%s of %s", number(w.Used), number(w.Burst))
	if w.Unit != throttle.Requests {
		text += " " + w.Unit
	}
	if w.Period > 0 {
		text += " in " + words.Span(w.Period)
	}
	return text
}

// free describes when a window has room again.
func free(w throttle.WindowState, at time.Time) string {
	empty := w.ResetsAt.Sub(at)
	switch {
	case w.Remaining > 0:
		return "free now"
	case w.RetryIn > 0:
		return "next free in " + words.Span(max(w.RetryIn, time.Millisecond))
	case empty > 0:
		return "empty in " + words.Span(empty)
	}
	return "full"
}
