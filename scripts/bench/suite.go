package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sync"
	"time"
)

// A scenario is one benchmark with redis-servers of its own, asynq's servers, and handlers that log
// outside of Redis when they start.
type scenario struct {
	name, about string
	run         runFunc
}

// A runFunc runs a scenario, and returns its figures.
type runFunc func(context.Context, scenarioOptions) []figure

type scenarioOptions struct {
	*endings
	full    bool
	rounds  int // of measurements that are compared; the median counts
	waiting int // tickets in the scenario "waiting"; 0 for its own number
	servers int // of asynq, in the line's scenarios
	slots   int // of each of these servers
	say     func(format string, args ...any)
}

// of returns a size for short runs or full ones.
func (o scenarioOptions) of(short, full int) int {
	if o.full {
		return full
	}
	return short
}

// measure returns the figures, and the error that ended the scenario.
func (c scenario) measure(ctx context.Context, o scenarioOptions) (figures []figure, err error) {
	err = o.apart(func(o scenarioOptions) { figures = c.run(ctx, o) })
	return figures, err
}

// A suite runs scenarios one after the other, or together. Its report shows each figure with its bar.
type suite struct {
	name      string
	scenarios []scenario
	options   scenarioOptions

	asJSON, list bool
	together     bool // all scenarios run at the same time
	load         loadCheck
	only         string
}

// A suiteReport is what -json prints.
type suiteReport struct {
	Benchmark   string   `json:"benchmark"`
	LoadAverage *float64 `json:"load_average"` // at the start
	Full        bool     `json:"full"`
	Rounds      int      `json:"rounds,omitempty"`
	Figures     []figure `json:"figures"`
}

// flags returns the flags that all suites have.
func (s *suite) flags(stderr io.Writer, full string) *flag.FlagSet {
	flags := flag.NewFlagSet("scripts/bench/run "+s.name, flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&s.only, "case", "", "run only the cases whose names match this `regexp`")
	flags.BoolVar(&s.options.full, "full", false, "full sizes: "+full)
	flags.BoolVar(&s.asJSON, "json", false, "print JSON instead of a table")
	flags.BoolVar(&s.list, "list", false, "list the cases")
	s.load.flag(flags)
	return flags
}

// run prints the figures of the chosen cases even if one fails. It returns an error if a case
// fails, or if a figure misses its bar.
func (s *suite) run(ctx context.Context, stdout, stderr io.Writer) error {
	match, err := regexp.Compile(s.only)
	if err != nil {
		return wrongUsage(stderr, "-case: %w", err)
	}
	chosen := slices.DeleteFunc(slices.Clone(s.scenarios), func(c scenario) bool { return !match.MatchString(c.name) })
	if len(chosen) == 0 {
		return wrongUsage(stderr, "-case %q: no case has such a name: see -list", s.only)
	}
	if s.list {
		for _, c := range chosen {
			fmt.Fprintf(stdout, "%-16s %s\n", c.name, c.about)
		}
		return nil
	}
	if err := s.load.check(ctx, stderr); err != nil {
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
	results := s.begin(ctx, chosen)
	for i, c := range chosen {
		o := s.options
		o.say = func(format string, args ...any) {
			at, text := time.Since(begin).Seconds(), fmt.Sprintf(format, args...)
			fmt.Fprintf(stderr, "%s %d/%d %s %4.0fs: %s\n", s.name, i+1, len(chosen), c.name, at, text)
		}
		o.say("%s", c.about)
		of, err := results[i](o)
		if ctx.Err() != nil {
			return figures, append(failed, fmt.Errorf("case %s: %w", c.name, ctx.Err()))
		}
		if err != nil {
			o.say("failed: %v", err)
			failed = append(failed, fmt.Errorf("case %s: %w", c.name, err))
		}
		for _, f := range of {
			f.Case = c.name
			o.say("%s: %s  %s  %s", f.Name, f.measured(), f.bar(), f.verdict())
			figures = append(figures, f)
		}
	}
	return figures, failed
}

// begin starts the scenarios that run together, and returns a function for each that waits for its
// figures.
func (s *suite) begin(ctx context.Context, chosen []scenario) []func(scenarioOptions) ([]figure, error) {
	results := make([]func(scenarioOptions) ([]figure, error), len(chosen))
	for i, c := range chosen {
		results[i] = func(o scenarioOptions) ([]figure, error) { return c.measure(ctx, o) }
		if !s.together {
			continue
		}
		measured := sync.OnceValues(func() ([]figure, error) { return c.measure(ctx, s.options) })
		go measured()
		results[i] = func(scenarioOptions) ([]figure, error) { return measured() }
	}
	return results
}

func (s *suite) print(w io.Writer, figures []figure) error {
	if !s.asJSON {
		return printFigures(w, figures)
	}
	return printJSON(w, suiteReport{s.name, s.load.found, s.options.full, s.options.rounds, figures})
}
