package batch

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// String returns the plan in sentences, without the rows of its tenants. Times are UTC.
func (p Plan) String() string {
	text := p.finish() + p.verdict()
	if i := slices.IndexFunc(p.Tenants, func(t TenantPlan) bool { return t.Reason != "" }); i >= 0 {
		text = fmt.Sprintf("%d cannot be enqueued (%s); otherwise, %s", p.Rejected, p.Tenants[i].Reason, text)
	}
	return fmt.Sprintf("%s of %s, %d tasks: %s", p.Batch, p.Tick.Format(time.RFC3339), p.Total, text)
}

func (p Plan) finish() string {
	switch {
	case p.Rejected == p.Total:
		return "there is nothing to do"
	case p.Finish.IsZero():
		return "no end is known: one never fits, or the last ends after 400 days"
	}
	text := "the last is expected to end at " + moment(p.Finish) + because(p.Binds)
	if p.Duration.From == "" {
		text += "\nHow long a task takes is not known: the last one starts then."
	} else {
		text += fmt.Sprintf("\nA task takes %.3g s, as %s.", p.Duration.Seconds, p.Duration.From)
	}
	if len(p.Unknown) > 0 {
		text += "\nIt may take longer. Not known, and not counted: " + strings.Join(p.Unknown, ", ") + "."
	}
	return text
}

func moment(t time.Time) string { return t.UTC().Format(time.DateTime) + " UTC" }

func because(binds string) string {
	if binds == "" {
		return ""
	}
	return " (it waits for " + binds + ")"
}

func (p Plan) verdict() string {
	deadline := moment(p.FinishBy)
	switch {
	case p.FinishBy.IsZero() || p.Overdue == 0 && p.Finish.IsZero():
		return ""
	case p.Overdue == 0 && len(p.Unknown) > 0:
		return "\nAs far as is known, none ends after finish_by, " + deadline + "."
	case p.Overdue == 0:
		return "\nNone ends after finish_by, " + deadline + "."
	}
	text := fmt.Sprintf("\nOverdue: %d of them would end after finish_by, %s.", p.Overdue, deadline)
	if !p.Begins {
		text += " The firing would be refused."
	}
	if len(p.Changes) == 0 {
		return text + "\nNo limits were found by which all would end in time."
	}
	var changes []string
	for _, c := range p.Changes {
		changes = append(changes, fmt.Sprintf("%s %d -> %d", c.Window, c.From, c.To))
	}
	return text + "\nAll would end in time with " + strings.Join(changes, " and ") + "."
}

// String returns how far the firing is, in a line.
func (s Status) String() string {
	text := fmt.Sprintf("%d tasks: %d done, %d failed, %d rejected, %d cancelled, %d running, %d waiting",
		s.Total, s.Done, s.Failed, s.Rejected, s.Cancelled, s.Running, s.Waiting)
	if s.Retried > 0 {
		text += fmt.Sprintf(", %d retried", s.Retried)
	}
	if s.HasEnded() || s.Finish.IsZero() {
		return text + s.behind()
	}
	text += ", the last expected to end at " + moment(s.Finish) + because(s.Binds) + s.behind()
	if s.Overdue > 0 {
		text += fmt.Sprintf(", %d overdue", s.Overdue)
	}
	return text
}

func (s Status) behind() string {
	isUnknown := s.Planned.IsZero() || s.Finish.IsZero() && !s.HasEnded()
	switch behind := s.Behind().Round(time.Second); {
	case isUnknown, s.State == StateRefused, s.State == StateCancelled:
		return ""
	case behind > 0:
		return fmt.Sprintf(", %v behind its plan", behind)
	case behind < 0:
		return fmt.Sprintf(", %v ahead of its plan", -behind)
	}
	return ", as planned"
}
