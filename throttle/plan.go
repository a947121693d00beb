package throttle

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// MaxPlan is how far ahead a plan looks.
const MaxPlan = 400 * 24 * time.Hour

// A Demand is equal requests that are to wait in line, or do so already.
type Demand struct {
	// Count is how many there are, those that stand in line included. It is required.
	Count int

	// Joined is how many of them stand in line already. The default, 0, is a plan of what is still to
	// be enqueued.
	Joined int

	// Queue is that of their tickets (Ticket.Queue). The default is a queue of its own.
	Queue string

	// Request is one of them. Policy, Ticket, Key, IdempotencyKey, MaxWait, Backlog and Deadline are
	// ignored.
	Request Request
}

// PlanOptions are the options of Line.Plan.
type PlanOptions struct {
	// By is the time until which Finish.By counts. The default, zero, counts nothing.
	By time.Time

	// From is the time before which no demand starts. The default is now.
	From time.Time

	// Open returns the earliest time, from the given one on, at which demands may start: it has them
	// rest at some hours. The default, nil, has them start at any time.
	Open func(from time.Time) time.Time
}

// A Plan is when demands are expected to start. Times are by the clock of Redis.
type Plan struct {
	At      time.Time // of the state that it starts from
	Finish            // of all demands together
	Demands []Finish  // of each, in order
}

// A Finish is when the last request of a demand is expected to start.
type Finish struct {
	By        int       `json:"by,omitempty"`         // how many start until PlanOptions.By
	Known     bool      `json:"known"`                // false if the last one does not start within MaxPlan
	Last      time.Time `json:"last,omitzero"`        // zero unless Known
	SlotsBind bool      `json:"slots_bind,omitempty"` // full handler slots hold the last ones up, by the rate of the last minute, and not limits
	Window    string    `json:"window,omitempty"`     // the window that the last one waited for; empty if it waited for none
}

// Plan returns when demands would have started, if nothing else comes and all takers ask in time. It
// changes nothing. It starts from what the windows have counted and from all that waits, and
// simulates the line: windows, resets, classes and weights.
//
// It does not know how long Concurrency windows are held, which it leaves out, nor how an upstream
// has slowed the policy down (Policy.Adapt). A pause it knows. Where servers left tickets in the
// demand's queue that fit, it also goes by the rate at which they took.
//
// It calls Redis for pages of the flows that wait, and once for each 64 demands. Errors are
// Reserve's.
func (n *Line) Plan(ctx context.Context, demands []Demand, o PlanOptions) (Plan, error) {
	cp, err := n.limiter.findLine(n.name, false)
	if err != nil {
		return Plan{}, err
	}
	if len(demands) == 0 {
		return Plan{At: time.Now(), Finish: Finish{Known: true}}, nil
	}
	s, err := n.snapshot(ctx, cp, demands)
	if err != nil {
		return Plan{}, err
	}
	if !o.From.IsZero() {
		s.from = max(s.now, o.From.UnixMicro())
	}
	if !o.By.IsZero() {
		s.by = o.By.UnixMicro()
	}
	s.open = o.Open
	s.run()
	finishes := make([]Finish, len(demands))
	for i := range demands {
		finishes[i] = s.finish(i)
	}
	return PlanOf(time.UnixMicro(s.now), finishes), nil
}

// PlanOf returns the plan of all demands whose finishes are known, such as those of several lines.
func PlanOf(at time.Time, demands []Finish) Plan {
	plan := Plan{At: at, Finish: Finish{Known: true}, Demands: demands}
	for _, f := range demands {
		plan.By += f.By
		plan.Known = plan.Known && f.Known
		if f.Last.After(plan.Last) {
			plan.Last, plan.SlotsBind, plan.Window = f.Last, f.SlotsBind, f.Window
		}
	}
	if !plan.Known {
		plan.Last, plan.SlotsBind, plan.Window = time.Time{}, false, ""
	}
	return plan
}

// snapshot reads what a simulation starts from.
func (n *Line) snapshot(ctx context.Context, cp *compiledPolicy, demands []Demand) (*simulation, error) {
	operations := make([]*operation, len(demands))
	asks := make([]script.Request, len(demands))
	for i, d := range demands {
		r := d.Request
		r.Policy, r.Key, r.IdempotencyKey = cp.Name, "", ""
		r.Ticket = Ticket{} // of any of them
		if d.Count < 1 || d.Joined < 0 || d.Joined > d.Count {
			return nil, &RequestError{Policy: cp.Name, Field: "count", Value: fmt.Sprintf("%d, %d joined", d.Count, d.Joined),
				Hint: "must be at least 1, of which all may have joined"}
		}
		o, err := n.checked(ctx, cp, r)
		if err != nil {
			return nil, err
		}
		operations[i] = o
		asks[i] = o.scriptRequest(script.Peek, "")
		asks[i].Once, asks[i].Place = "", o.place()
	}
	answers, err := cp.batcher.Do(ctx, cp.script, asks...)
	if err != nil {
		return nil, classify(ctx, cp.Name, err)
	}
	s := newSimulation(cp)
	for i, a := range answers {
		if a.Err != nil {
			return nil, classify(ctx, cp.Name, a.Err)
		}
		s.now = max(s.now, a.At)
		s.opens = max(s.opens, a.Pause.Open)
		s.know(operations[i], a)
	}
	s.from = s.now
	waiting, err := n.limiter.runner.Standing(ctx, cp.line)
	if err != nil {
		return nil, classify(ctx, cp.Name, err)
	}
	for i, d := range demands {
		if _, known := s.slots[d.Queue]; !known {
			rate, err := n.limiter.runner.SlotRate(ctx, cp.line, d.Queue, s.now)
			if err != nil {
				return nil, classify(ctx, cp.Name, err)
			}
			s.setSlots(d.Queue, rate)
		}
		o := operations[i]
		f, w := s.flow(o, o.flow(d.Queue, o.request), d.Queue), &work{demand: i, left: int64(d.Count), costs: o.costs}
		f.works, s.works = append(f.works, w), append(s.works, w)
		f.joined += int64(d.Joined)
	}
	for name, standing := range waiting {
		r, ok := cp.requestOf(name, "")
		if !ok || standing.Tickets == 0 {
			continue // of other scopes than the policy has now
		}
		for unit, units := range standing.Units {
			r.Cost[unit] = algorithm.CeilDiv(units, standing.Tickets)
		}
		t, err := n.limiter.tenant(ctx, cp, r.Tenant)
		if err != nil {
			return nil, err
		}
		o, err := cp.newOperation(r, t)
		if err != nil || o.checkCosts() != nil {
			continue
		}
		f := s.flow(o, name, r.Ticket.Queue)
		if before := standing.Tickets - f.joined; before > 0 {
			f.works = slices.Insert(f.works, 0, &work{demand: -1, left: before, costs: o.costs})
		}
		f.waits = true
	}
	return s, nil
}
