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

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/plan"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A snapshot is all of a line that simulations start from.
type snapshot struct {
	*line
	shared  *throttle.Standing
	flows   []flow               // that wait, the first one first
	waiting []*throttle.Standing // of these flows
	values  map[string]string    // of the scopes of all, by key
}

// snapshot reads a line, with the requests of demands. What is taken while it reads counts twice. If it was
// read before, by another limiter, it stands as it did then.
func (i Inspector) snapshot(ctx context.Context, name string, before *snapshot, demands ...*throttle.Standing) (
	*snapshot, error) {
	s := &snapshot{line: i.line(name), shared: &throttle.Standing{Ask: true}, values: map[string]string{}}
	if before != nil {
		s.flows, s.values = before.flows, before.values
	} else if flows, err := s.all(ctx); err != nil {
		return nil, err
	} else {
		s.flows = flows
	}
	for _, f := range s.flows {
		s.waiting = append(s.waiting, &throttle.Standing{Flow: f.name, Costs: f.costs()})
	}
	all := slices.Concat(demands, s.waiting)
	if err := s.Stand(ctx, append(all, s.shared)...); err != nil {
		return nil, err
	}
	return s, s.readValues(ctx, all)
}

// readValues reads the scopes of standings.
func (s *snapshot) readValues(ctx context.Context, standings []*throttle.Standing) error {
	return s.Read(ctx, func(client redis.UniversalClient, prefix string) error {
		pipe, read := client.Pipeline(), map[string]*redis.StringCmd{}
		for _, standing := range standings {
			for _, w := range standing.Decision.Windows {
				key := script.ScopeKey(w.Scope.Attributes, w.Scope.Values)
				if _, known := s.values[key]; !known && read[key] == nil {
					read[key] = pipe.Get(ctx, prefix+key)
				}
			}
		}
		_, err := pipe.Exec(ctx)
		if errors.Is(err, redis.Nil) { // some scopes count nothing
			err = nil
		}
		for key, value := range read {
			s.values[key] = value.Val()
		}
		return err
	})
}

// sections returns the sections of a scope's value, by name and kind: see internal/script/lua/scope.lua.
func sections(value string) map[string]string {
	found := map[string]string{}
	for i := 8; i+11 <= len(value); {
		head := i + 11 + int(value[i+10])
		end := head + int(value[i+7])<<16 + int(value[i+8])<<8 + int(value[i+9])
		if end > len(value) {
			break
		}
		found[value[i+11:head]] = value[head:end]
		i = end
	}
	return found
}

// A simulated is a snapshot's line in a simulation.
type simulated struct {
	*snapshot
	line   *plan.Line
	limit  func(window string, inForce int64) int64 // to plan by
	hold   int64
	flows  map[string]*plan.Flow  // by name
	scopes map[string]*plan.Scope // by key
}

// flow returns the flow of a standing.
func (s simulated) flow(standing *throttle.Standing) *plan.Flow {
	if made := s.flows[standing.Flow]; made != nil {
		return made
	}
	r, d := standing.Request, standing.Decision
	f := plan.Flow{
		Batch: r.Class == throttle.ClassBatch, Queue: r.Ticket.Queue, Tenant: r.Tenant, Weight: standing.Weight,
	}
	for _, p := range []*throttle.Pause{s.shared.Decision.Pause, d.Pause} {
		if p != nil {
			f.Opens = max(f.Opens, p.Until.UnixMicro())
		}
	}
	for i := range d.Windows {
		if scope := s.scope(standing, i); scope != &s.line.Root && !slices.Contains(f.Scopes, scope) {
			f.Scopes = append(f.Scopes, scope)
		}
	}
	made := s.line.Flow(f)
	s.flows[standing.Flow] = made
	return made
}

// scope returns the scope of a window of a standing, with the window.
func (s simulated) scope(standing *throttle.Standing, i int) *plan.Scope {
	w := standing.Decision.Windows[i]
	key := script.ScopeKey(w.Scope.Attributes, w.Scope.Values)
	scope := s.scopes[key]
	if scope == nil {
		scope = &plan.Scope{}
		s.scopes[key] = scope
	}
	if slices.ContainsFunc(scope.Windows, func(made *plan.Window) bool { return made.Place == i }) {
		return scope
	}
	counted := algorithm.Counted{Now: s.shared.Decision.At.UnixMicro(), Hold: s.hold}
	counts, capacity, paced := standing.Simulated(i, s.limit(w.Name, w.Limit), sections(s.values[key]), counted)
	scope.Windows = append(scope.Windows, &plan.Window{
		Simulated: counts, Held: w.Algorithm.Leases(), Limit: float64(capacity), Name: w.Name,
		Period: paced, Place: i,
	})
	return scope
}

