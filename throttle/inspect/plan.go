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
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Demand describes equal requests that will wait in line, or already do. Demands wait in their order.
type Demand struct {
	Request throttle.Request // one of them: its policy, tenant, attributes, class, cost and Ticket.Queue
	Tenant  string           // under which Plan.Tenants counts them; by default the tenant of the Request
	Count   int              // of requests, including the Joined
	Joined  int              // of requests that stand in line already

	// Hold is how long each holds a handler slot and what Concurrency windows grant, from its start to its end. The
	// default, 0, is unknown: neither is counted, and each request ends when it starts.
	Hold time.Duration
}

// PlanOptions are the options of Plan.
type PlanOptions struct {
	Deadline time.Time        // requests are late that end after it; by default none is
	Limits   map[string]int64 // replace some of Snapshot.Limits; other windows of that name change by the same amount

	// Open returns the earliest time, from the given one on, at which demands may start. The default is any time.
	Open func(from time.Time) time.Time
}

// Slots limit how many requests of some queues run at once. Slots of other queues are not simulated.
type Slots struct {
	Count  int // at least 1
	Queues []string
}

// A Plan forecasts when demands end. Times are by the clock of Redis.
type Plan struct {
	At      time.Time `json:"at"` // of the state that it starts from
	Finish            // of all demands together
	Tenants []Finish  `json:"tenants"` // the tenant with most requests first

	// Unknown are windows, and throttle.BySlots, that the plan does not count, as it is not known how long requests
	// hold them, or how many slots there are: demands may take longer.
	Unknown []string `json:"unknown,omitempty"`
}

// A Finish forecasts when the last of some requests ends.
type Finish struct {
	Tenant    string    `json:"tenant,omitempty"`     // Demand.Tenant
	Count     int       `json:"waiting"`              // requests
	Binds     string    `json:"binds,omitempty"`      // what the last waits for longest: a window, or throttle.BySlots
	Expected  time.Time `json:"expected,omitzero"`    // Plan.At without requests; zero after 400 days, or with NeverFits
	Late      int       `json:"late,omitempty"`       // how many have not ended by PlanOptions.Deadline
	NeverFits string    `json:"never_fits,omitempty"` // a window that can never grant one of them
}

// Plan returns when demands would have ended, if nothing else comes and all takers ask in time. It simulates the lines,
// from the counts of their windows, the tickets in line and pauses. A ticket of no demand holds its grant as long as
// the longest demand. Plan leaves out how an upstream has slowed the policy down (Policy.KeepRate), priorities
// of queues, and who holds slots now. Errors may be *throttle.RequestErrors.
func (s *Snapshot) Plan(ctx context.Context, o PlanOptions) (Plan, error) {
	for name, n := range o.Limits {
		if s.Limits[name] == 0 && len(s.backlogs) > 0 || n < 1 { // without demands no windows are known
			return Plan{}, &throttle.RequestError{Field: "limit", Value: fmt.Sprintf("%s=%d", name, n),
				Hint: "must be at least 1, of one of " + strings.Join(slices.Sorted(maps.Keys(s.Limits)), ", ")}
		}
	}
	sim := s.simulation(o)
	for t := s.now; sim.left > 0 && t < s.now+maxPlan.Microseconds(); {
		if ctx.Err() != nil {
			return Plan{}, fmt.Errorf("throttle: %w", ctx.Err())
		}
		next := int64(algorithm.Never)
		for _, l := range sim.lines {
			next = min(next, l.startOne(t))
		}
		t = next
	}
	at := time.UnixMicro(s.now)
	p := Plan{At: at, Finish: Finish{Expected: at}, Tenants: []Finish{}, Unknown: slices.Sorted(maps.Keys(sim.unknown))}
	byTenant := map[string]Finish{}
	for _, t := range sim.demands {
		if t.left > 0 && !o.Deadline.IsZero() {
			t.Late += int(t.left)
		}
		p.Finish = p.Finish.merge(t.Finish)
		byTenant[t.Tenant] = cmp.Or(byTenant[t.Tenant], Finish{Tenant: t.Tenant, Expected: at}).merge(t.Finish)
	}
	p.Tenants = slices.AppendSeq(p.Tenants, maps.Values(byTenant))
	slices.SortFunc(p.Tenants, func(x, y Finish) int {
		return cmp.Or(-cmp.Compare(x.Count, y.Count), cmp.Compare(x.Tenant, y.Tenant))
	})
	return p, nil
}

