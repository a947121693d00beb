package main

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/batch"
)

// plan prints when the batch would be done.
func (c *BatchCommand) plan(ctx context.Context, scheduler *batch.Scheduler, f batch.Firing) error {
	p, err := scheduler.Plan(ctx, f.Batch, f.Tick)
	if err != nil {
		return err
	}
	err = c.show(p, func() {
		fmt.Fprintf(c.Stdout, "%s of %s, %d tasks: %s\n", p.Batch, p.Tick.Format(time.RFC3339), p.Total, finish(p))
		if !p.FinishBy.IsZero() || p.Late > 0 {
			fmt.Fprintln(c.Stdout, verdict(p))
		}
		fmt.Fprintln(c.Stdout)
		t := show.NewTable(c.Stdout, "TENANT", "TASKS", "EXPECTED FINISH", "LATE", "LEFT OUT")
		for _, tenant := range p.Tenants {
			t.Row(tenant.Tenant, tenant.Total, moment(tenant.Expected), tenant.Late, tenant.Trimmed)
		}
		t.Flush()
	})
	if err == nil && p.Late > 0 {
		return errJobsFailed
	}
	return err
}

func finish(p batch.Plan) string {
	switch {
	case p.Total == p.Trimmed:
		return "none of them would run"
	case p.Expected.IsZero():
		return "the last is not expected to start within 400 days"
	}
	return "the last is expected to start at " + moment(p.Expected) + because(p.Binds)
}

func because(binds string) string {
	switch binds {
	case "":
		return ""
	case throttle.BySlots:
		return " (by the rate of the last minute: handler slots are full)"
	}
	return " (it waits for the window " + binds + ")"
}

func verdict(p batch.Plan) string {
	by := "the end of its hours"
	if !p.FinishBy.IsZero() {
		by = "finish_by, " + moment(p.FinishBy)
	}
	switch {
	case p.Late == 0:
		return "All of them start before " + by + "."
	case p.Refused:
		return fmt.Sprintf("It would be refused: %d of them would start after %s.", p.Late, by)
	case p.Trimmed > 0:
		return fmt.Sprintf("%d of them would start after %s: %d are left out, the last of each tenant.",
			p.Late, by, p.Trimmed)
	}
	return fmt.Sprintf("Late: %d of them would start after %s.", p.Late, by)
}

// moment is a time as people read it.
func moment(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format(time.DateTime)
}

// print prints a status. Tasks that failed or were refused make the exit code.
func (c *BatchCommand) print(ctx context.Context, scheduler *batch.Scheduler, s batch.Status) error {
	tenants, err := scheduler.Tenants(ctx, batch.Firing{Batch: s.Batch, Tick: s.Tick})
	if err != nil {
		return err
	}
	err = c.show(struct {
		batch.Status
		Tenants []batch.TenantStatus `json:"tenants"`
	}{s, tenants}, func() {
		fmt.Fprintf(c.Stdout, "%s of %s: %s\n%s\n", s.Batch, s.Tick.UTC().Format(time.RFC3339), s.State, counts(s))
		if s.HeldUp != "" {
			fmt.Fprintf(c.Stdout, "held up since %s: %s\n", moment(s.HeldUpSince), s.HeldUp)
		}
		if s.Reason != "" {
			fmt.Fprintf(c.Stdout, "refused: %s\n", s.Reason)
		}
		if len(tenants) < 2 {
			return
		}
		fmt.Fprintln(c.Stdout)
		t := show.NewTable(c.Stdout, "TENANT", "TASKS", "ENDED", "RUNNING", "WAITING", "PLANNED FINISH", "EXPECTED FINISH")
		for _, tenant := range tenants {
			t.Row(tenant.Tenant, tenant.Total, tenant.Ended, tenant.Running, tenant.Waiting,
				moment(tenant.Planned), moment(tenant.Expected))
		}
		t.Flush()
	})
	if err != nil {
		return err
	}
	if s.Failed+s.Refused > 0 || s.State == batch.StateRefused {
		return errJobsFailed
	}
	return nil
}

func counts(s batch.Status) string {
	text := fmt.Sprintf("%d tasks: %d done, %d failed, %d refused, %d cancelled, %d running, %d waiting",
		s.Total, s.Done, s.Failed, s.Refused, s.Cancelled, s.Running, s.Waiting)
	if s.Trimmed > 0 {
		text += fmt.Sprintf(", and %d left out, as they would be late", s.Trimmed)
	}
	if s.HasEnded() || s.Expected.IsZero() {
		return text + behind(s)
	}
	text += ", the last expected to start at " + moment(s.Expected) + because(s.Binds) + behind(s)
	if s.Late > 0 {
		text += fmt.Sprintf(", %d late", s.Late)
	}
	return text
}

// behind is how the firing stands against its plan.
func behind(s batch.Status) string {
	if s.State == batch.StateRefused || s.State == batch.StateCancelled || s.Planned.IsZero() || s.Expected.IsZero() {
		return ""
	}
	switch behind := s.Behind().Round(time.Second); {
	case behind > 0:
		return ", " + show.Span(behind) + " behind its plan"
	case behind < 0:
		return ", " + show.Span(-behind) + " ahead of its plan"
	}
	return ", as planned"
}