// costsOf returns what a request takes, by window: nothing if it is exempt.
func costsOf(s *throttle.Standing) []int64 {
	costs := make([]int64, len(s.Decision.Windows))
	for i, w := range s.Decision.Windows {
		if !s.Decision.Granted {
			costs[i] = s.Request.CostOf(w.Unit)
		}
	}
	return costs
}

// A prepared plan has all that is known of its lines. It may be run by several limits.
type prepared struct {
	PlanOptions
	demands []demand
	lines   []*snapshot
	now     int64
	hold    int64 // how long tickets that are no demand hold what they take, 0 if that is unknown
}

type demand struct {
	Demand
	*throttle.Standing // nil without requests, or if they never fit
	line               int
	never              string // Finish.NeverFits
}

func (i Inspector) prepare(ctx context.Context, demands []Demand, o PlanOptions) (*prepared, error) {
	p := &prepared{PlanOptions: o, demands: make([]demand, len(demands)), now: time.Now().UnixMicro()}
	var names []string
	byLine, total := map[string][]*throttle.Standing{}, int64(0)
	for n, d := range demands {
		r := d.Request
		r.Key, r.Ticket = "", throttle.Ticket{Queue: d.Queue}
		if d.Count < 0 || d.Joined < 0 || d.Joined > d.Count || d.Hold < 0 {
			return nil, &throttle.RequestError{Policy: r.Policy, Field: "demand",
				Value: fmt.Sprintf("of %d, %d joined, hold %v", d.Count, d.Joined, d.Hold),
				Hint:  "must not be below 0; all of them may have joined, and no more"}
		}
		if p.demands[n].Demand = d; d.Count == 0 {
			continue
		}
		name := i.limiter.LineOf(r.Policy, r.Tenant)
		if byLine[name] == nil {
			names = append(names, name)
		}
		p.demands[n] = demand{d, &throttle.Standing{Request: r, Ask: true}, slices.Index(names, name), ""}
		byLine[name] = append(byLine[name], p.demands[n].Standing)
		p.hold, total = p.hold+int64(d.Count)*d.Hold.Microseconds(), total+int64(d.Count)
	}
	p.hold /= max(1, total)
	for _, name := range names {
		l, err := i.snapshot(ctx, name, nil, byLine[name]...)
		if err != nil {
			return nil, err
		}
		for _, s := range byLine[name] {
			if s.Err != nil {
				return nil, s.Err
			}
		}
		p.add(l)
	}
	known := p.limits()
	for name, n := range o.Limits {
		if known[name] == 0 || n < 1 {
			return nil, &throttle.RequestError{
				Policy: demands[0].Request.Policy, Field: "limit", Value: fmt.Sprintf("%s=%d", name, n),
				Hint: "must be at least 1, of one of " + strings.Join(slices.Sorted(maps.Keys(known)), ", "),
			}
		}
	}
	return p, nil
}

func (p *prepared) add(l *snapshot) {
	p.lines, p.now = append(p.lines, l), l.shared.Decision.At.UnixMicro()
}

