package throttle

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/plan"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Demand is equal requests that are to wait in line, or do so already.
type Demand struct {
	// Count is how many there are, those that stand in line included. It is required.
	Count int

	// Joined is how many of them stand in line already. The default is 0.
	Joined int

	// Queue is that of their tickets (Ticket.Queue). The default is a queue of its own.
	Queue string

	// Request is one of them. Only its tenant, attributes, class, cost and Exempt are used.
	Request Request
}

// PlanOptions are the options of Line.Plan.
type PlanOptions struct {
	// By is the time until which Finish.By counts. The default, zero, counts nothing.
	By time.Time

	// From is the time before which no demand starts. The default is now.
	From time.Time

	// Open returns the earliest time, from the given one on, at which demands may start. The default,
	// nil, has them start at any time.
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
	Binds    string    `json:"binds,omitempty"`   // the window that the last one waits for, or BySlots, by the last minute's rate
	By       int       `json:"by,omitempty"`      // how many start until PlanOptions.By
	Expected time.Time `json:"expected,omitzero"` // zero unless Known
	Known    bool      `json:"known"`             // false if the last one does not start within MaxPlan
}

// Plan returns when demands would have started, if nothing else comes and all takers ask in time.
// It changes nothing. It starts from what the windows have counted, from all that waits and from a
// pause, and simulates the line. Where servers left tickets in the demand's queue that fit, it also
// goes by the rate at which they took. It leaves out Concurrency windows, and how an upstream has
// slowed the policy down (Policy.Adapt).
//
// It calls Redis for pages of the flows that wait, and for each 64 demands. Errors are Reserve's.
func (n *Line) Plan(ctx context.Context, demands []Demand, o PlanOptions) (Plan, error) {
	cp, err := n.limiter.findLine(n.name, false)
	if err != nil {
		return Plan{}, err
	}
	if len(demands) == 0 {
		return PlanOf(time.Now(), nil), nil
	}
	l, err := n.simulation(ctx, cp, demands)
	if err != nil {
		return Plan{}, err
	}
	if !o.From.IsZero() {
		l.From = max(l.Now, o.From.UnixMicro())
	}
	if !o.By.IsZero() {
		l.By = o.By.UnixMicro()
	}
	l.Open = o.Open
	if err := l.Run(ctx); err != nil {
		return Plan{}, classify(ctx, cp.Name, err)
	}
	finishes := make([]Finish, len(demands))
	for i := range demands {
		finishes[i] = finishOf(l.Start(i))
	}
	return PlanOf(time.UnixMicro(l.Now), finishes), nil
}

func finishOf(s plan.Start) Finish {
	f := Finish{By: int(s.By), Known: s.Known}
	if s.Known {
		f.Expected = time.UnixMicro(s.Last)
	}
	if s.HeldBy != nil {
		if f.Binds = s.HeldBy.Name; s.HeldBy.Slots {
			f.Binds = BySlots
		}
	}
	return f
}

// PlanOf returns the plan of all demands whose finishes are known, such as those of several lines.
func PlanOf(at time.Time, demands []Finish) Plan {
	p := Plan{At: at, Finish: Finish{Known: true}, Demands: demands}
	for _, f := range demands {
		p.By += f.By
		p.Known = p.Known && f.Known
		if f.Expected.After(p.Expected) {
			p.Expected, p.Binds = f.Expected, f.Binds
		}
	}
	if !p.Known {
		p.Expected, p.Binds = time.Time{}, ""
	}
	return p
}

