package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A scenario is one case, with redis-servers of its own, asynq's servers, and handlers that log
// outside of Redis when they start.
type scenario struct {
	name, about string
	run         runFunc
}

// A runFunc runs a scenario, and returns its figures.
type runFunc func(context.Context, scenarioOptions) []figure

type scenarioOptions struct {
	*cleanups
	full    bool
	rounds  int // of measurements that are compared; the median counts
	say     func(format string, args ...any)
	svg     string // directory for the curves; empty: they are not drawn
	waiting int    // tickets in the scenario "waiting"; 0 for its own number
}

// size returns a size for short runs or for full runs.
func (o scenarioOptions) size(short, full int) int {
	if o.full {
		return full
	}
	return short
}

// measure returns the figures, and the error that ended the scenario.
func (c scenario) measure(ctx context.Context, o scenarioOptions) (figures []figure, err error) {
	err = o.withCleanups(func(o scenarioOptions) { figures = c.run(ctx, o) })
	return figures, err
}

// A suite runs scenarios one after the other. Its report shows each figure with its bar.
type suite struct {
	scenarios []scenario
	options   scenarioOptions

	asJSON, force, list bool
	load                *float64 // average at the start; nil if this system does not tell
	only                string
}

// -json prints a suiteReport.
type suiteReport struct {
	LoadAverage *float64 `json:"load_average"` // at the start
	Full        bool     `json:"full"`
	Rounds      int      `json:"rounds"`
	Figures     []figure `json:"figures"`
}

// run prints the figures of the chosen cases even if one fails. It returns an error if a case
// fails, or if a figure misses its bar.
func (s *suite) run(ctx context.Context, stdout, stderr io.Writer) error {
	match, err := regexp.Compile(s.only)
	if err != nil {
		return &usageError{fmt.Errorf("-case: %w", err)}
	}
	chosen := slices.DeleteFunc(slices.Clone(s.scenarios), func(c scenario) bool { return !match.MatchString(c.name) })
	if len(chosen) == 0 {
		return &usageError{fmt.Errorf("-case %q: no case has such a name: see -list", s.only)}
	}
	if s.list {
		for _, c := range chosen {
			fmt.Fprintf(stdout, "%-16s %s\n", c.name, c.about)
		}
		return nil
	}
	if err := s.checkLoad(stderr); err != nil {
		return err
	}
	figures, failed := s.measure(ctx, chosen, stderr)
	if err := s.print(stdout, figures); err != nil {
		return err
	}
	missed := slices.DeleteFunc(slices.Clone(figures), func(f figure) bool { return !f.missed() })
	if len(missed) > 0 {
		failed = append(failed, fmt.Errorf("%d of %d figures miss their bars", len(missed), len(figures)))
	}
	return errors.Join(failed...)
}

func (s *suite) measure(ctx context.Context, chosen []scenario, stderr io.Writer) (figures []figure, failed []error) {
	begin := time.Now()
	for i, c := range chosen {
		o := s.options
		o.say = func(format string, args ...any) {
			at, text := time.Since(begin).Seconds(), fmt.Sprintf(format, args...)
			fmt.Fprintf(stderr, "%d/%d %s %4.0fs: %s\n", i+1, len(chosen), c.name, at, text)
		}
		o.say("%s", c.about)
		measured, err := c.measure(ctx, o)
		if ctx.Err() != nil {
			return figures, append(failed, fmt.Errorf("case %s: %w", c.name, ctx.Err()))
		}
		if err != nil {
			o.say("failed: %v", err)
			failed = append(failed, fmt.Errorf("case %s: %w", c.name, err))
		}
		for _, f := range measured {
			f.Case = c.name
			o.say("%s: %s  %s  %s", f.Name, f.measured(), f.bar(), f.verdict())
			figures = append(figures, f)
		}
	}
	return figures, failed
}

func (s *suite) print(w io.Writer, figures []figure) error {
	if !s.asJSON {
		return printFigures(w, figures)
	}
	return printJSON(w, suiteReport{s.load, s.options.full, s.options.rounds, figures})
}

// quiet is the highest load average of a machine that counts as idle.
const quiet = 0.5

// checkLoad reads the load average of the last minute, and refuses a machine that is busy.
func (s *suite) checkLoad(stderr io.Writer) error {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		fmt.Fprintln(stderr, "bench: load average: unknown:", err)
		return nil
	}
	first, _, _ := strings.Cut(string(text), " ")
	load, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return fmt.Errorf("/proc/loadavg: %w", err)
	}
	s.load = &load
	fmt.Fprintf(stderr, "bench: load average %.2f\n", load)
	if load > quiet && !s.force {
		return fmt.Errorf("load average %.2f is above %v: "+
			"wait until the machine is quiet, or measure all the same with -force", load, quiet)
	}
	return nil
}
