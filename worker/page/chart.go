package page

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/usage"
)

// A span is a time of which charts are shown.
type span struct {
	Name   string
	Length time.Duration
}

var spans = []span{{"30m", 30 * time.Minute}, {"6h", 6 * time.Hour}, {"24h", 24 * time.Hour}}

// Run records how many tasks wait, every 10 s until ctx ends. Processes with a usage.Counter record that, too, with
// what they grant.
func (p *Page) Run(ctx context.Context) {
	defer usage.New().Start(p.config.Limiter)()
	<-ctx.Done()
}

// points asks for the history of policies, from `back` ago on: a point each minute, the last of which is under way.
func (p *Page) points(ctx context.Context, policies []string, back time.Duration) map[string][]usage.Point {
	key := fmt.Sprint("history", back, policies)
	points, _ := cached(ctx, &p.limiterAnswers, key, func(ctx context.Context) (map[string][]usage.Point, error) {
		return usage.History(ctx, p.config.Limiter, policies, time.Now().Add(-back))
	})
	return points
}

// sparkOf returns the points of a small chart of the grants of the last 30 whole minutes, as SVG has them:
// "x,y x,y ...". It is 100 wide and 30 high.
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
	for i, p := range points { // the line is 2 to 30 below the top
		fmt.Fprintf(&line, "%.1f,%.1f ", 100*float64(i)/float64(len(points)-1), 2+28*(1-float64(p.Granted)/float64(most)))
	}
	return line.String()
}

// The size of a chart, in its own units.
const (
	chartWidth  = 600
	chartHeight = 100
)

// charts are the charts of a policy. They share a time axis.
type charts struct {
	All    []chart
	Span   string   // the name of one of spans
	Step   string   // how long a point is
	Clocks []string // of the time axis
	Table  []row    // the newest first
}

// A chart is drawn as a "line", a line with the "area" below it, or "bars".
type chart struct {
	Kind             string
	Title, Now, Note string
	Text             string   // of the whole chart, for those who do not see it
	Ticks            []string // of the value axis, from its top
	Drawn            string   // in SVG the points of the line, or the path of the bars
}

// A row is a point in the table.
type row struct {
	At               time.Time
	PerSecond        string // granted
	Refused, Waiting int64
}

// chartsOf draws points, and returns nil if there is nothing to draw.
func chartsOf(points []usage.Point, span string, pv policyView) *charts {
	steps, step := joined(points[:max(0, len(points)-1)])
	known := slices.ContainsFunc(steps, func(p usage.Point) bool { return p.Known })
	if !known || len(steps) < 2 {
		return nil
	}
	c := &charts{Span: span, Step: words.Span(step)}
	for i := range 4 {
		at := steps[0].At.Add(time.Duration(i) * time.Duration(len(steps)) * step / 3)
		c.Clocks = append(c.Clocks, at.UTC().Format("15:04"))
	}
	granted := func(p usage.Point) float64 { return float64(p.Granted) / step.Seconds() }
	waiting := func(p usage.Point) float64 { return float64(p.Waiting) }
	refused := func(p usage.Point) float64 { return float64(p.Refused) }
	allRefused := int64(0)
	for _, p := range slices.Backward(steps) {
		c.Table = append(c.Table, row{p.At, rounded(granted(p)), p.Refused, p.Waiting})
		allRefused += p.Refused
	}
	c.All = []chart{
		newChart("line", "Granted per second", c.Table[0].PerSecond+" lately", steps, granted),
		newChart("area", "Waiting", number(pv.Waiting)+" now", steps, waiting),
		newChart("bars", "Refusals by the upstream", number(allRefused), steps, refused),
	}
	return c
}

// joined joins minutes to points of equally many minutes, fewer than 120, and returns how long such a point is. Minutes
// at the end that are too few for a point are left out.
func joined(points []usage.Point) (steps []usage.Point, step time.Duration) {
	minutes := max(1, len(points)/60)
	for ; len(points) >= minutes; points = points[minutes:] {
		sum := usage.Point{At: points[0].At}
		for _, p := range points[:minutes] {
			sum.Granted += p.Granted
			sum.Refused += p.Refused
			sum.Waiting = max(sum.Waiting, p.Waiting)
			sum.Known = sum.Known || p.Known
		}
		steps = append(steps, sum)
	}
	return steps, time.Duration(minutes) * usage.Step
}

func newChart(kind, title, now string, steps []usage.Point, value func(usage.Point) float64) chart {
	most := 0.0
	for _, p := range steps {
		most = max(most, value(p))
	}
	top := axisTop(most)
	c := chart{Kind: kind, Title: title, Now: now, Note: "at most " + rounded(most)}
	c.Text = fmt.Sprintf("%s, %s to %s UTC: %s", title, steps[0].At.UTC().Format("15:04"),
		steps[len(steps)-1].At.UTC().Format("15:04"), c.Note)
	c.Ticks = []string{rounded(top), rounded(top / 2), "0"}
	if kind == "bars" {
		c.Note, c.Ticks = "", []string{rounded(top), "0"}
	}
	width := float64(chartWidth) / float64(len(steps)-1)
	var drawn strings.Builder
	for i, p := range steps {
		x, y := float64(i)*width, chartHeight*(1-value(p)/top)
		if kind != "bars" {
			fmt.Fprintf(&drawn, "%.0f,%.1f ", x, y)
		} else if height := chartHeight - y; value(p) > 0 { // 0.98 leaves room for most of the last bar
			fmt.Fprintf(&drawn, "M%.0f %dv-%.1fh%.1fv%.1fz", x*0.98, chartHeight, height, width*0.7, height)
		}
	}
	c.Drawn = drawn.String()
	return c
}

// axisTop returns the round number that is the top of an axis for values up to most: ..., 0.6, 1, 2, 4, 6, 10, 20, ...
func axisTop(most float64) float64 {
	if most <= 0 {
		return 1
	}
	for unit := math.Pow(10, math.Floor(math.Log10(most))); ; unit *= 10 {
		for _, n := range []float64{1, 2, 4, 6, 10} {
			if n*unit >= most {
				return n * unit
			}
		}
	}
}

// rounded writes a number with at most two digits that count, or from 10 on as a whole number.
func rounded(v float64) string {
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
	emptyIn := w.ResetsAt.Sub(at)
	switch {
	case w.Remaining > 0:
		return "free now"
	case w.RetryIn > 0:
		return "next free in " + words.Span(max(w.RetryIn, time.Millisecond))
	case emptyIn > 0:
		return "empty in " + words.Span(emptyIn)
	}
	return "full"
}
