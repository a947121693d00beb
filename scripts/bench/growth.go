package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"text/tabwriter"
)

// growth measures and draws how costs grow.
func growth(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("scripts/bench/run growth", flag.ContinueOnError)
	flags.SetOutput(stderr)
	var o scenarioOptions
	var load loadCheck
	only := flags.String("case", "", "measure only the curves whose names match this `regexp`")
	dir := flags.String("svg", "", "write each curve as an SVG into this `directory`")
	asJSON := flags.Bool("json", false, "print JSON instead of a table")
	flags.BoolVar(&o.full, "full", false, "full sizes: some ten minutes in place of one or two")
	flags.IntVar(&o.rounds, "rounds", 3, "`measurements` of each point; the median counts")
	load.flag(flags)
	if err := flags.Parse(args); err != nil {
		return &usageError{err}
	}
	match, err := regexp.Compile(*only)
	if err != nil {
		return wrongUsage(stderr, "-case: %w", err)
	}
	if o.rounds < 1 || flags.NArg() > 0 {
		return wrongUsage(stderr, "-rounds must be at least 1, and nothing may follow the flags")
	}
	if err := load.check(ctx, stderr); err != nil {
		return err
	}
	var curves []curve
	var failed []error
	for _, g := range growths() {
		if !match.MatchString(g.curve.Name) {
			continue
		}
		o.say = func(format string, args ...any) {
			fmt.Fprintf(stderr, "growth %s: %s\n", g.curve.Name, fmt.Sprintf(format, args...))
		}
		o.say("%s", g.curve.Title)
		c := g.curve
		if err := o.apart(func(o scenarioOptions) { c.Points = g.measure(ctx, o) }); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", c.Name, err))
			continue
		}
		curves = append(curves, c)
	}
	if len(curves) == 0 && failed == nil {
		return wrongUsage(stderr, "-case %q: no curve has such a name", *only)
	}
	if *dir != "" {
		for _, c := range curves {
			failed = append(failed, drawInto(*dir, c))
		}
	}
	return errors.Join(append(failed, printCurves(stdout, curves, *asJSON))...)
}

func drawInto(dir string, c curve) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	file, err := os.Create(filepath.Join(dir, c.Name+".svg"))
	if err != nil {
		return err
	}
	return errors.Join(c.svg(file), file.Close())
}

func printCurves(w io.Writer, curves []curve, asJSON bool) error {
	if asJSON {
		return printJSON(w, curves)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "curve\tx\ty\t")
	for _, c := range curves {
		fmt.Fprintf(t, "%s\t%s\t%s\t\n", c.Name, c.X, c.Y)
		for _, p := range c.Points {
			fmt.Fprintf(t, "\t%s\t%s\t\n", shortNumber(p.X), shortNumber(p.Y))
		}
	}
	return t.Flush()
}
