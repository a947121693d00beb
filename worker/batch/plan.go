package batch

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// A Plan is when the tasks of a firing are expected to start, before any is enqueued. A task has
// ended when its handler has: that time comes on top.
type Plan struct {
	Batch string    `json:"batch"`
	Queue string    `json:"queue"`
	Tick  time.Time `json:"tick"`

	Total int `json:"total"` // tasks that the batch has

	// Expected is when the last task is expected to start, of those that are not left out. It is zero if
	// that is unknown, as it is not within throttle.MaxPlan. Binds is the window that it waits for, or
	// throttle.BySlots; empty if for none.
	Expected time.Time `json:"expected,omitzero"`
	Binds    string    `json:"binds,omitempty"`

	FinishBy time.Time `json:"finish_by,omitzero"` // Batch.FinishBy

	// Late is how many tasks are expected to start after FinishBy, or not before Hours end that have
	// Stop. Batch.Late says what becomes of them: Trimmed are those left out, and Refused says that
	// nothing is enqueued.
	Late    int  `json:"late"`
	Trimmed int  `json:"trimmed"`
	Refused bool `json:"refused"`

	Tenants []TenantPlan `json:"tenants"`
}

// A TenantPlan is the part of a Plan for one tenant.
type TenantPlan struct {
	Tenant   string    `json:"tenant"`
	Total    int       `json:"total"`
	Late     int       `json:"late"`
	Trimmed  int       `json:"trimmed"`
	Expected time.Time `json:"expected,omitzero"`
}

// Plan returns when the tasks of a batch would start if it fired at a time, by the line as it is
// now. The zero time is the next tick, or now for a batch without a schedule. Nothing is enqueued.
// It calls Tenants and Tasks, and goes through all tasks once.
func (s *Scheduler) Plan(ctx context.Context, batch string, at time.Time) (Plan, error) {
	b, err := s.batch(batch)
	if err != nil {
		return Plan{}, err
	}
	if at.IsZero() {
		at = time.Now()
		if b.schedule != nil {
			at = b.next(at)
		}
	}
	f := Firing{b.Name, at.UTC().Truncate(time.Second)}
	p, err := s.plan(ctx, b, f, at)
	if err != nil {
		return Plan{}, fmt.Errorf("batch: %w", err)
	}
	plan := Plan{
		Batch: b.Name, Queue: b.Queue, Tick: f.Tick, FinishBy: b.deadline(f.Tick),
		Expected: p.all.expected(b, f.Tick), Binds: p.all.Binds,
		Late: p.late, Refused: p.refused, Trimmed: p.trimmed,
	}
	for _, t := range p.Tenants {
		plan.Total += t.Total
		plan.Tenants = append(plan.Tenants, t.TenantPlan)
	}
	return plan, nil
}

// A planned firing is what its tasks are, and when they were expected when it began. Its exported
// fields are kept in Redis.
type planned struct {
	Tenants []planTenant `json:"tenants"`

	all           outlook // without what is left out
	late, trimmed int     // tasks
	refused       bool
}

// A planTenant is the tasks of one tenant, in their order. The first ones are those that are not
// left out.
type planTenant struct {
	TenantPlan
	Start int         `json:"start"`           // the position of the first one, if the tasks are as they were counted
	Kinds []*planKind `json:"kinds,omitempty"` // of those that can be enqueued
}

// kept is how many are not left out.
func (t planTenant) kept() int { return t.Total - t.Trimmed }

// A planKind is tasks that ask for the same.
type planKind struct {
	Attributes map[string]string `json:"attributes,omitempty"`
	Class      throttle.Class    `json:"class,omitempty"`
	Count      int               `json:"count"`
	Policy     string            `json:"policy"`
	Tenant     string            `json:"tenant"` // of the task
	Units      map[string]int64  `json:"units"`  // of all together
}

// plan counts the tasks of a firing, and finds out when they are expected if it begins then.
func (s *Scheduler) plan(ctx context.Context, b *compiled, f Firing, from time.Time) (*planned, error) {
	p, seen := &planned{}, map[string]bool{}
	for name, err := range b.Tenants(ctx, f) {
		if err != nil {
			return nil, err
		}
		if seen[name] { // each of its tasks would run twice
			return nil, &Error{b.Name, "tenants", name, "must not come twice"}
		}
		seen[name] = true
		tenant, err := s.count(ctx, b, f, name)
		if err != nil {
			return nil, err
		}
		p.Tenants = append(p.Tenants, tenant)
	}
	look := func() (err error) {
		all := func(i int) (left, joined int) { return p.Tenants[i].kept(), 0 }
		p.all, err = s.look(ctx, b, p.Tenants, b.planOptions(f.Tick, from), all)
		return err
	}
	if err := look(); err != nil {
		return nil, err
	}
	p.late = p.all.late
	p.refused = p.late > 0 && b.Late == LateRefuse
	for i := range p.Tenants {
		t := &p.Tenants[i]
		t.Late = p.all.tenants[i].late
		if b.Late == LateTrim {
			t.Trimmed = t.Total - p.all.tenants[i].inTime(*t)
			p.trimmed += t.Trimmed
		}
	}
	if p.trimmed > 0 {
		if err := look(); err != nil {
			return nil, err
		}
	}
	start := 0
	for i := range p.Tenants {
		t := &p.Tenants[i]
		t.Start, t.Expected = start, p.all.tenants[i].expected(b, f.Tick)
		start += t.kept()
	}
	return p, nil
}

