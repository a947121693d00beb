package main

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/cmd/sluice/internal/redisconn"
	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

// A dryRunReport is the JSON of --dry-run: the shortest time in which the jobs without a result can be done, if calls
// take no time, and nobody else calls.
type dryRunReport struct {
	Jobs          int      `json:"jobs"`            // to be done
	Done          int      `json:"done"`            // jobs with a result in --out that are not to run again
	AtBestSeconds *float64 `json:"at_best_seconds"` // null if it is longer than a plan looks ahead
	Window        string   `json:"window"`          // that the last job waits for; "" if no job waits
}

// dryRun prints a forecast. It uses an embedded Redis, and connects to no other.
func (c *RunCommand) dryRun(ctx context.Context, list []jobs.Job, policies []throttle.Policy) error {
	server, err := redisconn.Embedded()
	if err != nil {
		return err
	}
	defer server.Close()
	for i := range policies { // a policy with earliest_reset has no line to plan, and is not faster
		policies[i].EarliestReset = false
	}
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies})
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
	var demands []inspect.Demand // one for each job to be done
	for _, job := range list {
		result, done := known[job.ID]
		runsAgain := c.RetryFailed && result.Error != ""
		if done && !runsAgain {
			continue
		}
		policy, _ := limiter.Match(job.Type, false)
		r := throttle.Request{Cost: job.Cost, Policy: policy.Name, Tenant: job.Tenant}
		demands = append(demands, inspect.Demand{Count: 1, Request: r})
	}
	snapshot, err := inspect.Of(limiter).Snapshot(ctx, demands)
	if err != nil {
		return err
	}
	plan, err := snapshot.Plan(ctx, inspect.PlanOptions{})
	if err != nil {
		return err
	}
	report := dryRunReport{Jobs: len(demands), Done: len(list) - len(demands), Window: plan.Binds}
	text := "take longer than can be planned"
	if !plan.Expected.IsZero() {
		took := max(0, plan.Expected.Sub(plan.At))
		report.AtBestSeconds = new(took.Round(time.Millisecond).Seconds())
		text = fmt.Sprintf("take %s at best: the last one waits for window %s", words.Span(took), report.Window)
		if report.Window == "" {
			text = "fit at once: no window makes them wait"
		}
	}
	return c.show(report, func() {
		fmt.Fprintf(c.Stdout, "%d jobs, %d of them done before.\nThe others %s.\n", len(list), report.Done, text)
	})
}