func (n *Line) simulation(ctx context.Context, cp *compiledPolicy, demands []Demand) (*plan.Line, error) {
	operations := make([]*operation, len(demands))
	asks := make([]script.Request, len(demands))
	for i, d := range demands {
		r := d.Request
		r.Policy, r.Key, r.IdempotencyKey = cp.Name, "", ""
		r.Ticket = Ticket{} // of any of them
		if d.Count < 1 || d.Joined < 0 || d.Joined > d.Count {
			return nil, r.bad("count", fmt.Sprintf("%d, %d joined", d.Count, d.Joined),
				"must be at least 1, of which all may have joined")
		}
		o, err := n.checked(ctx, cp, r)
		if err != nil {
			return nil, err
		}
		operations[i] = o
		asks[i] = o.scriptRequest(script.Peek, "")
		asks[i].Place = o.place()
	}
	answers, err := cp.decide(ctx, asks...)
	if err != nil {
		return nil, err
	}
	l := plan.New(cp.BatchShare)
	for i, a := range answers {
		l.Now = max(l.Now, a.At)
		l.Opens = max(l.Opens, a.Pause.Open)
		for j, w := range a.Windows {
			operations[i].simulated(l, j, w, a.At)
		}
	}
	l.From, l.End = l.Now, l.Now+MaxPlan.Microseconds()
	waiting, err := n.limiter.runner.Standing(ctx, cp.line)
	if err != nil {
		return nil, classify(ctx, cp.Name, err)
	}
	rates, err := n.limiter.runner.SlotRates(ctx, cp.line, l.Now)
	if err != nil {
		return nil, classify(ctx, cp.Name, err)
	}
	for _, d := range demands {
		l.SetSlots(d.Queue, rates[d.Queue])
	}
	joined := map[*plan.Flow]int64{}
	for i, d := range demands {
		o := operations[i]
		f := o.simulatedFlow(l, o.flow(script.Escape(d.Queue), o.request), d.Queue)
		l.Demand(f, int64(d.Count), o.costs)
		joined[f] += int64(d.Joined)
	}
	for name, standing := range waiting {
		r, ok := cp.standingRequest(name, standing)
		if !ok {
			continue
		}
		t, err := n.limiter.tenant(ctx, cp, r.Tenant)
		if err != nil {
			return nil, err
		}
		o, err := cp.newOperation(r, t)
		if err != nil || o.checkCosts() != nil {
			continue
		}
		f := o.simulatedFlow(l, name, r.Ticket.Queue)
		if before := standing.Tickets - joined[f]; before > 0 {
			f.Before(before, o.costs)
		}
		f.InLine = true
	}
	return l, nil
}

// standingRequest returns one of the tickets of a flow, as they cost on average. It returns false
// if none waits, or by other scopes than the policy has now.
func (cp *compiledPolicy) standingRequest(flow string, s script.Standing) (Request, bool) {
	r, ok := cp.requestOf(flow, "")
	if !ok || s.Tickets == 0 {
		return r, false
	}
	for unit, units := range s.Units {
		r.Cost[unit] = algorithm.CeilDiv(units, s.Tickets)
	}
	return r, true
}

// simulated returns a window of the request in a simulation, which has counted what the answer
// says; nil if simulations leave it out.
func (o *operation) simulated(l *plan.Line, i int, counted script.WindowAnswer, now int64) *plan.Window {
	w, a := o.windows[i], o.algorithms[i]
	if a.Simulate == nil {
		return nil
	}
	return l.Window(o.keys[o.scopeOf[i]]+" "+w.Name, func() *plan.Window {
		made := &plan.Window{
			Simulated: a.Simulate(w.numbers(), counted.Used, now, counted.Resets),
			Limit:     float64(a.Capacity(w.numbers())), Name: w.Name, Place: i, Shared: w.Scope == ScopeShared,
		}
		if !a.Even {
			made.Period = w.Period
		}
		return made
	})
}

func (o *operation) simulatedFlow(l *plan.Line, name, queue string) *plan.Flow {
	return l.Flow(name, queue, func() *plan.Flow {
		f := &plan.Flow{Batch: o.request.Class == ClassBatch, Weight: float64(o.weight()) / 1000}
		for i := range o.windows {
			w := o.simulated(l, i, script.WindowAnswer{Resets: l.Now}, l.Now)
			switch {
			case w == nil || o.tenant.Exempt:
			case w.Shared:
				f.Shared = append(f.Shared, w)
			default:
				f.Own = append(f.Own, w)
			}
		}
		return f
	})
}