// merge returns the finish of these requests and of others.
func (f Finish) merge(others Finish) Finish {
	f.Count, f.Late, f.NeverFits = f.Count+others.Count, f.Late+others.Late, cmp.Or(others.NeverFits, f.NeverFits)
	if !f.Expected.IsZero() && (others.Expected.IsZero() || others.Expected.After(f.Expected)) {
		f.Expected, f.Binds = others.Expected, others.Binds
	}
	return f
}

// Simulate returns two forecasts of when all that waits for a policy is done: by the policy in force, and by a
// variant of it, such as with another limit or weight. Both begin with what windows of the same name, algorithm and
// scope have counted. What operators have put in force applies to both, but in the variant `overrides` replace the
// overrides of their tenants: the Until of `overrides` is ignored. For what is left out see Plan. An error may be a
// *throttle.PolicyError of the variant, or a *throttle.RequestError of a ticket that joined by other scopes.
func (i Inspector) Simulate(ctx context.Context, variant throttle.Policy, overrides ...throttle.TenantOverride) (
	now, then Plan, err error) {
	lines, err := i.lines(variant.Name)
	other, invalid := i.other(variant, overrides)
	if err = cmp.Or(err, invalid); err == nil && !slices.Equal(other.limiter.Lines(), lines) {
		err = &throttle.PolicyError{Policy: variant.Name, Field: "shards", Value: variant.Shards,
			Hint: "must be those of the policy in force: a simulation moves no tenant"}
	}
	snapshot, changed := &Snapshot{Limits: map[string]int64{}}, &Snapshot{Limits: map[string]int64{}}
	for n := 0; n < len(lines) && err == nil; n++ {
		b := &backlog{line: i.line(lines[n]), values: map[string]string{}}
		flows := b.all(ctx)
		if err = snapshot.add(ctx, b, flows); err == nil {
			err = changed.add(ctx, &backlog{line: other.line(lines[n]), values: b.values}, flows)
		}
	}
	if err == nil {
		now, err = snapshot.Plan(ctx, PlanOptions{})
	}
	if err == nil {
		then, err = changed.Plan(ctx, PlanOptions{})
	}
	return now, then, err
}

// other returns an inspector by a variant of one policy, without the others.
func (i Inspector) other(variant throttle.Policy, overrides []throttle.TenantOverride) (Inspector, error) {
	c, in, p := i.limiter.Config(), i.limiter.Interventions(), variant.WithDefaults()
	for _, o := range overrides {
		p.Tenants[o.Tenant] = p.Tenants[o.Tenant].With(o) // if it is invalid, so is the policy
		o.Until = in.At.Add(maxPlan)
		in.Overrides = append(in.Overrides, o) // the last of a tenant counts
	}
	c.Policies = []throttle.Policy{p}
	l, err := throttle.New(c)
	if err != nil {
		return i, err
	}
	l.SetInterventions(in)
	return Of(l), nil
}

// A Snapshot has the state of some lines, the tickets that wait there, and demands. All its plans start from it.
type Snapshot struct {
	// Limits are the limits in force of tenants without their own, by the names of windows: of several
	// windows of one name the least. Under throttle.BySlots it has the Count of the first Slots.
	Limits map[string]int64

	backlogs []*backlog
	slots    []Slots
	now      int64 // us since 1970
	hold     int64 // us for which tickets that are no demand hold what they take; 0 if unknown
}

// A backlog is all of a line that simulations start from.
type backlog struct {
	*line
	tickets []*tickets        // in the order in which they wait; before the line is read, the demands
	values  map[string]string // of the scopes of all, by key
}

// Tickets are equal tickets of one flow.
type tickets struct {
	*throttle.Expectation
	Finish         // of a demand
	demand bool    // they are of a demand
	joined int64   // how many of a demand stand in line already: left counts them, too
	left   int64   // how many have not started
	hold   int64   // us for which each holds what it takes; 0 if unknown: then each ends when it starts
	rank   int64   // of the first one
	costs  []int64 // of each, by simFlow.windows
}

