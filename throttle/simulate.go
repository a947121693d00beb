package throttle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/plan"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

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

// Simulate returns when all that waits would be done by some variants of the limiter's policies,
// such as one with another limit or weight. It changes nothing. A variant begins with what the
// windows have counted that have the same name, algorithm and scope. For what it leaves out see
// Line.Plan.
//
// It reads all tenants that wait in pages, and what their windows have counted by a call for each
// 64. Errors are Reserve's, and a *PolicyError of a variant.
func (l *Limiter) Simulate(ctx context.Context, variants ...Policy) ([]Simulation, error) {
	backlogs := make([]Simulation, len(variants))
	snapshots := map[string][]*snapshot{} // by policy, and by its lines
	for i, v := range variants {
		lines, err := l.linesOf(v.Name)
		if err != nil {
			return nil, err
		}
		shards, err := compilePolicy(v, &l.library)
		if err != nil {
			return nil, err
		}
		if len(shards) != len(lines) {
			return nil, &PolicyError{Policy: v.Name, Field: "shards", Value: v.Shards,
				Hint: "must be those of the policy in force: a simulation moves no tenant"}
		}
		if snapshots[v.Name] == nil {
			for _, cp := range lines {
				s, err := l.standing(ctx, cp)
				if err != nil {
					return nil, err
				}
				snapshots[v.Name] = append(snapshots[v.Name], s)
			}
		}
		b := Simulation{At: time.Now(), Policy: v.Name}
		var all []TenantSimulation
		for j, cp := range shards {
			s := snapshots[v.Name][j]
			some, err := s.run(ctx, l, cp)
			if err != nil {
				return nil, err
			}
			b.At = time.UnixMicro(s.now)
			all = append(all, some...)
		}
		b.sum(all)
		backlogs[i] = b
	}
	return backlogs, nil
}

func (b *Simulation) sum(all []TenantSimulation) {
	tenants := map[string]TenantSimulation{}
	b.Known, b.Tenants = true, []TenantSimulation{}
	for _, t := range all {
		b.Finish = PlanOf(b.At, []Finish{b.Finish, t.Finish}).Finish
		b.Waiting += t.Waiting
		if sum, more := tenants[t.Tenant]; more {
			t.Finish = PlanOf(b.At, []Finish{sum.Finish, t.Finish}).Finish
			t.Waiting, t.NeverFits = sum.Waiting+t.Waiting, cmp.Or(sum.NeverFits, t.NeverFits)
		}
		tenants[t.Tenant] = t
	}
	b.Tenants = slices.AppendSeq(b.Tenants, maps.Values(tenants))
	slices.SortFunc(b.Tenants, func(x, y TenantSimulation) int {
		return cmp.Or(-cmp.Compare(x.Waiting, y.Waiting), cmp.Compare(x.Tenant, y.Tenant))
	})
}

// A snapshot is what waits in a line, and what the windows have counted.
type snapshot struct {
	policy *compiledPolicy
	now    int64
	flows  []standingFlow
	slots  map[string]float64 // by queue: tickets a second
}

type standingFlow struct {
	name    string
	request Request // one of its tickets, as they cost on average
	tickets int64
	answer  *script.Answer // nil: its windows are taken for empty
}

func (l *Limiter) standing(ctx context.Context, cp *compiledPolicy) (*snapshot, error) {
	waiting, err := l.runner.Standing(ctx, cp.line)
	if err != nil {
		return nil, classify(ctx, cp.Name, err)
	}
	s := &snapshot{policy: cp, now: time.Now().UnixMicro()}
	var asks []script.Request
	for _, name := range slices.Sorted(maps.Keys(waiting)) {
		f := waiting[name]
		r, ok := cp.standingRequest(name, f)
		if !ok || strings.HasPrefix(name, "!") {
			continue // a call that waits in place
		}
		s.flows = append(s.flows, standingFlow{name: name, request: r, tickets: f.Tickets})
		if len(asks) < MaxSimulated {
			o, err := cp.newOperation(r, tenantNow{})
			if err != nil {
				return nil, err
			}
			asks = append(asks, o.scriptRequest(script.Expect, ""))
		}
	}
	for i := 0; i < len(asks); i += 1024 { // others may want to call in between
		answers, err := cp.decide(ctx, asks[i:min(i+1024, len(asks))]...)
		if err != nil {
			return nil, err
		}
		for j := range answers {
			s.now = answers[j].At
			s.flows[i+j].answer = &answers[j]
		}
	}
	s.slots, err = l.runner.SlotRates(ctx, cp.line, s.now)
	return s, classify(ctx, cp.Name, err)
}

func (s *snapshot) run(ctx context.Context, l *Limiter, cp *compiledPolicy) ([]TenantSimulation, error) {
	sim := plan.New(cp.BatchShare)
	sim.Now, sim.From, sim.End = s.now, s.now, s.now+MaxPlan.Microseconds()
	for _, f := range s.flows {
		queue := f.request.Ticket.Queue
		sim.SetSlots(queue, s.slots[queue])
	}
	backlogs := make([]TenantSimulation, len(s.flows))
	demands := make([]int, len(s.flows)) // -1: it never fits
	for i, f := range s.flows {
		r := f.request
		backlogs[i] = TenantSimulation{Tenant: r.Tenant, Waiting: f.tickets}
		demands[i] = -1
		t, err := l.tenant(ctx, cp, r.Tenant)
		if err != nil {
			return nil, err
		}
		r.Cost = maps.Clone(r.Cost) // other variants may count other units
		maps.DeleteFunc(r.Cost, func(unit string, _ int64) bool { return !slices.Contains(cp.units, unit) })
		o, err := cp.newOperation(r, t)
		if err != nil { // a scope of the variant needs attributes that its tickets do not have
			return nil, fmt.Errorf("throttle: policy %q cannot be simulated: %w", cp.Name, err)
		}
		var never *NeverFitsError
		if err := o.checkCosts(); errors.As(err, &never) {
			backlogs[i].NeverFits = never.Window
			continue
		}
		s.know(sim, o, f.answer)
		flow := o.simulatedFlow(sim, f.name, r.Ticket.Queue)
		flow.InLine = true
		demands[i] = sim.Demand(flow, f.tickets, o.costs)
	}
	if err := sim.Run(ctx); err != nil {
		return nil, classify(ctx, cp.Name, err)
	}
	for i, demand := range demands {
		if demand >= 0 {
			backlogs[i].Finish = finishOf(sim.Start(demand))
		}
	}
	return backlogs, nil
}

// know makes the windows of a variant as those of the policy in force have counted.
func (s *snapshot) know(sim *plan.Line, o *operation, a *script.Answer) {
	if a == nil {
		return
	}
	sim.Opens = max(sim.Opens, a.Pause.Open)
	for i, w := range o.windows {
		for j, known := range s.policy.Windows {
			if known.Name == w.Name && known.Algorithm == w.Algorithm && known.Scope == w.Scope {
				o.simulated(sim, i, a.Windows[j], s.now)
			}
		}
	}
}
