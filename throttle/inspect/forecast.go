package inspect

import (
	"cmp"
	"context"
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

// A snapshot is all of a line that simulations start from, one after the other.
type snapshot struct {
	*line
	standings  []*throttle.Standing // of the demands, and of all that waits
	waiting    []waiting            // the first one first
	values     map[string]string    // of scopes whose windows have counted anything, by key
	now, opens int64
	batchShare float64

	simulated *plan.Line // by the last simulation
	limits    map[string]int64
	hold      int64
}

// waiting is a flow as it stands.
type waiting struct {
	flow
	standing *throttle.Standing
}

// snapshot reads a line, with the requests of demands. Of the first MaxSimulated flows that wait it asks
// what their windows have counted. Without demands, it leaves out calls that wait in place.
func (i Inspector) snapshot(ctx context.Context, name string, demands ...*throttle.Standing) (
	*snapshot, error) {
	for tries := 1; ; tries++ {
		s, err := i.read(ctx, name, demands)
		if err != nil || tries == 3 {
			return s, err
		}
		now, err := i.open(ctx, name)
		if err != nil || maps.Equal(s.counts(), now.counts()) {
			return s, err
		}
	} // what was taken meanwhile would count twice
}

// counts are the tickets of all queues.
func (l *line) counts() map[string]int64 {
	counts := map[string]int64{}
	for _, q := range l.queues {
		counts[q.name] = q.tickets
	}
	return counts
}

func (i Inspector) read(ctx context.Context, name string, demands []*throttle.Standing) (*snapshot, error) {
	l, err := i.open(ctx, name)
	if err != nil {
		return nil, err
	}
	s := &snapshot{line: l, standings: slices.Clone(demands)}
	all, err := l.all(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.Stand(ctx, demands...); err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, d := range demands {
		known[d.Flow] = true
	}
	asked := 0
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if f := all[name]; f.tickets > 0 && (demands != nil || !strings.HasPrefix(name, "!")) {
			standing := &throttle.Standing{Flow: name, Costs: f.costs()}
			if standing.Ask = !known[name] && asked < MaxSimulated; standing.Ask {
				asked++
			}
			s.waiting, s.standings = append(s.waiting, waiting{f, standing}), append(s.standings, standing)
		}
	}
	slices.SortStableFunc(s.waiting, func(a, b waiting) int { return cmp.Compare(a.rank, b.rank) })
	for part := range slices.Chunk(s.standings[len(demands):], 1024) { // others may want to call in between
		if err := s.Stand(ctx, part...); err != nil {
			return nil, err
		}
	}
	if err := s.readValues(ctx); err != nil {
		return nil, err
	}
	for _, standing := range s.standings {
		if s.batchShare = standing.BatchShare; standing.Ask && standing.Err == nil {
			s.now = max(s.now, standing.Decision.At.UnixMicro())
			if p := standing.Decision.Pause; p != nil {
				s.opens = max(s.opens, p.Until.UnixMicro())
			}
		}
	}
	return s, nil
}

// readValues reads the scopes whose windows have counted anything.
func (s *snapshot) readValues(ctx context.Context) error {
	s.values = map[string]string{}
	for _, standing := range s.standings {
		for _, w := range standing.Decision.Windows {
			if standing.Ask && w.Used > 0 && !w.Algorithm.Leases() {
				s.values[script.ScopeKey(w.Scope.Attributes, w.Scope.Values)] = ""
			}
		}
	}
	return s.Read(ctx, func(client redis.UniversalClient, prefix string) error {
		for keys := range slices.Chunk(slices.Collect(maps.Keys(s.values)), 500) {
			names := make([]string, len(keys))
			for i, key := range keys {
				names[i] = prefix + key
			}
			values, err := client.MGet(ctx, names...).Result()
			if err != nil {
				return err
			}
			for i, key := range keys {
				s.values[key], _ = values[i].(string)
			}
		}
		return nil
	})
}

// grants returns what a sliding window has granted, by the value of its scope: see
// internal/script/lua/scope.lua and sliding.lua. It is nil if that is not there.
func grants(value, window string) (grants []algorithm.Grant) {
	number := func(text string) (n int64) {
		for i := range len(text) {
			n = n<<8 | int64(text[i])
		}
		return n
	}
	for i := 8; i+11 <= len(value); {
		head := i + 11 + int(value[i+10])
		end := head + int(number(value[i+7:i+10]))
		if end > len(value) {
			return nil
		}
		if payload := value[head:end]; value[i+11:head] == window+"s" && payload != "" {
			width, at := int(payload[0]), 8
			if width > 128 {
				width, at = width-128, 22
			}
			for ; width > 7 && at+width <= len(payload); at += width {
				granted := algorithm.Grant{At: number(payload[at : at+7]), Units: number(payload[at+7 : at+width])}
				grants = append(grants, granted)
			}
		}
		i = end
	}
	return grants
}

// in adds the line to a simulation by some limits.
func (s *snapshot) in(sim *plan.Simulation, limits map[string]int64) {
	s.simulated, s.limits, s.hold = sim.Line(s.batchShare), limits, sim.Hold
	s.simulated.Opens = s.opens
	for _, standing := range s.standings {
		for i := range standing.Decision.Windows {
			if standing.Ask && standing.Err == nil { // it says what the window has counted
				s.scope(standing, i)
			}
		}
	}
}

// scope returns the scope of a window of a standing, with the window.
func (s *snapshot) scope(standing *throttle.Standing, i int) *plan.Scope {
	w := standing.Decision.Windows[i]
	key := script.ScopeKey(w.Scope.Attributes, w.Scope.Values)
	scope := s.simulated.Scope(key)
	if slices.ContainsFunc(scope.Windows, func(made *plan.Window) bool { return made.Place == i }) {
		return scope
	}
	granted := grants(s.values[key], w.Name)
	counts, capacity, paced := standing.Simulated(i, s.now, s.limits[w.Name], s.hold, granted)
	scope.Windows = append(scope.Windows, &plan.Window{
		Simulated: counts, Held: w.Algorithm.Leases(), Limit: float64(capacity), Name: w.Name,
		Period: paced, Place: i,
	})
	return scope
}

func (s *snapshot) flow(standing *throttle.Standing) *plan.Flow {
	return s.simulated.Flow(standing.Flow, func() *plan.Flow {
		r := standing.Request
		made := &plan.Flow{
			Batch: r.Class == throttle.ClassBatch, Queue: r.Ticket.Queue, Tenant: r.Tenant,
			Weight: standing.Weight,
		}
		attributes := map[*plan.Scope]int{}
		for i, w := range standing.Decision.Windows {
			scope := s.scope(standing, i)
			if n := len(w.Scope.Attributes); n > 0 && attributes[scope] == 0 {
				attributes[scope] = n
				made.Scopes = append(made.Scopes, scope)
			}
		}
		slices.SortStableFunc(made.Scopes, func(a, b *plan.Scope) int { return attributes[b] - attributes[a] })
		return made
	})
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
}

type demand struct {
	Demand
	*throttle.Standing // nil without requests
	line               int
}

func (i Inspector) prepare(ctx context.Context, demands []Demand, o PlanOptions) (*prepared, error) {
	p := &prepared{PlanOptions: o, demands: make([]demand, len(demands)), now: time.Now().UnixMicro()}
	var names []string
	byLine := map[string][]*throttle.Standing{}
	for n, d := range demands {
		r := d.Request
		r.Key, r.IdempotencyKey, r.Ticket = "", "", throttle.Ticket{Queue: d.Queue}
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
		p.demands[n] = demand{d, &throttle.Standing{Request: r, Ask: true}, slices.Index(names, name)}
		byLine[name] = append(byLine[name], p.demands[n].Standing)
	}
	for _, name := range names {
		l, err := i.snapshot(ctx, name, byLine[name]...)
		if err != nil {
			return nil, err
		}
		for _, s := range byLine[name] {
			if s.Err != nil {
				return nil, s.Err
			}
		}
		p.now = l.now
		p.lines = append(p.lines, l)
	}
	inForce := p.limits()
	for name, n := range o.Limits {
		if inForce[name] == 0 || n < 1 {
			return nil, &throttle.RequestError{
				Policy: demands[0].Request.Policy, Field: "limit", Value: fmt.Sprintf("%s=%d", name, n),
				Hint: "must be at least 1, of one of " + strings.Join(slices.Sorted(maps.Keys(inForce)), ", "),
			}
		}
	}
	return p, nil
}

// run returns the plan by some limits.
func (p *prepared) run(ctx context.Context, limits map[string]int64) (Plan, error) {
	sim := plan.New(p.now, p.now+MaxPlan.Microseconds())
	sim.Open, sim.By, sim.From = p.Open, p.By.UnixMicro(), max(p.now, p.From.UnixMicro())
	known, unknown := p.slots(sim, limits[throttle.BySlots]), map[string]bool{}
	for _, l := range p.lines {
		l.in(sim, limits)
	}
	joined, ends := map[*plan.Flow]int64{}, make([]plan.Demand, len(p.demands))
	for _, d := range p.demands {
		if d.Standing != nil {
			joined[p.lines[d.line].flow(d.Standing)] += int64(d.Joined)
			if !known[d.Queue] {
				unknown[throttle.BySlots] = true
			}
			for _, w := range d.Decision.Windows {
				if w.Algorithm.Leases() && d.Hold == 0 && d.Standing.Request.CostOf(w.Unit) > 0 {
					unknown[w.Name] = true
				}
			}
		}
	}
	order := p.Order
	for n := 0; p.Order == nil && n < len(p.demands); n++ {
		order = append(order, Run{n, p.demands[n].Count})
	}
	for _, run := range order {
		if d := p.demands[run.Demand]; d.Standing != nil && run.Count > 0 {
			flow := p.lines[d.line].flow(d.Standing)
			flow.Add(&ends[run.Demand], int64(run.Count), costsOf(d.Standing), d.Hold.Microseconds())
		}
	}
	for _, l := range p.lines {
		for rank, w := range l.waiting {
			if w.standing.Err != nil {
				continue
			}
			f := l.flow(w.standing)
			if before := w.tickets - joined[f]; before > 0 {
				f.Before(rank, before, costsOf(w.standing))
			}
		}
	}
	if err := sim.Run(ctx); err != nil {
		return Plan{}, fmt.Errorf("throttle: %w", err)
	}
	return p.result(sim, ends, slices.Sorted(maps.Keys(unknown))), nil
}

// slots sets the slots of all queues, and how long tickets that are no demand hold them. It returns for
// which queues they are known.
func (p *prepared) slots(sim *plan.Simulation, first int64) (known map[string]bool) {
	known, total := map[string]bool{}, int64(0)
	for _, s := range p.Slots {
		inForce := int64(p.Slots[0].Count)
		sim.SetSlots(max(1, int64(s.Count)+cmp.Or(first, inForce)-inForce), s.Queues...)
		for _, queue := range s.Queues {
			known[queue] = true
		}
	}
	for _, d := range p.demands {
		sim.Hold += int64(d.Count) * d.Hold.Microseconds()
		total += int64(d.Count)
		known[d.Queue] = known[d.Queue] && (d.Hold > 0 || d.Count == 0)
	}
	sim.Hold /= max(1, total)
	rates := map[string]float64{} // by queue: tickets that servers took in a second, while slots bound
	for _, l := range p.lines {
		for _, q := range l.queues {
			name, _ := q.parts()
			rates[name] += q.rate(l.now)
		}
	}
	for queue, rate := range rates {
		if rate > 0 && (!known[queue] || sim.Hold == 0) {
			sim.SetSlotRate(queue, rate)
			known[queue] = true
		}
	}
	return known
}

func (p *prepared) result(sim *plan.Simulation, ends []plan.Demand, unknown []string) Plan {
	finishes := make([]Finish, len(ends))
	for i, d := range ends {
		finishes[i].By = d.By
		if finishes[i].Known = sim.Ends(&d); finishes[i].Known && d.Last > 0 {
			finishes[i].Binds, finishes[i].Expected = d.Binds, time.UnixMicro(d.Last)
		}
	}
	made := PlanOf(time.UnixMicro(p.now), finishes)
	made.Unknown = unknown
	for binds, count := range sim.Late {
		made.Delays = append(made.Delays, Delay{binds, count})
	}
	slices.SortFunc(made.Delays, func(a, b Delay) int {
		return cmp.Or(b.Count-a.Count, cmp.Compare(a.Binds, b.Binds))
	})
	return made
}

// limits returns the limits in force that a change may raise.
func (p *prepared) limits() map[string]int64 {
	limits := map[string]int64{}
	for _, d := range p.demands {
		for i := 0; d.Standing != nil && i < len(d.Decision.Windows); i++ {
			w := d.Decision.Windows[i]
			limits[w.Name] = max(limits[w.Name], w.Limit)
		}
	}
	if len(p.Slots) > 0 {
		limits[throttle.BySlots] = int64(p.Slots[0].Count)
	}
	return limits
}
