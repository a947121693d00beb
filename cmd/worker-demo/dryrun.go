package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/forecast"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
)

// A dryRunReport is what "run --dry-run --json" prints.
type dryRunReport struct {
	Jobs          int              `json:"jobs"`
	Done          int              `json:"done"` // by --out
	AtBestSeconds float64          `json:"at_best_seconds"`
	BoundBy       *forecast.Bound  `json:"bound_by"` // null if no job has to wait
	Windows       []forecast.Bound `json:"windows"`
}

// dryRun says how long the jobs take at best that are not done by --out. It asks no Redis.
func (c *RunCommand) dryRun(ctx context.Context, list []jobs.Job, policies []throttle.Policy) error {
	if _, _, err := c.address(c.Env); err != nil {
		return inputError{err}
	}
	nowhere := redis.NewClient(&redis.Options{}) // connects when it is asked
	defer nowhere.Close()
	limiter, err := throttle.New(throttle.Config{Client: nowhere, Policies: policies})
	if err != nil {
		return inputError{err}
	}
	if err := checkJobs(ctx, limiter, c.Policies, list); err != nil {
		return err
	}
	known := map[string]jobs.Result{}
	if c.Out != "" {
		if known, err = jobs.ReadLog(c.Out); err != nil {
			return badInput("--out: %w", err)
		}
	}
	todo := slices.DeleteFunc(slices.Clone(list), func(job jobs.Job) bool {
		r, done := known[job.ID]
		return done && !(c.RetryFailed && r.Error != "")
	})
	f := forecast.Of(limiter, todo, time.Now())
	report := dryRunReport{
		Jobs: len(list), Done: len(list) - len(todo), AtBestSeconds: show.Round(f.AtBest.Seconds()),
		BoundBy: f.BoundBy(), Windows: append([]forecast.Bound{}, f.Bounds...),
	}
	if c.json {
		return show.JSON(c.Stdout, report)
	}
	fmt.Fprintf(c.Stdout, "%d jobs, %d of them done before.\n", report.Jobs, report.Done)
	if b := report.BoundBy; b != nil {
		fmt.Fprintf(c.Stdout, "The others take %s at best: %s/%s has %s, and %s needs %d.\n",
			span(f.AtBest), b.Policy, b.Window, b.Limit, b.Scope, b.Units)
	} else {
		fmt.Fprintln(c.Stdout, "The others fit at once: no window makes them wait.")
	}
	if len(f.Bounds) == 0 {
		return nil
	}
	fmt.Fprintln(c.Stdout)
	t := show.Table(c.Stdout)
	fmt.Fprintln(t, "WINDOW\tLIMIT\tMOST TO DO\tUNITS\tAT BEST")
	for _, b := range f.Bounds {
		fmt.Fprintf(t, "%s/%s\t%s\t%s\t%d\t%s\n", b.Policy, b.Window, b.Limit, b.Scope, b.Units, span(b.AtBest()))
	}
	return t.Flush()
}

// span is a duration without what nobody wants to know of it.
func span(d time.Duration) string {
	if d > time.Minute {
		d = d.Round(time.Second)
	}
	return show.Short(d.Round(time.Millisecond))
}
