package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
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
	Request throttle.Request
}

// PlanOptions are the options of Plan.
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

// A Simulation is when all that waits for a policy would be done, if nothing else comes. Times are
// by the clock of Redis.
type Simulation struct {
	At      time.Time          `json:"at"` // of the state that it starts from
	Policy  string             `json:"policy"`
	Waiting int64              `json:"waiting"` // tickets in line
	Finish                     // of all
	Tenants []TenantSimulation `json:"tenants"` // those with most tickets first
}

// A TenantSimulation is when all that waits of one tenant would be done.
type TenantSimulation struct {
	Tenant  string `json:"tenant"`
	Waiting int64  `json:"waiting"`
	Finish
	NeverFits string `json:"never_fits,omitempty"` // a window that can never grant one of its tickets
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

// Plan returns when demands would have started, if nothing else comes and all takers ask in time. It
// starts from what the windows have counted, from all that waits in a line and from a pause, and
// simulates the line. Where servers left tickets in the demand's queue that fit, it also goes by the
// rate at which they took. It leaves out Concurrency windows, and how an upstream has slowed the policy
// down (Policy.Adapt).
//
// It calls Redis for pages of the flows that wait, and for each 64 demands.
func (i Inspector) Plan(ctx context.Context, name string, demands []Demand, o PlanOptions) (Plan, error) {
	standings := make([]*throttle.Standing, len(demands))
	for j, d := range demands {
		r := d.Request
		r.Policy, r.Key, r.IdempotencyKey = throttle.PolicyOf(name), "", ""
		if r.Ticket = (throttle.Ticket{Queue: d.Queue}); d.Count < 1 || d.Joined < 0 || d.Joined > d.Count {
			return Plan{}, &throttle.RequestError{Policy: r.Policy, Field: "count",
				Value: fmt.Sprintf("%d, %d joined", d.Count, d.Joined),
				Hint:  "must be at least 1, of which all may have joined"}
		}
		standings[j] = &throttle.Standing{Request: r, Ask: true}
	}
	if len(demands) == 0 {
		return PlanOf(time.Now(), nil), nil
	}
	f, err := i.forecast(ctx, name)
	if err == nil {
		err = f.Stand(ctx, standings...)
	}
	if err != nil {
		return Plan{}, err
	}
	for _, s := range standings {
		if s.Err != nil {
			return Plan{}, s.Err
		}
	}
	sim := f.start(standings)
	for _, d := range demands {
		sim.SetSlots(d.Queue, f.slots[d.Queue])
	}
	joined := map[string]int64{}
	for j, s := range standings {
		sim.Demand(f.flow(s), int64(demands[j].Count), costsOf(s))
		joined[s.Flow] += int64(demands[j].Joined)
	}
	waiting, err := f.waiting(ctx, 0)
	if err != nil {
		return Plan{}, err
	}
	for _, w := range waiting {
		if w.standing.Err != nil {
			continue
		}
		flow := f.flow(&w.standing)
		if before := w.tickets - joined[w.name]; before > 0 {
			flow.Before(before, costsOf(&w.standing))
		}
		flow.InLine = true
	}
	if !o.From.IsZero() {
		sim.From = max(sim.Now, o.From.UnixMicro())
	}
	if !o.By.IsZero() {
		sim.By = o.By.UnixMicro()
	}
	sim.Open = o.Open
	if err := f.run(ctx); err != nil {
		return Plan{}, err
	}
	finishes := make([]Finish, len(demands))
	for j := range demands {
		finishes[j] = finishOf(sim.Start(j))
	}
	return PlanOf(time.UnixMicro(sim.Now), finishes), nil
}

// Simulate returns when all that waits would be done by some variants of the limiter's policies, such
// as one with another limit or weight. A variant begins with what the windows have counted that have
// the same name, algorithm and scope. For what it leaves out see Plan.
//
// It reads all tenants that wait in pages, and what their windows have counted by a call for each
// 64. An error may be a *throttle.PolicyError of a variant.
func (i Inspector) Simulate(ctx context.Context, variants ...throttle.Policy) ([]Simulation, error) {
	simulations := make([]Simulation, len(variants))
	for n, v := range variants {
		lines, err := i.lines(v.Name)
		if err != nil {
			return nil, err
		}
		c := i.limiter.Config()
		c.Policies = []throttle.Policy{v}
		other, err := throttle.New(c)
		if err != nil {
			return nil, err
		}
		if other.SetInterventions(i.limiter.Interventions()); !slices.Equal(other.Lines(), lines) {
			return nil, &throttle.PolicyError{Policy: v.Name, Field: "shards", Value: v.Shards,
				Hint: "must be those of the policy in force: a simulation moves no tenant"}
		}
		s := Simulation{At: time.Now(), Policy: v.Name, Finish: Finish{Known: true}}
		tenants := map[string]TenantSimulation{}
		for _, line := range lines {
			f, err := Of(other).forecast(ctx, line)
			if err == nil {
				err = f.simulate(ctx, &s, tenants)
			}
			if err != nil {
				return nil, err
			}
		}
		s.Tenants = slices.AppendSeq([]TenantSimulation{}, maps.Values(tenants))
		slices.SortFunc(s.Tenants, func(x, y TenantSimulation) int {
			return cmp.Or(-cmp.Compare(x.Waiting, y.Waiting), cmp.Compare(x.Tenant, y.Tenant))
		})
		simulations[n] = s
	}
	return simulations, nil
}

// simulate runs all that waits in a line, and adds to a simulation and its tenants.
func (f *forecast) simulate(ctx context.Context, s *Simulation, tenants map[string]TenantSimulation) error {
	waiting, err := f.waiting(ctx, MaxSimulated)
	if err != nil {
		return err
	}
	standings := make([]*throttle.Standing, len(waiting))
	for i, w := range waiting {
		standings[i] = &w.standing
	}
	sim := f.start(standings)
	for queue, rate := range f.slots {
		sim.SetSlots(queue, rate)
	}
	demands := make([]int, len(waiting)) // -1: it never fits
	for i, w := range waiting {
		var never *throttle.NeverFitsError
		if demands[i] = -1; w.standing.Err == nil {
			flow := f.flow(&w.standing)
			flow.InLine = true
			demands[i] = sim.Demand(flow, w.tickets, costsOf(&w.standing))
		} else if !errors.As(w.standing.Err, &never) {
			return fmt.Errorf("throttle: policy %q cannot be simulated: %w", s.Policy, w.standing.Err)
		}
	}
	if err := f.run(ctx); err != nil {
		return err
	}
	s.At = time.UnixMicro(sim.Now)
	for i, w := range waiting {
		t := TenantSimulation{Tenant: w.standing.Request.Tenant, Waiting: w.tickets}
		var never *throttle.NeverFitsError
		if errors.As(w.standing.Err, &never) {
			t.NeverFits = never.Window
		} else {
			t.Finish = finishOf(sim.Start(demands[i]))
		}
		s.Waiting += t.Waiting
		s.Finish = PlanOf(s.At, []Finish{s.Finish, t.Finish}).Finish
		if sum, more := tenants[t.Tenant]; more {
			t.Finish = PlanOf(s.At, []Finish{sum.Finish, t.Finish}).Finish
			t.Waiting, t.NeverFits = sum.Waiting+t.Waiting, cmp.Or(sum.NeverFits, t.NeverFits)
		}
		tenants[t.Tenant] = t
	}
	return nil
}

// A forecast is a line that is simulated from how it stands.
type forecast struct {
	*line
	sim   *plan.Line
	slots map[string]float64 // by queue: tickets a second, of both classes
}

func (i Inspector) forecast(ctx context.Context, name string) (*forecast, error) {
	l, err := i.open(ctx, name)
	return &forecast{line: l, slots: map[string]float64{}}, err
}

// waiting returns the flows that wait, in order, without calls that wait in place. Of the first ones
// it asks what their windows have counted.
func (f *forecast) waiting(ctx context.Context, ask int) ([]*tenantFlow, error) {
	all, err := f.all(ctx)
	if err != nil {
		return nil, err
	}
	var waiting []*tenantFlow
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if w := all[name]; w.tickets > 0 && (ask == 0 || !strings.HasPrefix(name, "!")) {
			asked := len(waiting) < ask
			waiting = append(waiting, &tenantFlow{flow: w, standing: throttle.Standing{Flow: name, Costs: w.costs(), Ask: asked}})
		}
	}
	for part := range slices.Chunk(waiting, 1024) { // others may want to call in between
		standings := make([]*throttle.Standing, len(part))
		for i, w := range part {
			standings[i] = &w.standing
		}
		if err := f.Stand(ctx, standings...); err != nil {
			return nil, err
		}
	}
	return waiting, nil
}

