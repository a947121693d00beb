package inspect

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sort"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// A Demand is equal requests that are to wait in line, or do so already. Those of several wait in the order of
// these.
type Demand struct {
	// Count is how many there are, those that stand in line included. The default is none.
	Count int

	// Hold is how long each holds a handler slot, and what Concurrency windows grant, from its start to its
	// end. The default, 0, is unknown: neither is counted, and it ends when it starts.
	Hold time.Duration

	// Joined is how many of them stand in line already. The default is 0.
	Joined int

	// Queue is that of their tickets (Ticket.Queue). The default is a queue of its own.
	Queue string

	// Request is one of them. Only its policy, tenant, attributes, class, cost and Exempt are used.
	Request throttle.Request

	// Tenant is the one of Plan.Tenants that they belong to. The default is that of the Request.
	Tenant string
}

// PlanOptions are the options of Plan.
type PlanOptions struct {
	// By is the time after which requests are late that have not ended. The default, zero, is no such time.
	By time.Time

	// Fit also finds out by which limits no request would be late.
	Fit bool

	// Limits replace those in force, by the names of windows, for tenants without a limit of their own. That
	// of throttle.BySlots replaces the Count of the first Slots; the Counts of the others change by as much.
	Limits map[string]int64

	// Open returns the earliest time, from the given one on, at which demands may start. The default,
	// nil, has them start at any time.
	Open func(from time.Time) time.Time

	// Slots is how many requests of some queues run at once. Those of other queues are not counted.
	Slots []Slots
}

// Slots are handlers of servers that run requests of some queues.
type Slots struct {
	Count  int
	Queues []string
}

// A Plan is when demands are expected to end. Times are by the clock of Redis.
type Plan struct {
	At      time.Time `json:"at"` // of the state that it starts from
	Finish            // of all demands together
	Tenants []Finish  `json:"tenants"` // those with most requests first

	// Fits are the changes by which no request is late: of each limit that must rise, with PlanOptions.Fit.
	// It is empty if none is late, or no limit helps.
	Fits []Change `json:"fits,omitempty"`

	// Unknown are windows, and throttle.BySlots, that are not counted, as nobody knows how long requests
	// hold them, or how many there are: it may take longer.
	Unknown []string `json:"unknown,omitempty"`
}

// A Finish is when the last of some requests is expected to end.
type Finish struct {
	Tenant    string    `json:"tenant,omitempty"`     // Demand.Tenant
	Count     int       `json:"waiting"`              // requests
	Binds     string    `json:"binds,omitempty"`      // what the last waits for longest: a window, or throttle.BySlots
	Expected  time.Time `json:"expected,omitzero"`    // Plan.At if there is none; zero if not within MaxPlan
	Late      int       `json:"late,omitempty"`       // how many do not end until PlanOptions.By
	NeverFits string    `json:"never_fits,omitempty"` // a window that can never grant one of them
}

// A Change is another limit of a window, or of throttle.BySlots.
type Change struct {
	Window string `json:"window"` // or throttle.BySlots
	Limit  int64  `json:"limit"`  // by which some are late
	Fits   int64  `json:"fits"`   // by which none is
}

// Plan returns when demands would have ended, if nothing else comes and all takers ask in time. It
// starts from what the windows have counted, from all that waits in the demands' lines and from a pause,
// and simulates these lines. Others that wait are taken to hold what they get as long as demands do on
// average. It leaves out how an upstream has slowed the policy down (Policy.KeepRate).
//
// It calls Redis for pages of what waits and has counted, and for each 64 demands. An error may be a
// *throttle.RequestError of a demand.
func (i Inspector) Plan(ctx context.Context, demands []Demand, o PlanOptions) (Plan, error) {
	p, err := i.prepare(ctx, demands, o)
	if err != nil {
		return Plan{}, err
	}
	made, err := p.run(ctx, nil)
	if err == nil && o.Fit && made.Late > 0 {
		made.Fits, err = p.fit(ctx)
		if ctx.Err() != nil { // the plan is known all the same
			err = nil
		}
	}
	return made, err
}

