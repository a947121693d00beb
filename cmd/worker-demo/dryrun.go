package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/drain"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A forecast is how long jobs take at best: if calls take no time, and nobody else calls.
type forecast struct {
	Jobs          int      `json:"jobs"`
	AtBestSeconds *float64 `json:"at_best_seconds"` // null if it is longer than a plan looks ahead
	Window        string   `json:"window"`          // that the last one waits for; "" if none waits

	finish throttle.Finish
	at     time.Time
}

func newForecast(n int, at time.Time, finishes ...throttle.Finish) forecast {
	f := forecast{Jobs: n, at: at, finish: throttle.PlanOf(at, finishes).Finish}
	f.Window = f.finish.Window
	if f.finish.Known || n == 0 {
		f.AtBestSeconds = new(show.Round(max(0, f.finish.Last.Sub(at)).Seconds()))
	}
	return f
}

func (f forecast) String() string {
	switch {
	case f.AtBestSeconds == nil:
		return "longer than can be planned"
	case f.Jobs == 0:
		return "0s"
	}
	d := max(0, f.finish.Last.Sub(f.at))
	if d > time.Minute {
		d = d.Round(time.Second)
	}
	return show.Short(d.Round(time.Millisecond))
}

// A dryRunReport is what "run --dry-run --json" prints.
type dryRunReport struct {
	forecast                  // of jobs that are not done by --out
	Done     int              `json:"done"` // the others
	Tenants  []tenantForecast `json:"tenants"`
}

type tenantForecast struct {
	Policy string `json:"policy"`
	Tenant string `json:"tenant"`
	forecast
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

func (c *RunCommand) forecast(ctx context.Context, server *redisconn.Server, limiter *throttle.Limiter, todo []jobs.Job) (dryRunReport, error) {
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
	type key struct{ policy, tenant string }
	counts, finishes := map[key]int{}, map[key][]throttle.Finish{}
	for i, d := range demands {
		k := key{d.Request.Policy, d.Request.Tenant}
		counts[k] += d.Count
		finishes[k] = append(finishes[k], plan.Demands[i])
	}
	report := dryRunReport{forecast: newForecast(len(todo), plan.At, plan.Finish), Tenants: []tenantForecast{}}
	for _, k := range slices.SortedFunc(maps.Keys(counts), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.policy, b.policy), cmp.Compare(a.tenant, b.tenant))
	}) {
		report.Tenants = append(report.Tenants, tenantForecast{k.policy, k.tenant, newForecast(counts[k], plan.At, finishes[k]...)})
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
	t := show.Table(c.Stdout)
	fmt.Fprintln(t, "POLICY\tTENANT\tJOBS\tAT BEST\tWINDOW")
	for _, f := range r.Tenants {
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\n", f.Policy, printable(f.Tenant), f.Jobs, f.forecast, f.Window)
	}
	t.Flush()
}
