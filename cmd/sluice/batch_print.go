package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/batch"
)

// plan prints when a firing would be done. If tasks would be overdue or rejected, or no end is known, it fails.
func (c *BatchCommand) plan(ctx context.Context, scheduler *batch.Scheduler, f batch.Firing) error {
	o := batch.PlanOptions{At: f.Tick, Limits: map[string]int64{}}
	for _, flag := range c.Limits {
		window, number, _ := cutLast(flag)
		n, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			return badUsage("--limit %q: must be WINDOW=N, with a whole number", flag)
		}
		o.Limits[window] = n
	}
	p, err := scheduler.Plan(ctx, f.Batch, o)
	switch wrong, ok := errors.AsType[*throttle.RequestError](err); {
	case ok && wrong.Field == "limit":
		return badUsage("--limit %q: %s", wrong.Value, wrong.Hint)
	case ok:
		return inputError{err}
	case err != nil:
		return err
	}
	endUnknown := p.Total > 0 && p.Finish.IsZero()
	return c.showAndFailIf(p.Overdue+p.Rejected > 0 || endUnknown, p, func() {
		fmt.Fprintf(c.Stdout, "%v\n\n", p)
		t := show.NewTable(c.Stdout, "TENANT", "TASKS", "EXPECTED END", "OVERDUE")
		for _, tenant := range p.Tenants {
			t.Row(tenant.Tenant, tenant.Total, clockText(tenant.Finish), tenant.Overdue)
		}
		t.Flush()
	})
}

// print prints the status of a firing. It fails if the firing was stopped, refused or cancelled, or some of its tasks
// failed or were rejected, unless the verb's state is reached.
func (c *BatchCommand) print(ctx context.Context, scheduler *batch.Scheduler, s batch.Status, verb batchVerb) error {
	tenants, err := scheduler.Tenants(ctx, batch.Firing{Batch: s.Batch, Tick: s.Tick})
	if err != nil {
		return err
	}
	endedEarly := s.HasEnded() && s.State != batch.StateDone
	failed := s.Failed+s.Rejected > 0 || s.State == batch.StateStopped || endedEarly
	return c.showAndFailIf(failed && s.State != verb.reached, struct {
		batch.Status
		Tenants []batch.TenantStatus `json:"tenants"`
	}{s, tenants}, func() {
		fmt.Fprintf(c.Stdout, "%s of %s: %s\n%v\n", s.Batch, s.Tick.UTC().Format(time.RFC3339), s.State, s)
		if s.DelayedBy != "" {
			fmt.Fprintf(c.Stdout, "delayed since %s: %s\n", clockText(s.DelayedSince), s.DelayedBy)
		}
		if s.Reason != "" {
			fmt.Fprintf(c.Stdout, "reason: %s\n", s.Reason)
		}
		if len(tenants) < 2 {
			return
		}
		fmt.Fprintln(c.Stdout)
		t := show.NewTable(c.Stdout, "TENANT", "TASKS", "DONE", "FAILED", "REJECTED", "RUNNING", "WAITING",
			"PLANNED END", "EXPECTED END")
		for _, tenant := range tenants {
			t.Row(tenant.Tenant, tenant.Total, tenant.Done, tenant.Failed, tenant.Rejected,
				tenant.Running, tenant.Waiting, clockText(tenant.Planned), clockText(tenant.Finish))
		}
		t.Flush()
	})
}
