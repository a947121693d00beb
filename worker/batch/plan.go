package batch

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

// A Plan is when the tasks of a firing are expected to start, before any is enqueued. A task has
// ended when its handler has: that time comes on top.
type Plan struct {
	Batch string    `json:"batch"`
	Queue string    `json:"queue"`
	Tick  time.Time `json:"tick"`

	Total int `json:"total"` // tasks that the batch has

	// Finish is when the last task is expected to start. It is zero if that is unknown, as it is not
	// within inspect.MaxPlan. Binds is the window that it waits for, or throttle.BySlots; empty if for
	// none.
	Finish time.Time `json:"finish,omitzero"`
	Binds  string    `json:"binds,omitempty"`

	FinishBy time.Time `json:"finish_by,omitzero"` // Batch.FinishBy
	Overdue  int       `json:"overdue"`            // tasks that are expected to start after that
	Begins   bool      `json:"begins"`             // false if Batch.Late would refuse the firing

	Tenants []TenantPlan `json:"tenants"`
}

// A TenantPlan is the part of a Plan for one tenant.
type TenantPlan struct {
	Tenant  string    `json:"tenant"`
	Total   int       `json:"total"`
	Overdue int       `json:"overdue"`
	Finish  time.Time `json:"finish,omitzero"`
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
		Finish: p.all.expected(), Binds: p.all.Binds,
		Overdue: p.overdue, Begins: !p.refused, Total: p.total,
	}
	for _, t := range p.Tenants {
		plan.Tenants = append(plan.Tenants, t.TenantPlan)
	}
	return plan, nil
}

// A planned firing is what its tasks are, and when they were expected when it began. Its exported
// fields are kept in Redis.
type planned struct {
	Tenants []planTenant `json:"tenants"`

	all            outlook
	overdue, total int // tasks
	refused        bool
}

// A planTenant is the tasks of one tenant, in their order.
type planTenant struct {
	TenantPlan
	Start int         `json:"start"`           // the position of the first one, if the tasks are as they were counted
	Kinds []*planKind `json:"kinds,omitempty"` // of those that can be enqueued
}

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
	all := func(i int) (left, joined int) { return p.Tenants[i].Total, 0 }
	var err error
	if p.all, err = s.look(ctx, b, p.Tenants, b.planOptions(f.Tick, from), all); err != nil {
		return nil, err
	}
	p.overdue = p.all.overdue
	p.refused = p.overdue > 0 && b.Late == LateRefuse
	for i := range p.Tenants {
		t, of := &p.Tenants[i], p.all.tenants[i]
		t.Start, t.Finish, t.Overdue = p.total, of.expected(), of.overdue
		p.total += t.Total
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
	inspect.Finish
	left    int // how many tasks these are
	overdue int
}

// look finds out when tasks are expected. The function returns how many of a tenant's tasks have not
// started, and how many of these stand in line.
func (s *Scheduler) look(
	ctx context.Context, b *compiled, tenants []planTenant, o inspect.PlanOptions,
	left func(tenant int) (left, joined int),
) (outlook, error) {
	var demands []inspect.Demand
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
			demands = append(demands, inspect.Demand{
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
		f.Finish = inspect.PlanOf(plan.At, rest[:len(t.Kinds)]).Finish
		rest = rest[len(t.Kinds):]
		if !o.By.IsZero() {
			f.overdue = f.left - f.By
			all.overdue += f.overdue
		}
	}
	return all, nil
}

// planTimeout bounds the calls of a plan.
const planTimeout = 20 * time.Second

// expected is the time to report, zero if it is unknown.
func (f finish) expected() time.Time {
	if f.left == 0 || !f.Known {
		return time.Time{}
	}
	return f.Expected.UTC().Truncate(time.Millisecond)
}