// run returns the plan. A limit that is lower than a raised one of its name is that.
func (p *prepared) run(ctx context.Context, raised map[string]int64) (Plan, error) {
	sim := plan.New(p.now, p.now+MaxPlan.Microseconds())
	sim.Open, sim.By, sim.From = p.Open, p.By.UnixMicro(), max(p.now, p.From.UnixMicro())
	limit := func(name string, inForce int64) int64 { return max(raised[name], cmp.Or(p.Limits[name], inForce)) }
	known, unknown := p.slots(sim, limit), map[string]bool{}
	lines := make([]simulated, len(p.lines))
	for n, l := range p.lines {
		lines[n] = simulated{
			snapshot: l, line: sim.Line(l.shared.Policy.BatchShare), limit: limit, hold: p.hold,
			flows: map[string]*plan.Flow{}, scopes: map[string]*plan.Scope{},
		}
		lines[n].scopes[script.ScopeKey(nil, nil)] = &lines[n].line.Root
	}
	flows, joined := make([]*plan.Flow, len(p.demands)), map[*plan.Flow]int64{}
	for n, d := range p.demands {
		if d.Standing == nil {
			continue
		}
		flows[n] = lines[d.line].flow(d.Standing)
		joined[flows[n]] += int64(d.Joined)
		if !known[d.Queue] {
			unknown[throttle.BySlots] = true
		}
		for _, w := range d.Decision.Windows {
			if w.Algorithm.Leases() && d.Hold == 0 && d.Standing.Request.CostOf(w.Unit) > 0 {
				unknown[w.Name] = true
			}
		}
	}
	for n, l := range p.lines {
		for i, standing := range l.waiting {
			if standing.Err != nil {
				continue
			}
			f := lines[n].flow(standing)
			if before := l.flows[i].tickets - joined[f]; before > 0 {
				f.Add(nil, before, costsOf(standing), p.hold)
			}
		}
	}
	order := p.Order
	for n := 0; p.Order == nil && n < len(p.demands); n++ {
		order = append(order, Run{n, p.demands[n].Count})
	}
	tenants := map[string]*finish{}
	of := func(d demand) *finish {
		name := cmp.Or(d.Of, d.Demand.Request.Tenant)
		if tenants[name] == nil {
			tenants[name] = &finish{Finish: Finish{Tenant: name}}
		}
		return tenants[name]
	}
	for _, d := range p.demands {
		of(d).Count += d.Count
		of(d).NeverFits = cmp.Or(of(d).NeverFits, d.never)
	}
	for _, run := range order {
		if d := p.demands[run.Demand]; d.Standing != nil && run.Count > 0 {
			f := flows[run.Demand]
			f.Add(&of(d).end, int64(run.Count), costsOf(d.Standing), d.Hold.Microseconds())
		}
	}
	if err := sim.Run(ctx); err != nil {
		return Plan{}, fmt.Errorf("throttle: %w", err)
	}
	made := Plan{At: time.UnixMicro(p.now), Tenants: []Finish{}, Unknown: slices.Sorted(maps.Keys(unknown))}
	made.Expected = made.At
	for _, f := range tenants {
		f.Late = f.end.Late
		if sim.Ends(&f.end) && f.NeverFits == "" {
			f.Binds, f.Expected = f.end.Binds, time.UnixMicro(max(p.now, f.end.Last))
		}
		made.Tenants = append(made.Tenants, f.Finish)
	}
	slices.SortFunc(made.Tenants, func(x, y Finish) int {
		return cmp.Or(-cmp.Compare(x.Count, y.Count), cmp.Compare(x.Tenant, y.Tenant))
	})
	for _, f := range made.Tenants {
		made.Count, made.Late = made.Count+f.Count, made.Late+f.Late
		if !made.Expected.IsZero() && (f.Expected.IsZero() || f.Expected.After(made.Expected)) {
			made.Binds, made.Expected = f.Binds, f.Expected
		}
	}
	return made, nil
}

// A finish is what becomes of the demands of a tenant.
type finish struct {
	Finish
	end plan.Demand
}

// slots sets the slots of all queues. It returns for which queues they are known.
func (p *prepared) slots(sim *plan.Simulation, limit func(string, int64) int64) map[string]bool {
	known := map[string]bool{}
	for _, s := range p.Slots {
		first := int64(p.Slots[0].Count)
		sim.SetSlots(max(1, int64(s.Count)+limit(throttle.BySlots, first)-first), s.Queues...)
		for _, queue := range s.Queues {
			known[queue] = true
		}
	}
	for _, d := range p.demands {
		known[d.Queue] = known[d.Queue] && (d.Hold > 0 || d.Count == 0)
	}
	return known
}

// limits returns the limits by name that tenants without their own have, the least of each name.
func (p *prepared) limits() map[string]int64 {
	limits := map[string]int64{}
	for _, l := range p.lines {
		for _, w := range l.shared.Decision.Windows {
			limit := cmp.Or(p.Limits[w.Name], w.Limit)
			limits[w.Name] = min(limit, cmp.Or(limits[w.Name], limit))
		}
	}
	if len(p.Slots) > 0 {
		limits[throttle.BySlots] = cmp.Or(p.Limits[throttle.BySlots], int64(p.Slots[0].Count))
	}
	return limits
}
