package page

import (
	"cmp"
	"context"
	"slices"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/usage"
)

// A chosenView is one policy, or one of its tenants, in detail.
type chosenView struct {
	policyView
	Config   throttle.Policy          // the zero Policy if there is none of this name
	Tenant   string                   // the only one that is shown; if empty, all are
	Override *throttle.TenantOverride // of Tenant or, if it is empty, of all tenants; nil if none is in force
	Paused   *throttle.Pause          // the same of an operator's pause
	// Shown if Tenant is empty:
	Charts  *charts     // nil if there is nothing to draw
	Used    []usage.Use // in the last hour
	Rows    []tenantRow // the tenants that the filter lets through
	Filters []filter
	// Shown of Tenant, which has a state for each of its queues, classes and other attributes:
	Tickets   int64          // its tickets that wait, in all states
	LastState *inspect.State // of its tickets that are expected to start last; nil if Tenant is empty
}

// A tenantRow is a tenant in the list.
type tenantRow struct {
	inspect.State
	Status status
}

// A filter of the list of tenants lets N of them through.
type filter struct {
	Key, Name string
	N         int
}

// filterKeys are the keys of all filters but "All". A status has those that let it through.
var filterKeys = []string{"starving", "paused", "overridden", "full"}

// chosen describes the policy that the question asks for.
func (p *Page) chosen(ctx context.Context, v *view) *chosenView {
	q := v.Asked
	c := &chosenView{Tenant: q.Tenant}
	c.Paused, c.Override = v.byHand(q.Policy, q.Tenant)
	for _, policy := range append(p.config.Limiter.Policies(), v.InForce.Removed...) {
		if policy.Name == q.Policy && c.Config.Name == "" { // a removed one may have other shards
			c.Config = policy
		}
	}
	c.policyView = p.policy(ctx, v, inspect.Query{After: q.After, Policy: q.Policy, Tenant: q.Tenant})
	named := slices.IndexFunc(spans, func(s span) bool { return s.Name == q.Span })
	span := spans[max(0, named)]
	c.Charts = chartsOf(p.points(ctx, []string{q.Policy}, span.Length)[q.Policy], span.Name, c.policyView)
	if q.Tenant == "" {
		c.Used, _ = cached(ctx, &p.limiterAnswers, "used\x00"+q.Policy, func(ctx context.Context) ([]usage.Use, error) {
			return usage.Top(ctx, p.config.Limiter, q.Policy, 10)
		})
	}
	for i, t := range c.Tenants {
		if q.Tenant != "" && (i == 0 || t.Expected.After(c.LastState.Expected)) {
			c.LastState = &c.Tenants[i]
		}
		c.Tickets += t.Waiting
	}
	c.listTenants(v)
	return c
}

// listTenants filters and sorts the tenants that are shown.
func (c *chosenView) listTenants(v *view) {
	var rows []tenantRow
	n := map[string]int{} // how many each filter lets through
	for _, t := range c.Tenants {
		row := tenantRow{t, c.tenantStatus(v, t)}
		rows = append(rows, row)
		for _, key := range row.Status.Filters {
			n[key]++
		}
	}
	c.Filters = []filter{{"", "All", len(rows)}}
	for _, key := range filterKeys {
		c.Filters = append(c.Filters, filter{key, sentence(key), n[key]})
	}
	if only := v.Asked.Only; slices.Contains(filterKeys, only) {
		rows = slices.DeleteFunc(rows, func(r tenantRow) bool { return !slices.Contains(r.Status.Filters, only) })
	}
	slices.SortStableFunc(rows, func(a, b tenantRow) int {
		switch v.Asked.Sort {
		case "name":
			return cmp.Compare(a.Tenant, b.Tenant)
		case "waiting":
			return cmp.Compare(b.Waiting, a.Waiting)
		case "longest":
			return a.Oldest.Compare(b.Oldest)
		case "last":
			return b.Expected.Compare(a.Expected)
		}
		return cmp.Or(cmp.Compare(b.Status.Trouble, a.Status.Trouble), a.Oldest.Compare(b.Oldest))
	})
	c.Rows = rows
}
