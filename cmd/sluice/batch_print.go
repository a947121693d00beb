package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/batch"
)

// plan prints when the batch would be done.
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
	if errors.As(err, new(*throttle.RequestError)) {
		return inputError{err}
	}
	if err != nil {
		return err
	}
	err = c.show(p, func() {
		fmt.Fprintf(c.Stdout, "%s of %s, %d tasks: %s\n", p.Batch, p.Tick.Format(time.RFC3339), p.Total, finish(p))
		if !p.FinishBy.IsZero() {
			fmt.Fprintln(c.Stdout, verdict(p))
		}
		fmt.Fprintln(c.Stdout)
		t := show.NewTable(c.Stdout, "TENANT", "TASKS", "EXPECTED END", "OVERDUE")
		for _, tenant := range p.Tenants {
			t.Row(tenant.Tenant, tenant.Total, moment(tenant.Finish), tenant.Overdue)
		}
		t.Flush()
	})
	if err == nil && p.Overdue > 0 {
		return errJobsFailed
	}
	return err
}

func finish(p batch.Plan) string {
	switch {
	case p.Total == 0:
		return "there is nothing to do"
	case p.Finish.IsZero():
		return "the last is not expected to end within 400 days"
	}
	text := "the last is expected to end at " + moment(p.Finish) + because(p.Binds)
	takes := map[batch.Source]string{
		"":                   "How long a task takes is not known: the last one starts then.",
		batch.SourceMeasured: "A task takes %.3g s, as measured.",
		batch.SourceGiven:    "A task takes %.3g s, as the file says.",
		batch.SourceTimeout:  "A task takes %.3g s at most, its timeout.",
	}[p.Duration.From]
	text += "\n" + strings.ReplaceAll(takes, "%.3g", fmt.Sprintf("%.3g", p.Duration.Seconds))
	if len(p.Unknown) > 0 {
		text += "\nIt may take longer. Not known, and not counted: " + strings.Join(p.Unknown, ", ") + "."
	}
	return text
}

func because(binds string) string {
	switch binds {
	case "":
		return ""
	case throttle.BySlots:
		return " (it waits for a handler slot)"
	}
	return " (it waits for the window " + binds + ")"
}

func verdict(p batch.Plan) string {
	by := moment(p.FinishBy)
	switch {
	case p.Overdue == 0 && len(p.Unknown) > 0:
		return "As far as is known, all of them end before finish_by, " + by + "."
	case p.Overdue == 0:
		return "All of them end before finish_by, " + by + "."
	}
	text := fmt.Sprintf("Overdue: %d of them would end after finish_by, %s.", p.Overdue, by)
	if !p.Begins {
		text += " The firing would be refused."
	}
	for _, d := range p.Delays {
		text += fmt.Sprintf("\n%d of these wait for %s.", d.Count, cmp.Or(d.Binds, "nothing: they come too late"))
	}
	for i, c := range p.Fits {
		text += fmt.Sprintf("%s %s %d -> %d", []string{"\nAll would end in time with", " and"}[min(i, 1)], c.Window, c.Limit, c.Fits)
	}
	if len(p.Fits) == 0 {
		return text + "\nNo other limit would have all end in time."
	}
	return text + "."
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
				tenant.Running, tenant.Waiting, moment(tenant.Planned), moment(tenant.Finish))
		}
		t.Flush()
	})
	if err != nil {
		return err
	}
	if s.Failed+s.Rejected > 0 || s.State == batch.StateStopped || s.State == batch.StateRefused {
		return errJobsFailed
	}
	return nil
}

func counts(s batch.Status) string {
	text := fmt.Sprintf("%d tasks: %d done, %d failed, %d rejected, %d cancelled, %d running, %d waiting",
		s.Total, s.Done, s.Failed, s.Rejected, s.Cancelled, s.Running, s.Waiting)
	if s.Retried > 0 {
		text += fmt.Sprintf(", %d retried", s.Retried)
	}
	if s.HasEnded() || s.Finish.IsZero() {
		return text + behind(s)
	}
	text += ", the last expected to end at " + moment(s.Finish) + because(s.Binds) + behind(s)
	if s.Overdue > 0 {
		text += fmt.Sprintf(", %d overdue", s.Overdue)
	}
	return text
}

// behind is how the firing stands against its plan.
func behind(s batch.Status) string {
	if s.State == batch.StateRefused || s.State == batch.StateCancelled || s.Planned.IsZero() || s.Finish.IsZero() {
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
