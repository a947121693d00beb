package inspect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/algorithm"
)

// A Demand describes equal requests that will wait in line, or already do. Demands wait in their order.
type Demand struct {
	Request throttle.Request // one of them: its policy, tenant, attributes, class, cost and Ticket.Queue
	Tenant  string           // under which Plan.Tenants counts them; by default the tenant of the Request
	Count   int              // of requests, including the Joined
	Joined  int              // of requests that stand in line already

	// Hold is how long each holds a handler slot, and what Concurrency windows grant, from its start to its
	// end. The default, 0, is unknown: neither is counted, and it ends when it starts.
	Hold time.Duration
}

// PlanOptions are the options of Plan.
type PlanOptions struct {
	By     time.Time        // requests are late that end after it; by default none is
	Limits map[string]int64 // replace some of Snapshot.Limits; limits of other windows of that name change by as much

	// Open returns the earliest time, from the given one on, at which demands may start. The default is any time.
	Open func(from time.Time) time.Time
}

// Slots limit how many requests of some queues run at once. Slots of other queues are not simulated.
type Slots struct {
	Count  int
	Queues []string
}

// A Plan forecasts when demands end. Times are by the clock of Redis.
type Plan struct {
	At      time.Time `json:"at"` // of the state that it starts from
	Finish            // of all demands together
	Tenants []Finish  `json:"tenants"` // the tenant with most requests first

	// Unknown are windows, and throttle.BySlots, that are not counted, as nobody knows how long requests hold them,
	// or how many slots there are: demands may take longer.
	Unknown []string `json:"unknown,omitempty"`
}

// A Finish forecasts when the last of some requests ends.
type Finish struct {
	Tenant    string    `json:"tenant,omitempty"`     // Demand.Tenant
	Count     int       `json:"waiting"`              // requests
	Binds     string    `json:"binds,omitempty"`      // what the last waits for longest: a window, or throttle.BySlots
	Expected  time.Time `json:"expected,omitzero"`    // Plan.At if there is none; zero after MaxPlan, or with NeverFits
	Late      int       `json:"late,omitempty"`       // how many have not ended by PlanOptions.By
	NeverFits string    `json:"never_fits,omitempty"` // a window that can never grant one of them
	left      int64     // that have not started
}

// Plan returns when demands would have ended, if nothing else comes and all takers ask in time. It
// simulates the lines, from what their windows had counted, what waited and pauses. What waits and is no
// demand holds what it gets as long as the longest demand. Plan leaves out how an upstream has slowed the policy
// down (Policy.KeepRate), priorities of queues, and who holds slots now. Errors may be *throttle.RequestErrors.
func (s *Snapshot) Plan(ctx context.Context, o PlanOptions) (Plan, error) {
	for name, n := range o.Limits {
		if s.Limits[name] == 0 && len(s.backlogs) > 0 || n < 1 { // without demands no windows are known
			return Plan{}, &throttle.RequestError{Field: "limit", Value: fmt.Sprintf("%s=%d", name, n),
				Hint: "must be at least 1, of one of " + strings.Join(slices.Sorted(maps.Keys(s.Limits)), ", ")}
		}
	}
	sim := s.simulation(o)
	for t := s.now; sim.finishes[0].left > 0 && t < s.now+MaxPlan.Microseconds(); {
		if ctx.Err() != nil {
			return Plan{}, fmt.Errorf("throttle: %w", ctx.Err())
		}
		next := int64(algorithm.Never)
		for _, l := range sim.lines {
			next = min(next, l.startOne(t))
		}
		t = next
	}
	p := Plan{At: time.UnixMicro(s.now), Tenants: sim.finishes[1:], Unknown: slices.Sorted(maps.Keys(sim.unknown))}
	for i := range sim.finishes {
		if f := &sim.finishes[i]; f.left > 0 {
			f.Expected = time.Time{}
			if !o.By.IsZero() {
				f.Late += int(f.left)
			}
		}
	}
	p.Finish = sim.finishes[0]
	slices.SortFunc(p.Tenants, func(x, y Finish) int {
		return cmp.Or(-cmp.Compare(x.Count, y.Count), cmp.Compare(x.Tenant, y.Tenant))
	})
	return p, nil
}

// Simulate returns two forecasts of when all that waits for a policy is done: by the policy in force, and by a
// variant of it, such as with another limit or weight. Both begin with what windows of the same name, algorithm and
// scope have counted. What operators have put in force holds in both, but in the variant `overrides` replace their
// tenants' overrides; their Until is ignored. For what it leaves out see Plan.
//
// It reads all tenants that wait in pages, with what their windows have counted. An error may be a
// *throttle.PolicyError of the variant, or a *throttle.RequestError of a ticket that joined by other scopes.
func (i Inspector) Simulate(ctx context.Context, variant throttle.Policy, overrides ...throttle.TenantOverride) (
	now, then Plan, err error) {
	lines, err := i.lines(variant.Name)
	other, invalid := i.other(variant, overrides)
	if err = cmp.Or(err, invalid); err == nil && !slices.Equal(other.limiter.Lines(), lines) {
		err = &throttle.PolicyError{Policy: variant.Name, Field: "shards", Value: variant.Shards,
			Hint: "must be those of the policy in force: a simulation moves no tenant"}
	}
	if err != nil {
		return now, then, err
	}
	snapshot, changed := newSnapshot(), newSnapshot()
	for _, name := range lines {
		b := &backlog{line: i.line(name)}
		if err = snapshot.read(ctx, b, true); err == nil {
			err = changed.read(ctx, &backlog{line: other.line(name), flows: b.flows, values: b.values}, true)
		}
		if err != nil {
			return now, then, err
		}
	}
	if now, err = snapshot.Plan(ctx, PlanOptions{}); err == nil {
		then, err = changed.Plan(ctx, PlanOptions{})
	}
	return now, then, err
}

// other returns an inspector by a variant of one policy, without the others.
func (i Inspector) other(variant throttle.Policy, overrides []throttle.TenantOverride) (Inspector, error) {
	c, in, p := i.limiter.Config(), i.limiter.Interventions(), variant.WithDefaults()
	for _, o := range overrides {
		p.Tenants[o.Tenant] = p.Tenants[o.Tenant].With(o) // if it is invalid, so is the policy
		o.Until = in.At.Add(MaxPlan)
		in.Overrides = append(in.Overrides, o) // the last of a tenant holds
	}
	c.Policies = []throttle.Policy{p}
	l, err := throttle.New(c)
	if err != nil {
		return i, err
	}
	l.SetInterventions(in)
	return Of(l), nil
}
