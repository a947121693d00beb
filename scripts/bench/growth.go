package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
)

// growth measures and draws how costs grow.
func growth(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var curves []curve
	s := suite{name: "growth"}
	for _, g := range growths() {
		run := func(ctx context.Context, o scenarioOptions) []figure {
			c := g.curve
			c.Points = g.measure(ctx, o)
			curves = append(curves, c)
			return c.figures()
		}
		s.scenarios = append(s.scenarios, scenario{g.curve.Name, g.curve.Title, run})
	}
	flags := s.flags(stderr, "some ten minutes in place of one or two")
	dir := flags.String("svg", "", "write each curve as an SVG into this `directory`")
	flags.IntVar(&s.options.rounds, "rounds", 3, "`measurements` of each point; the median counts")
	if err := flags.Parse(args); err != nil {
		return &usageError{err}
	}
	if s.options.rounds < 1 || flags.NArg() > 0 {
		return wrongUsage(stderr, "-rounds must be at least 1, and nothing may follow the flags")
	}
	err := s.run(ctx, stdout, stderr)
	if *dir != "" {
		for _, c := range curves {
			err = errors.Join(err, drawInto(*dir, c))
		}
	}
	return err
}

// figures are the points of the curve.
func (c curve) figures() []figure {
	figures := make([]figure, len(c.Points))
	for i, p := range c.Points {
		figures[i] = figure{Name: shortNumber(p.X) + " " + c.X, Value: p.Y, Unit: "(" + c.Y + ")"}
	}
	return figures
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
