package throttle

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/quote"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

const maxAhead = 10

// An Explanation says why a ticket waits, until when, and what goes before it. As JSON, times are
// of RFC 3339, and durations are seconds.
type Explanation struct {
	At     time.Time `json:"at"` // by the clock of Redis
	Policy string    `json:"policy"`
	Ticket Ticket    `json:"ticket"`

	// Waiting is false if the ticket stands in no line of the policy. All that follows is then zero.
	Waiting bool `json:"waiting"`

	Tenant     string            `json:"tenant,omitempty"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Class      Class             `json:"class,omitempty"`
	Cost       map[string]int64  `json:"cost,omitempty"` // by unit
	Key        string            `json:"key,omitempty"`  // Request.Key

	Joined time.Time `json:"joined,omitzero"`

	// Place is that of the ticket among the Of tickets of its tenant, attributes, queue and class,
	// from 1. It is 0 if it has just left.
	Place int64 `json:"place,omitempty"`
	Of    int64 `json:"of,omitempty"`

	// Binds, Expected and Latest are those of a Place: what holds it up for longest, when it is expected
	// to start, and the upper bound, zero where none is known.
	Binds    string    `json:"binds,omitempty"`
	Expected time.Time `json:"expected,omitzero"`
	Latest   time.Time `json:"latest,omitzero"`

	Windows []WindowState `json:"windows,omitempty"` // Denied and RetryIn: when its turn comes there
	Pause   *Pause        `json:"pause,omitempty"`
	Adapted *Adapted      `json:"adapted,omitempty"`

	// TenantsAhead is how many tenants go before its own where it waits, and Ahead the first ten of
	// them. Where its own window denies, no tenant does.
	TenantsAhead int64         `json:"tenants_ahead,omitempty"`
	Ahead        []TenantState `json:"ahead,omitempty"`

	// There is how many tickets wait in its queue for the scope that holds it up; 0 if not counted.
	There int64 `json:"there,omitempty"`
}

// Explain returns why a ticket waits for a policy. It changes nothing, and its cost does not depend
// on how many others wait. Errors are Reserve's.
func (l *Limiter) Explain(ctx context.Context, policy string, t Ticket) (Explanation, error) {
	e := Explanation{At: time.Now(), Policy: policy, Ticket: t}
	lines, err := l.linesOf(policy)
	if err != nil {
		return e, err
	}
	name := t.name()
	for _, cp := range lines {
		record, waits, err := l.runner.Ticket(ctx, cp.line, name)
		if err != nil {
			return e, classify(ctx, policy, err)
		}
		if !waits {
			continue
		}
		err = l.explain(ctx, cp, name, record, &e)
		return e, err
	}
	return e, nil
}

func (l *Limiter) explain(
	ctx context.Context, cp *compiledPolicy, name string, record script.Ticket, e *Explanation,
) error {
	r, ok := cp.requestOf(record.Flow, record.Costs)
	e.Waiting, e.Tenant, e.Attributes, e.Cost, e.Key = true, r.Tenant, maps.Clone(r.Attributes), r.Cost, record.Key
	e.Class = classOf(r.Class == ClassBatch)
	e.Joined = time.UnixMicro(script.JoinedAt(record.Rank))
	flows, err := l.runner.FlowsOf(ctx, cp.line, []string{record.Flow})
	if err != nil {
		return classify(ctx, cp.Name, err)
	}
	if len(flows) == 0 || !ok { // it has just left, or joined by other scopes than the policy has now
		return nil
	}
	spot, err := l.runner.Spot(ctx, cp.line, name, flows[0], maxAhead)
	if err != nil {
		return classify(ctx, cp.Name, err)
	}
	t, err := l.tenant(ctx, cp, r.Tenant)
	if err != nil {
		return err
	}
	o, err := cp.newOperation(r, t)
	if err != nil {
		return err
	}
	ask := o.lineRequest(script.Expect, "")
	ask.Ticket, ask.Place.Flow = name, record.Flow
	a, err := o.do(ctx, ask)
	if err != nil {
		return err
	}
	d := o.decision(a)
	o.hold(&d)
	e.At, e.Windows, e.Pause, e.Adapted = d.At, d.Windows, d.Pause, d.Adapted
	if a.Status != script.WaitedBefore {
		return nil // it was taken meanwhile
	}
	e.Place, e.Of, e.There, e.TenantsAhead = spot.Before+1, flows[0].Tickets, spot.There, spot.Flows
	e.Binds = o.binds(a, d)
	e.Expected, e.Latest = d.times()
	return l.explainAhead(ctx, cp, spot, e)
}

func (l *Limiter) explainAhead(ctx context.Context, cp *compiledPolicy, spot script.Spot, e *Explanation) error {
	if len(spot.First) == 0 {
		return nil
	}
	queues, err := l.runner.Queues(ctx, cp.line)
	if err != nil {
		return classify(ctx, cp.Name, err)
	}
	flows, err := l.runner.FlowsOf(ctx, cp.line, spot.First)
	if err != nil {
		return classify(ctx, cp.Name, err)
	}
	p := page{limiter: l, compiledPolicy: cp, queues: queues}
	rows := make([]*row, len(flows))
	for i, f := range flows {
		if rows[i], err = p.row(ctx, []script.Standing{f}); err != nil {
			return err
		}
	}
	err = p.fill(ctx, rows)
	e.Ahead = p.tenants
	return err
}

// HeldUpBy says Binds in words, such as "window burst". It is empty if the ticket can start now.
func (e Explanation) HeldUpBy() string {
	switch e.Binds {
	case "":
		return ""
	case BySlots:
		return "handler slots: servers have none free"
	case ByPause:
		return "a pause"
	case ByUpstream:
		return "a pause by the upstream"
	case ByLine:
		return "tickets that wait before it"
	}
	return "window " + e.Binds
}

// String is the explanation in lines of text, without an end of line. Times are UTC.
func (e Explanation) String() string {
	var b strings.Builder
	line := func(format string, a ...any) { fmt.Fprintf(&b, "\n"+format, a...) }
	fmt.Fprintf(&b, "%s: ticket %s of queue %s", e.Policy, quote.Name(e.Ticket.ID), quote.Name(e.Ticket.Queue))
	if !e.Waiting {
		return b.String() + " stands in no line"
	}
	fmt.Fprintf(&b, ", tenant %s, waits since %s", quote.Name(e.Tenant), e.clock(e.Joined))
	switch {
	case e.Place == 0:
		line("it leaves the line just now")
		return b.String()
	case !e.Expected.After(e.At):
		line("it fits now, and starts as soon as a server takes it")
	case e.Latest.After(e.Expected):
		line("expected to start at %s, at the latest at %s", e.clock(e.Expected), e.clock(e.Latest))
	default:
		line("expected to start at %s", e.clock(e.Expected))
	}
	if e.Binds != "" {
		line("held up by %s", e.HeldUpBy())
	}
	if e.Pause != nil {
		line("%s", e.Pause.Describe(e.At))
	}
	if e.Adapted != nil {
		line("%s", e.Adapted)
	}
	line("place %d of %d of its tenant", e.Place, e.Of)
	if e.TenantsAhead > 0 {
		line("tenants that go before its own: %d", e.TenantsAhead)
		for _, t := range e.Ahead {
			line("  %s, %d waiting", quote.Name(t.Tenant), t.Waiting)
			for _, w := range t.Windows {
				fmt.Fprintf(&b, ", %s %d of %d %s used", w.Name, w.Used, w.Burst, w.Unit)
			}
		}
	}
	for _, w := range e.Windows {
		state := "has room"
		if w.Denied {
			state = "has room for it at " + e.clock(e.At.Add(w.RetryIn))
		}
		line("window %s (%s): %d of %d %s used, %s", w.Name, w.Scope, w.Used, w.Burst, w.Unit, state)
	}
	return b.String()
}

// clock writes a time, with its date if that is not today's.
func (e Explanation) clock(t time.Time) string {
	t, at := t.UTC(), e.At.UTC()
	if t.Format(time.DateOnly) == at.Format(time.DateOnly) {
		return t.Format("15:04:05 UTC")
	}
	return t.Format(time.DateTime + " UTC")
}
