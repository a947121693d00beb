package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// A lineCase is one benchmark of the waiting line, with everything real: a redis-server of its
// own, asynq's servers, and handlers that log outside of Redis when they started.
type lineCase struct {
	name, about string
	run         func(context.Context, lineOptions) ([]figure, error)
}

type lineOptions struct {
	full    bool
	waiting int // in the case "waiting"; 0 for its own number
	servers int
	slots   int // of each server
	say     func(format string, args ...any)
}

// of picks a number by the length of the run.
func (o lineOptions) of(short, full int) int {
	if o.full {
		return full
	}
	return short
}

// A figure is one result, and the bar it has to clear, if it has one.
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

// line runs the cases one after the other, prints their figures beside their bars, and fails if
// one is missed.
func line(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("scripts/bench/run line", flag.ContinueOnError)
	flags.SetOutput(stderr)
	var o lineOptions
	var only string
	var asJSON, list bool
	flags.StringVar(&only, "case", "", "run only the cases whose names match this `regexp`")
	flags.BoolVar(&o.full, "full", false, "full sizes: about an hour in place of about six minutes")
	flags.BoolVar(&asJSON, "json", false, "print JSON instead of a table")
	flags.BoolVar(&list, "list", false, "list the cases")
	flags.IntVar(&o.servers, "servers", 2, "`number` of asynq servers, each with a limiter of its own")
	flags.IntVar(&o.slots, "slots", 16, "`tasks` that a server runs at once")
	flags.IntVar(&o.waiting, "waiting", 0, "`tickets` in the case waiting; 0 is its own number")
	if err := flags.Parse(args); err != nil {
		return &usageError{err}
	}
	match, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-case: %w", err)
	}
	if o.servers < 1 || o.slots < 1 || o.waiting < 0 || flags.NArg() > 0 {
		return errors.New("-servers and -slots must be at least 1, -waiting at least 0, and nothing may follow the flags")
	}
	cases := slices.DeleteFunc(lineCases(), func(c lineCase) bool { return !match.MatchString(c.name) })
	if len(cases) == 0 {
		return fmt.Errorf("-case %q: no case has such a name: see -list", only)
	}
	if list {
		for _, c := range cases {
			fmt.Fprintf(stdout, "%-16s %s\n", c.name, c.about)
		}
		return nil
	}
	begin := time.Now()
	var figures []figure
	for i, c := range cases {
		o.say = func(format string, args ...any) {
			fmt.Fprintf(stderr, "line %d/%d %s %4.0fs: %s\n", i+1, len(cases), c.name, time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
		}
		o.say("%s", c.about)
		of, err := c.run(ctx, o)
		if err != nil {
			return fmt.Errorf("case %s: %w", c.name, err)
		}
		for j := range of {
			of[j].Case = c.name
		}
		figures = append(figures, of...)
	}
	if err := printFigures(stdout, figures, asJSON); err != nil {
		return err
	}
	missed := slices.DeleteFunc(slices.Clone(figures), func(f figure) bool { return !f.missed() })
	if len(missed) > 0 {
		return fmt.Errorf("%d of %d figures miss their bars", len(missed), len(figures))
	}
	return nil
}

func printFigures(w io.Writer, figures []figure, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(figures)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "case\tfigure\tmeasured\tbar\t")
	last := ""
	for _, f := range figures {
		name, verdict := f.Case, ""
		if name == last {
			name = ""
		}
		last = f.Case
		if f.missed() {
			verdict = "MISSED"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", name, f.Name, strings.TrimSpace(fmt.Sprintf("%.4g %s", f.Value, f.Unit)), f.bar(), verdict)
	}
	return t.Flush()
}

// quantile is the value below which that part of the values lies; 0 of none.
func quantile[T cmp.Ordered](values []T, q float64) T {
	var zero T
	if len(values) == 0 {
		return zero
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
