package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// A figure is one result. It may have a bar to clear.
type figure struct {
	Case    string   `json:"case"`
	Name    string   `json:"name"`
	Value   float64  `json:"value"`
	Unit    string   `json:"unit,omitempty"`
	AtMost  *float64 `json:"at_most,omitempty"`
	AtLeast *float64 `json:"at_least,omitempty"`
}

func (f figure) missed() bool {
	// A NaN clears no bar.
	return f.AtMost != nil && !(f.Value <= *f.AtMost) || f.AtLeast != nil && !(f.Value >= *f.AtLeast)
}

func (f figure) bar() string {
	switch {
	case f.AtMost != nil:
		return fmt.Sprintf("<= %.4g", *f.AtMost)
	case f.AtLeast != nil:
		return fmt.Sprintf(">= %.4g", *f.AtLeast)
	}
	return ""
}

func (f figure) measured() string {
	return strings.TrimSpace(fmt.Sprintf("%.4g %s", f.Value, f.Unit))
}

func (f figure) verdict() string {
	if f.missed() {
		return "MISSED"
	}
	return ""
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func printFigures(w io.Writer, figures []figure) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "case\tfigure\tmeasured\tbar\t")
	last := ""
	for _, f := range figures {
		name := f.Case
		if name == last {
			name = ""
		}
		last = f.Case
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", name, f.Name, f.measured(), f.bar(), f.verdict())
	}
	return t.Flush()
}

// medians runs all rounds of a measurement, and returns the median of each figure, in the order of
// their first appearance.
func medians(rounds int, measure func(round int) []figure) []figure {
	var all []figure
	values := map[string][]float64{}
	for round := range rounds {
		for _, f := range measure(round) {
			if _, known := values[f.Name]; !known {
				all = append(all, f)
			}
			values[f.Name] = append(values[f.Name], f.Value)
		}
	}
	for i := range all {
		all[i].Value = median(values[all[i].Name])
	}
	return all
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// quantile returns the value below which that part of the values lies, and 0 without values.
func quantile[T cmp.Ordered](values []T, q float64) T {
	var zero T
	if len(values) == 0 {
		return zero
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