// mostRaised is by how much a limit is multiplied at most to see whether that helps.
const mostRaised = 1 << 20

// limits returns the limits to plan by, of tenants without their own: of several of one name the least.
func (p *prepared) limits() map[string]int64 {
	limits := map[string]int64{}
	for _, l := range p.snapshots {
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

// fit returns the least limits by which no request is late, of those that must rise.
func (p *prepared) fit(ctx context.Context) (fits []Change, err error) {
	limits, raised := p.limits(), map[string]int64{}
	for name, limit := range limits {
		raised[name] = limit * mostRaised
	}
	late := func() bool {
		var made Plan
		if err == nil {
			made, err = p.run(ctx, raised)
		}
		return made.Late > 0
	}
	if late() { // no limit helps
		return nil, err
	}
	// Each in turn is lowered to what it takes.
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		limit := limits[name]
		if raised[name] = limit; !late() {
			continue
		}
		raised[name] = limit + 1 + int64(sort.Search(int(limit)*mostRaised, func(more int) bool {
			raised[name] = limit + 1 + int64(more)
			return !late()
		}))
		fits = append(fits, Change{name, limit, raised[name]})
	}
	return fits, err
}

// A Variant is a policy as it could be.
type Variant struct {
	Policy throttle.Policy

	// Overrides are in force in place of those that operators have set for the same tenants. Their Until
	// is ignored.
	Overrides []throttle.TenantOverride
}

// Simulate returns when all that waits for a policy would be done as it is now, and by a variant, such as
// one with another limit or weight. A variant begins with what the windows have counted that have the same
// name, algorithm and scope. What operators have put in force holds in both. For what it leaves out see Plan.
//
// It reads all tenants that wait in pages, with what their windows have counted. An error may be a
// *throttle.PolicyError of the variant.
func (i Inspector) Simulate(ctx context.Context, v Variant) (now, then Plan, err error) {
	lines, err := i.lines(v.Policy.Name)
	if err != nil {
		return now, then, err
	}
	other, err := v.limiter(i.limiter)
	if err == nil && !slices.Equal(other.Lines(), lines) {
		err = &throttle.PolicyError{Policy: v.Policy.Name, Field: "shards", Value: v.Policy.Shards,
			Hint: "must be those of the policy in force: a simulation moves no tenant"}
	}
	if err != nil {
		return now, then, err
	}
	read := map[string]*snapshot{}
	if now, err = i.simulate(ctx, lines, read); err == nil {
		then, err = Of(other).simulate(ctx, lines, read)
	}
	return now, then, err
}

// limiter returns one like another, with the variant in place of its policies.
func (v Variant) limiter(base *throttle.Limiter) (*throttle.Limiter, error) {
	c := base.Config()
	c.Policies = []throttle.Policy{v.Policy}
	l, err := throttle.New(c)
	if err != nil {
		return nil, err
	}
	in := base.Interventions()
	for _, o := range v.Overrides {
		if err := l.ValidateOverride(o); err != nil {
			return nil, err
		}
		in.Overrides = slices.DeleteFunc(in.Overrides, func(other throttle.TenantOverride) bool {
			return other.Policy == o.Policy && other.Tenant == o.Tenant
		})
		o.Until = in.At.Add(MaxPlan)
		in.Overrides = append(in.Overrides, o)
	}
	l.SetInterventions(in)
	return l, nil
}

// simulate is the plan of all that waits in the lines of a policy. It notes lines that it reads.
func (i Inspector) simulate(ctx context.Context, lines []string, read map[string]*snapshot) (Plan, error) {
	p := &prepared{now: time.Now().UnixMicro()}
	for _, name := range lines {
		l, err := i.snapshot(ctx, name, read[name])
		if err != nil {
			return Plan{}, err
		}
		read[name] = l
		p.add(l, true, nil)
	}
	return p.run(ctx, nil)
}