// start begins a simulation with what windows have counted.
func (f *forecast) start(standings []*throttle.Standing) *plan.Line {
	now, opens, share := int64(0), int64(0), throttle.DefaultBatchShare
	for _, s := range standings {
		if share = s.BatchShare; s.Ask && s.Err == nil {
			now = max(now, s.Decision.At.UnixMicro())
			if p := s.Decision.Pause; p != nil {
				opens = max(opens, p.OpensAt.UnixMicro())
			}
		}
	}
	if now == 0 {
		now = time.Now().UnixMicro()
	}
	f.sim = plan.New(share)
	f.sim.Now, f.sim.From, f.sim.End, f.sim.Opens = now, now, now+MaxPlan.Microseconds(), opens
	for _, q := range f.queues {
		queue, _ := q.of()
		f.slots[queue] += q.rate(now)
	}
	for _, s := range standings {
		for i := range s.Decision.Windows {
			if s.Ask && s.Err == nil {
				f.window(s, i)
			}
		}
	}
	return f.sim
}

// window returns a window of a standing in the simulation; nil if simulations leave it out.
func (f *forecast) window(s *throttle.Standing, i int) *plan.Window {
	simulated, even := s.Simulated(i, f.sim.Now)
	if simulated == nil {
		return nil
	}
	w := s.Decision.Windows[i]
	return f.sim.Window(script.ScopeKey(w.Scope.Attributes, w.Scope.Values)+" "+w.Name, func() *plan.Window {
		made := &plan.Window{
			Simulated: simulated, Limit: float64(w.Burst), Name: w.Name, Place: i, Shared: len(w.Scope.Attributes) == 0,
		}
		if !even {
			made.Period = w.Period
		}
		return made
	})
}