// kindsMost is how many different costs of a tenant are told apart. If there are more, all of them
// count as their mean.
const kindsMost = 64

// count goes through the tasks of a tenant.
func (s *Scheduler) count(ctx context.Context, b *compiled, f Firing, tenant string) (planTenant, error) {
	t := planTenant{TenantPlan: TenantPlan{Tenant: tenant}}
	kinds, byCost, options := map[string]*planKind{}, true, b.options()
	add := func(k *planKind) {
		key := fmt.Sprintf("%q %q %q %v", k.Policy, k.Tenant, k.Class, k.Attributes)
		if byCost {
			key += fmt.Sprint(k.Units)
		}
		alike := kinds[key]
		if alike == nil {
			kinds[key], t.Kinds = k, append(t.Kinds, k)
			return
		}
		alike.Count += k.Count
		for unit, n := range k.Units {
			alike.Units[unit] += n
		}
	}
	for task, err := range b.Tasks(ctx, f, tenant) {
		if err != nil {
			return t, err
		}
		t.Total++
		r, err := s.client.RequestOf(task, options...)
		if err != nil {
			continue // it is counted as refused when it is its turn
		}
		units := map[string]int64{throttle.Requests: 1}
		maps.Copy(units, r.Cost)
		add(&planKind{
			Attributes: r.Attributes, Class: r.Class, Count: 1, Policy: r.Policy, Tenant: r.Tenant,
			Units: units,
		})
		if byCost && len(t.Kinds) > kindsMost {
			told := t.Kinds
			kinds, byCost, t.Kinds = map[string]*planKind{}, false, nil
			for _, k := range told {
				add(k)
			}
		}
	}
	return t, ctx.Err()
}

// request is that of each task of the kind.
func (k *planKind) request() throttle.Request {
	cost := maps.Clone(k.Units)
	for unit := range cost {
		cost[unit] = (cost[unit] + int64(k.Count)/2) / int64(k.Count)
	}
	return throttle.Request{Attributes: k.Attributes, Class: k.Class, Cost: cost, Policy: k.Policy, Tenant: k.Tenant}
}

// An outlook is when tasks are expected.
type outlook struct {
	finish
	tenants []finish
}

// A finish is when the last of some tasks is expected to start.
type finish struct {
	throttle.Finish
	left  int // how many tasks these are
	late  int
	kinds []throttle.Finish // of the kinds of a tenant
}

// look finds out when tasks are expected. The function returns how many of a tenant's tasks have not
// started, and how many of these stand in line.
func (s *Scheduler) look(
	ctx context.Context, b *compiled, tenants []planTenant, o throttle.PlanOptions,
	left func(tenant int) (left, joined int),
) (outlook, error) {
	var demands []throttle.Demand
	all := outlook{tenants: make([]finish, len(tenants))}
	for i, t := range tenants {
		total := 0
		for _, k := range t.Kinds {
			total += k.Count
		}
		n, joined := left(i)
		n, joined = min(n, total), min(joined, total)
		all.tenants[i].left = n
		all.left += n
		sum := 0
		for _, k := range t.Kinds { // each has its part of what is left
			part := func(of int) int { return of*(sum+k.Count)/total - of*sum/total }
			demands = append(demands, throttle.Demand{
				Count: part(n), Joined: min(part(n), part(joined)), Queue: b.Queue, Request: k.request(),
			})
			sum += k.Count
		}
	}
	ctx, cancel := context.WithTimeout(ctx, planTimeout)
	defer cancel()
	plan, err := s.client.Plan(ctx, demands, o)
	if err != nil {
		return all, err
	}
	all.Finish = plan.Finish
	rest := plan.Demands
	for i, t := range tenants {
		f := &all.tenants[i]
		f.kinds, rest = rest[:len(t.Kinds)], rest[len(t.Kinds):]
		f.Finish = throttle.PlanOf(plan.At, f.kinds).Finish
		if !o.By.IsZero() {
			f.late = f.left - f.By
			all.late += f.late
		}
	}
	return all, nil
}

// planTimeout bounds the calls of a plan.
const planTimeout = 20 * time.Second

// expected is the time to report, zero if it is unknown. What the end of the hours deletes has ended
// by then.
func (f finish) expected(b *compiled, tick time.Time) time.Time {
	switch {
	case f.left == 0:
		return time.Time{}
	case f.Known:
		return f.Expected.UTC().Truncate(time.Millisecond)
	case b.hours != nil && b.Hours.Stop:
		return b.stops(tick)
	}
	return time.Time{}
}

// inTime returns how many of the tenant's first tasks start in time. If they ask for different
// costs, that is the part of the units that are granted by then.
func (f finish) inTime(t planTenant) int {
	if f.late <= 0 {
		return t.Total
	}
	if len(t.Kinds) == 1 {
		return t.Total * f.By / t.Kinds[0].Count
	}
	part := 1.0
	granted, asked := map[string]float64{}, map[string]float64{}
	for i, k := range t.Kinds {
		for unit, units := range k.Units {
			asked[unit] += float64(units)
			granted[unit] += float64(units) * float64(f.kinds[i].By) / float64(k.Count)
		}
	}
	for unit := range asked {
		if asked[unit] > 0 {
			part = min(part, granted[unit]/asked[unit])
		}
	}
	return int(part * float64(t.Total))
}
