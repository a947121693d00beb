package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/drain"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/cmd/sluice/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A forecast is how long jobs take at best: if calls take no time, and nobody else calls.
type forecast struct {
	Policy        string           `json:"policy,omitempty"` // these: "" if it is about all jobs
	Tenant        string           `json:"tenant,omitempty"`
	Cost          map[string]int64 `json:"cost,omitempty"` // of each job
	Jobs          int              `json:"jobs"`
	AtBestSeconds *float64         `json:"at_best_seconds"` // null if it is longer than a plan looks ahead
	Window        string           `json:"window"`          // that the last one waits for; "" if none waits
}

// expect fills in when the jobs start, by a plan made at a time.
func (f *forecast) expect(at time.Time, finish throttle.Finish) {
	f.Window = finish.Binds
	if finish.Known || f.Jobs == 0 {
		f.AtBestSeconds = new(max(0, finish.Expected.Sub(at)).Round(time.Millisecond).Seconds())
	}
}

func (f forecast) String() string {
	if f.AtBestSeconds == nil {
		return "longer than can be planned"
	}
	return show.Span(time.Duration(*f.AtBestSeconds * 1e9))
}

// A dryRunReport is what "run --dry-run --json" prints.
type dryRunReport struct {
	forecast            // of jobs that are not done by --out
	Done     int        `json:"done"`  // the others
	Equal    []forecast `json:"equal"` // of those that ask for the same
}

// dryRun says how long the jobs take at best that are not done by --out. It asks no Redis but one of
// its own.
func (c *RunCommand) dryRun(ctx context.Context, list []jobs.Job, policies []throttle.Policy) error {
	if _, _, err := c.address(c.Env); err != nil {
		return err
	}
	server, err := redisconn.Embedded()
	if err != nil {
		return err
	}
	defer server.Close()
	for i := range policies { // the other rule has no line to plan, and is not faster
		policies[i].Requeue = throttle.RequeueWhenFits
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
	todo := slices.DeleteFunc(slices.Clone(list), func(job jobs.Job) bool {
		r, done := known[job.ID]
		return done && !(c.RetryFailed && r.Error != "")
	})
	report, err := c.forecast(ctx, server, limiter, todo)
	if err != nil {
		return err
	}
	report.Done = len(list) - len(todo)
	return c.show(report, func() { c.printForecast(report) })
}

func (c *RunCommand) forecast(
	ctx context.Context, server *redisconn.Server, limiter *throttle.Limiter, todo []jobs.Job,
) (dryRunReport, error) {
	client, err := worker.NewClient(server.Opt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		return dryRunReport{}, err
	}
	defer client.Close()
	demands := drain.Demands(limiter, "dry-run", func(yield func(*jobs.Job) bool) {
		for i := range todo {
			if !yield(&todo[i]) {
				return
			}
		}
	})
	plan, err := client.Plan(ctx, demands, throttle.PlanOptions{})
	if err != nil {
		return dryRunReport{}, err
	}
	report := dryRunReport{forecast: forecast{Jobs: len(todo)}, Equal: []forecast{}}
	report.expect(plan.At, plan.Finish)
	for i, d := range demands {
		f := forecast{Policy: d.Request.Policy, Tenant: d.Request.Tenant, Cost: d.Request.Cost, Jobs: d.Count}
		if len(f.Cost) == 0 {
			f.Cost = map[string]int64{throttle.Requests: 1}
		}
		f.expect(plan.At, plan.Demands[i])
		report.Equal = append(report.Equal, f)
	}
	return report, nil
}

func (c *RunCommand) printForecast(r dryRunReport) {
	fmt.Fprintf(c.Stdout, "%d jobs, %d of them done before.\n", r.Jobs+r.Done, r.Done)
	if r.Window == "" {
		fmt.Fprintln(c.Stdout, "The others fit at once: no window makes them wait.")
		return
	}
	fmt.Fprintf(c.Stdout, "The others take %s at best: the last one waits for window %s.\n\n", r, r.Window)
	t := show.NewTable(c.Stdout, "POLICY", "TENANT", "COST", "JOBS", "AT BEST", "WINDOW")
	for _, f := range r.Equal {
		t.Row(f.Policy, f.Tenant, strings.TrimPrefix(fmt.Sprint(f.Cost), "map"), f.Jobs, f, f.Window)
	}
	t.Flush()
}