func (f *forecast) flow(s *throttle.Standing) *plan.Flow {
	return f.sim.Flow(s.Flow, s.Request.Ticket.Queue, func() *plan.Flow {
		made := &plan.Flow{Batch: s.Request.Class == throttle.ClassBatch, Weight: s.Weight}
		for i := range s.Decision.Windows {
			switch w := f.window(s, i); {
			case w == nil || s.Decision.Granted: // it is exempt
			case w.Shared:
				made.Shared = append(made.Shared, w)
			default:
				made.Own = append(made.Own, w)
			}
		}
		return made
	})
}

func (f *forecast) run(ctx context.Context) error {
	if err := f.sim.Run(ctx); err != nil {
		return fmt.Errorf("throttle: %w", err)
	}
	return nil
}

// costsOf returns what a request takes, by window.
func costsOf(s *throttle.Standing) []int64 {
	costs := make([]int64, len(s.Decision.Windows))
	for i, w := range s.Decision.Windows {
		costs[i] = s.Request.CostOf(w.Unit)
	}
	return costs
}

func finishOf(s plan.Start) Finish {
	f := Finish{By: int(s.By), Known: s.Known}
	if s.Known {
		f.Expected = time.UnixMicro(s.Last)
	}
	if s.HeldBy != nil {
		if f.Binds = s.HeldBy.Name; s.HeldBy.Slots {
			f.Binds = throttle.BySlots
		}
	}
	return f
}