// Snapshot reads the lines of demands, in pages, and what windows have counted. An error may be a *throttle.RequestError.
func (i Inspector) Snapshot(ctx context.Context, demands []Demand, slots ...Slots) (*Snapshot, error) {
	s := &Snapshot{Limits: map[string]int64{}, slots: slots, now: time.Now().UnixMicro()}
	if len(slots) > 0 {
		s.Limits[throttle.BySlots] = int64(slots[0].Count)
	}
	var backlogs []*backlog
	lines, expectations := map[string]*backlog{}, map[string]*throttle.Expectation{}
	for _, d := range demands {
		r := d.Request
		if d.Count < 0 || d.Joined < 0 || d.Joined > d.Count || d.Hold < 0 {
			return nil, &throttle.RequestError{Policy: r.Policy, Field: "demand",
				Value: fmt.Sprintf("of %d, %d joined, hold %v", d.Count, d.Joined, d.Hold),
				Hint:  "must not be below 0; all of them may have joined, and no more"}
		}
		if d.Count == 0 {
			continue
		}
		name := i.limiter.LineOf(r.Policy, r.Tenant)
		b := lines[name]
		if b == nil {
			b = &backlog{line: i.line(name), values: map[string]string{}}
			lines[name], backlogs = b, append(backlogs, b)
		}
		key := fmt.Sprintf("%q %q %q %q %#v %#v", r.Ticket.Queue, r.Policy, r.Tenant, r.Class, r.Attributes, r.Cost)
		expectation := expectations[key]
		if expectation == nil {
			expectation = &throttle.Expectation{Request: r}
			if err := b.Expect(ctx, expectation); err != nil {
				return nil, err
			}
			expectations[key] = expectation
		}
		t := &tickets{Expectation: expectation, demand: true, joined: int64(d.Joined), left: int64(d.Count), hold: d.Hold.Microseconds()}
		t.Tenant = cmp.Or(d.Tenant, r.Tenant)
		b.tickets, s.hold = append(b.tickets, t), max(s.hold, t.hold)
	}
	for _, b := range backlogs {
		if err := s.add(ctx, b, b.all(ctx)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// add adds a line: the tickets there, and then the demands that b has. If b has none, all tickets are demands. Tickets
// taken meanwhile count twice. Values that b has are not read again.
func (s *Snapshot) add(ctx context.Context, b *backlog, flows []State) error {
	expectations := []*throttle.Expectation{{Ask: true}} // the first one stands for all tenants together
	for _, f := range flows {
		expectations = append(expectations, &throttle.Expectation{Flow: f.flow, Cost: f.cost, Waiting: f.Waiting})
	}
	if b.err == nil {
		b.err = b.Expect(ctx, expectations...)
	}
	if b.err != nil {
		return b.err
	}
	s.backlogs, s.now = append(s.backlogs, b), expectations[0].Decision.At.UnixMicro()
	for _, w := range expectations[0].Decision.Windows {
		s.Limits[w.Name] = min(w.Limit, cmp.Or(s.Limits[w.Name], w.Limit))
	}
	joined := map[string]int64{}
	for _, t := range b.tickets {
		joined[t.Flow] += t.joined // tickets of the flow that the demand counts already
	}
	var all []*tickets
	for _, f := range expectations[1:] {
		t := &tickets{Expectation: f, demand: len(b.tickets) == 0, left: f.Waiting - joined[f.Flow], hold: s.hold}
		if t.Tenant = f.Request.Tenant; t.left > 0 {
			all = append(all, t)
		}
	}
	all, b.tickets = append(all, b.tickets...), nil
	rank, last := int64(0), map[string]*tickets{} // by flow
	for _, t := range all {
		refused := new(throttle.RequestError) // stays zero if it is not refused
		switch isRefused := errors.As(t.Err, &refused); {
		case !isRefused:
			t.rank, rank = rank, rank+t.left
		case !t.demand: // a ticket that never fits, or joined by other scopes: it delays nobody
			continue
		case refused.Window == "": // an invalid demand; one above a window's limit stays, with NeverFits
			return refused
		}
		t.Count, t.NeverFits = int(t.left), refused.Window
		l := last[t.Flow]
		continuesLast := l != nil && l.Expectation == t.Expectation && l.Tenant == t.Tenant && l.hold == t.hold
		if continuesLast {
			l.Count, l.left = l.Count+t.Count, l.left+t.left
			continue
		}
		b.tickets, last[t.Flow] = append(b.tickets, t), t
	}
	b.readValues(ctx)
	return b.err
}

// readValues reads the scopes of all tickets.
func (b *backlog) readValues(ctx context.Context) {
	b.try(ctx, func(client redis.UniversalClient, prefix string) error {
		pipe, read := client.Pipeline(), map[string]*redis.StringCmd{}
		for _, t := range b.tickets {
			for _, w := range t.Decision.Windows {
				key := script.ScopeKey(w.Scope.Attributes, w.Scope.Values)
				if _, known := b.values[key]; !known && read[key] == nil {
					read[key] = pipe.Get(ctx, prefix+key)
				}
			}
		}
		_, err := pipe.Exec(ctx)
		for key, value := range read {
			b.values[key] = value.Val()
		}
		if errors.Is(err, redis.Nil) { // some scopes count nothing
			return nil
		}
		return err
	})
}
