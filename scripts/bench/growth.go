package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// A grower measures the points of a curve.
type grower struct {
	curve   curve
	measure func(context.Context, scenarioOptions) []point
}

// run measures the curve, and draws it if that is asked for.
func (g grower) run(ctx context.Context, o scenarioOptions) []figure {
	c := g.curve
	c.Points = g.measure(ctx, o)
	if o.svg != "" {
		check(drawInto(o.svg, c))
	}
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

func growths() []grower {
	return []grower{
		{curve{
			Name: "windows", Title: "One decision, by the number of windows",
			X: "windows in one scope", Y: "Redis CPU, beside one window",
		}, growWindows},
		{curve{
			Name: "limit", Title: "One decision at a full sliding window, by its limit",
			X: "limit", Y: "Redis CPU, beside a limit of 20",
		}, growLimit},
		{curve{
			Name: "tenants", Title: "One decision of two windows, by the number of tenants",
			X: "tenants", Y: "Redis CPU, beside one tenant",
		}, growTenants},
		{curve{
			Name: "waiting", Title: "Joining a line, by its length",
			X: "tasks that wait", Y: "Redis CPU, beside a line of 100",
		}, growWaiting},
		{curve{
			Name: "servers", Title: "A line of 500 per second, by the number of servers",
			X: "servers", Y: "takes a second, of all together",
		}, growServers},
	}
}

// inRounds measures sides in turn, and returns the Redis CPU of each as a ratio to the first side's.
func (s *testbed) inRounds(ctx context.Context, xs []int, sides []func() int) []point {
	figures := medians(s.o.rounds, func(round int) []figure {
		costs := s.inTurns(ctx, sides...)
		s.o.say("round %d of %d: %v: %v", round+1, s.o.rounds, xs, costs)
		var all []figure
		for i, x := range xs {
			all = append(all, figure{Name: strconv.Itoa(x), Value: costs[i].cpu / costs[0].cpu})
		}
		return all
	})
	points := make([]point, len(xs))
	for i, f := range figures {
		points[i] = point{float64(xs[i]), f.Value}
	}
	return points
}

// growDecisions compares single calls of limiters, at each x with its windows and tenants.
func growDecisions(
	ctx context.Context, o scenarioOptions,
	xs []int, tenants func(x int) int, windows func(x int) []throttle.Window,
) []point {
	s := newReserveTestbed(ctx, o, 1)
	each := o.size(2_000, 10_000) / turns
	var sides []func() int
	for _, x := range xs {
		reserve := ourReserve(s.askers, fmt.Sprint("growth-", x), windows(x)...)
		next := 0
		side := func() int {
			for range each {
				next++
				reserve(ctx, "tenant-"+strconv.Itoa(next%tenants(x)), 1)
			}
			return each
		}
		side() // makes connections and loads scripts
		sides = append(sides, side)
	}
	return s.inRounds(ctx, xs, sides)
}

func growWindows(ctx context.Context, o scenarioOptions) []point {
	return growDecisions(ctx, o, []int{1, 2, 3, 5, 8, 16},
		func(int) int { return 100 },
		func(n int) (all []throttle.Window) {
			for i := range n {
				name, period := "window-"+strconv.Itoa(i), time.Duration(1+i)*time.Minute
				all = append(all, throttle.Window{Name: name, Limit: 1_000_000, Period: period})
			}
			return all
		})
}

func growTenants(ctx context.Context, o scenarioOptions) []point {
	return growDecisions(ctx, o, []int{1, 10, 100, 1_000, 10_000},
		func(n int) int { return n },
		func(int) []throttle.Window { return twoExact() })
}

func growLimit(ctx context.Context, o scenarioOptions) []point {
	s := newReserveTestbed(ctx, o, 1)
	xs := []int{20, 100, 1_000, 10_000, 100_000}
	sides, _ := s.fullWindows(ctx, xs)
	fillWindows(sides)
	return s.inRounds(ctx, xs, sides)
}

func growWaiting(ctx context.Context, o scenarioOptions) []point {
	s := newTestbed(o)
	s.learnIdle(ctx, nil)
	xs := []int{100, 1_000, 10_000, 100_000}
	if o.full {
		xs = append(xs, 1_000_000)
	}
	var policies []throttle.Policy
	for _, x := range xs {
		policies = append(policies, lineOf(strconv.Itoa(x)))
	}
	joiner := s.newJoiner(policies...)
	each := 2 // so that the shortest line stays short
	var sides []func() int
	for _, x := range xs {
		name := strconv.Itoa(x)
		o.say("%s join", name)
		joiner.inBulk(ctx, name, x)
		sides = append(sides, func() int { joiner.oneByOne(ctx, name, each); return each })
	}
	return s.inRounds(ctx, xs, sides)
}

func growServers(ctx context.Context, o scenarioOptions) []point {
	s := newTestbed(o)
	take := takeScript(ctx, s.addr())
	xs := []int{1, 3, 10}
	if o.full {
		xs = append(xs, 30, 100)
	}
	var points []point
	for _, x := range xs {
		figures := medians(o.rounds, func(int) []figure { return s.drainOneLine(ctx, x, 500, take, false) })
		points = append(points, point{float64(x), figures[0].Value})
	}
	return points
}
