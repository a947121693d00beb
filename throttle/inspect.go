package throttle

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// An Expectation describes when the tickets of one flow are expected to start, and by which windows they are counted.
// Package inspect makes its views of Expectations. Each is filled in once. What Policy, Settings and Windows point to
// is the limiter's: do not change it.
//
// It is about a flow that waits (by its Flow, Cost and Waiting), or about the flow of a Request with a Policy. Without
// both it is about what all tenants share.
type Expectation struct {
	Flow    string  // its name in its line, as in a TakenTicket; Expect fills it in for a Request
	Cost    string  // of a ticket of the Flow, as in a TakenTicket, or the sum of all Waiting ones
	Waiting int64   // how many tickets the Cost is for
	Request Request // Expect fills it in for a Flow, as far as that has it
	Ticket  string  // the name of a ticket in the line; by default the last one of the flow
	Ask     bool    // whether to ask Redis; without it all windows count as empty

	// Expect fills in the rest.

	Decision Decision // AlreadyQueued: it waits
	Err      error    // a *RequestError: Decision is zero; if the flow is not known, Settings, Windows and Pauses are, too
	Policy   Policy   // of the line
	Removed  bool     // the policy is no longer in force
	Settings Tenant   // of its tenant, with a Weight, as operators have changed them
	Windows  []Window // by which it is counted, with the tenant's own limits
	Pauses   []Pause  // by operators, in force: of the policy, and of the tenant
}

// Expect fills in expectations. It changes no position and no count. Errors are Take's and the TenantFunc's.
func (n *Line) Expect(ctx context.Context, expectations ...*Expectation) error {
	cp, err := n.limiter.policyOfLine(n.name, orRemoved)
	if err != nil {
		return err
	}
	var asks []script.Request
	var asked []*Expectation
	var operations []*operation
	for _, e := range expectations {
		e.Policy, e.Removed = cp.Policy, cp.removed.Load()
		o, err := n.prepare(ctx, cp, e)
		switch {
		case errors.As(err, new(*RequestError)):
			e.Err = err
			continue
		case err != nil:
			return err
		case !e.Ask:
			e.Decision = o.decision(script.Answer{Used: make([]int64, len(cp.Windows))})
			continue
		}
		ask := o.lineRequest(script.Expect)
		ask.Cost, ask.Ticket, ask.LinePart.Flow = "", e.Ticket, e.Flow
		if e.Flow == "" {
			ask.LinePart = nil
		}
		asks, asked, operations = append(asks, ask), append(asked, e), append(operations, o)
	}
	answers, err := cp.decide(ctx, asks...)
	for i, o := range operations {
		if err == nil {
			asked[i].Decision = o.decision(answers[i])
		}
	}
	return err
}

// prepare completes an expectation by what is known without Redis.
func (n *Line) prepare(ctx context.Context, cp *compiledPolicy, e *Expectation) (o *operation, err error) {
	ofFlow, isKnown := e.Flow != "", false
	if ofFlow {
		if e.Request, isKnown = cp.requestOf(e.Flow, e.Cost, e.Waiting); !isKnown {
			return nil, e.Request.bad("flow", e.Flow, "joined by other scopes than the policy has now")
		}
	}
	e.Request.Ticket.ID = "" // of Request.Ticket only the queue counts
	asked := e.Request
	asked.Ticket = Ticket{} // with a queue it would need an ID
	switch {
	case ofFlow:
		maps.DeleteFunc(e.Request.Cost, func(unit string, _ int64) bool { return !slices.Contains(cp.units, unit) })
		if e.Ask && e.Ticket == "" {
			asked.Cost = map[string]int64{Requests: 0} // an average above a limit that was cut is no refusal
		}
		o, err = n.limiter.checkedFor(ctx, cp, asked)
	case asked.Policy != "":
		if o, err = n.checked(ctx, cp, asked); err == nil {
			e.Flow = cp.flow(script.Escape(e.Request.Ticket.Queue), asked)
		}
	default: // it is about what all tenants share
		o, err = cp.newOperation(Request{}, n.limiter.interventions.Load().applyTo(cp, "", Tenant{}), orPartial)
	}
	if o != nil {
		e.Settings, e.Windows, e.Settings.Weight = o.tenant.Tenant, o.windows, float64(o.weight())/1000
		for _, p := range o.tenant.pauses {
			if p != (Pause{}) {
				e.Pauses = append(e.Pauses, p)
			}
		}
	}
	return o, err
}

// PerSecond returns the units a second that the window has granted lately; 0 if that is not known.
func (w WindowState) PerSecond(at time.Time) float64 {
	lately := w.Algorithm.side().Lately
	if lately == nil {
		return 0
	}
	return float64(w.Used) / lately(w.Period, w.ResetsAt.Sub(at)).Seconds()
}
