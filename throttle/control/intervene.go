package control

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// SetOverride puts an override of one tenant in force for a time, above 0 and at most throttle.MaxPeriod. It
// replaces the tenant's earlier one. Its Author, Until and Why are ignored. It must fit the published policies.
// Without a tenant it changes windows of a published policy, shared ones too, for all without a limit of their own.
//
// Errors are a *throttle.PolicyError, an InputError, or one of Redis; or 1,000 overrides and pauses are in force.
func (s *Store) SetOverride(ctx context.Context, o throttle.TenantOverride, ttl time.Duration, author Author) error {
	state, err := s.checkedState(ctx, o.Policy, o.Tenant, ttl, author)
	if err != nil {
		return err
	}
	switch {
	case o.Tenant == "" && (o.Exempt != nil || o.Weight != 0):
		return invalid("tenant is missing: weights and exemptions are of one tenant")
	case o.Exempt == nil && o.Weight == 0 && len(o.Windows) == 0:
		return invalid("the override of tenant %q is empty: "+
			"must change a limit, the weight or whether it is exempt", quote.Short(o.Tenant))
	case o.Weight != 0 && !(o.Weight >= 0.001 && o.Weight <= maxWeight):
		return invalid("weight %v: must be 0.001 to 1000000", o.Weight)
	}
	if o.Tenant == "" || state.Policies != nil { // if none are published, followers check the override
		policies, err := state.With(o)
		if err == nil {
			_, err = s.newLimiter(policies)
		}
		if err != nil {
			return err
		}
	}
	o.Author, o.Until, o.Why = author.Who, time.Time{}, author.Why
	c := Change{Kind: Overridden, Author: author, Policy: o.Policy, Tenant: o.Tenant, Text: DescribeOverride(o) + " "}
	return s.intervene(ctx, c, o, ttl, state)
}

// With returns the published policies with an override of one tenant, or of windows for all. The error is a
// *throttle.PolicyError. A burst that has its default changes with its limit.
func (s State) With(o throttle.TenantOverride) ([]throttle.Policy, error) {
	policies := slices.Clone(s.Policies)
	i := slices.IndexFunc(policies, func(p throttle.Policy) bool { return p.Name == o.Policy })
	if i < 0 {
		return nil, &throttle.PolicyError{Policy: o.Policy, Field: "name", Value: o.Policy, Hint: "must be a published policy"}
	}
	p := policies[i].WithDefaults() // a copy, whose lists and maps are changed below
	policies[i] = p
	if o.Tenant != "" {
		p.Tenants[o.Tenant] = p.Tenants[o.Tenant].With(o)
		return policies, nil
	}
	for name, change := range o.Windows {
		w := slices.IndexFunc(p.Windows, func(w throttle.Window) bool { return w.Name == name })
		if w < 0 {
			return nil, &throttle.PolicyError{Policy: o.Policy, Field: "window", Value: name, Hint: "must be a window of the policy"}
		}
		p.Windows[w] = p.Windows[w].With(change)
	}
	return policies, p.Validate()
}

// Front returns the override by which a tenant goes first for a time. It keeps what the tenant's present override
// changes. If that override ends later, the error is an InputError, unless the tenant goes first by it already.
func (s State) Front(policy, tenant string, ttl time.Duration) (throttle.TenantOverride, error) {
	o := throttle.TenantOverride{Policy: policy, Tenant: tenant}
	for _, current := range s.Overrides {
		if current.Policy == policy && current.Tenant == tenant {
			o = current
		}
	}
	if o.Weight != maxWeight && o.Until.Sub(s.At) > ttl {
		return o, invalid("tenant %q of %s has an override by %q until %s UTC: clear that, or let the tenant go first for as long",
			quote.Short(tenant), policy, quote.Short(o.Author), o.Until.Format(time.DateTime))
	}
	o.Weight = maxWeight
	return o, nil
}

// Effective returns the published policies with the overrides for all tenants applied, and the other interventions.
func (s State) Effective() ([]throttle.Policy, throttle.Interventions) {
	others := s.Interventions
	others.Overrides = nil
	for _, o := range s.Overrides {
		if o.Tenant != "" {
			others.Overrides = append(others.Overrides, o)
		} else if policies, err := s.With(o); err == nil { // after an error the override suits no present policy
			s.Policies = policies // of this copy of the state
		}
	}
	return s.Policies, others
}

// DescribeOverride lists the changes of an override, such as "minute 50 burst 5, weight 3, exempt".
func DescribeOverride(o throttle.TenantOverride) string {
	var parts []string
	for name, change := range o.Windows {
		text := name
		if change.Limit > 0 {
			text += fmt.Sprintf(" %d", change.Limit)
		}
		if change.Burst > 0 {
			text += fmt.Sprintf(" burst %d", change.Burst)
		}
		parts = append(parts, text)
	}
	slices.Sort(parts)
	if o.Weight == maxWeight {
		parts = append(parts, "goes first")
	} else if o.Weight > 0 {
		parts = append(parts, fmt.Sprintf("weight %v", o.Weight))
	}
	if o.Exempt != nil {
		parts = append(parts, map[bool]string{true: "exempt", false: "not exempt"}[*o.Exempt])
	}
	return strings.Join(parts, ", ")
}

// Describe describes a tenant's override, or for kind Paused its pause: end, author, reason. It is empty without one.
func (s State) Describe(kind, policy, tenant string) string {
	until := func(end time.Time, who, why string) string {
		return fmt.Sprintf(" until %s UTC by %s: %s", end.UTC().Format(time.DateTime), quote.Name(who), quote.Name(why))
	}
	for _, o := range s.Overrides {
		if kind == Overridden && o.Policy == policy && o.Tenant == tenant {
			return DescribeOverride(o) + until(o.Until, o.Author, o.Why)
		}
	}
	for _, p := range s.Pauses {
		if kind == Paused && p.Policy == policy && p.Tenant == tenant {
			return "a pause" + until(p.Until, p.Author, p.Cause)
		}
	}
	return ""
}

// Pause stops grants of a policy to a tenant, or with "" to all, for a time: above 0 and at most
// throttle.MaxPeriod. It replaces an earlier pause. Tasks that run go on. If policies were published, the policy
// must be one of them, or one removed since. Errors are SetOverride's.
func (s *Store) Pause(ctx context.Context, policy, tenant string, d time.Duration, author Author) error {
	state, err := s.checkedState(ctx, policy, tenant, d, author)
	if err != nil {
		return err
	}
	named := func(p throttle.Policy) bool { return p.Name == policy }
	if state.Policies != nil && !slices.ContainsFunc(slices.Concat(state.Policies, state.Removed), named) {
		return &throttle.PolicyError{Policy: policy, Field: "name", Value: policy,
			Hint: "must be the name of a policy in force, or of one removed since"}
	}
	pause := throttle.Pause{Author: author.Who, ByHand: true, Cause: author.Why, Policy: policy, Tenant: tenant}
	return s.intervene(ctx, Change{Kind: Paused, Author: author, Policy: policy, Tenant: tenant}, pause, d, state)
}

// End ends the override of a tenant (kind Cleared) or the pause by an operator (Resumed); the tenant "" stands
// for all. It reports whether there was one. For pauses by an upstream see throttle.Limiter.Resume. Errors are
// SetOverride's.
func (s *Store) End(ctx context.Context, kind, policy, tenant string, author Author) (found bool, err error) {
	field := fieldOf(map[string]string{Cleared: Overridden, Resumed: Paused}[kind], policy, tenant)
	version, err := s.change(ctx, write{field: field}, Change{Kind: kind, Author: author, Policy: policy, Tenant: tenant})
	return version > 0, err
}

// intervene stores an override or a pause.
func (s *Store) intervene(ctx context.Context, c Change, overrideOrPause any, ttl time.Duration, old State) error {
	data, _ := json.Marshal(overrideOrPause) // texts, and numbers that were checked
	c.Text += "for " + words.Span(ttl)
	if replaced := old.Describe(c.Kind, c.Policy, c.Tenant); replaced != "" {
		c.Text += ", instead of " + replaced
	}
	_, err := s.change(ctx, write{field: fieldOf(c.Kind, c.Policy, c.Tenant), value: string(data), ttl: ttl}, c)
	return err
}

// checkedState checks the arguments of an override or a pause, and returns the state that it changes.
func (s *Store) checkedState(ctx context.Context, policy, tenant string, ttl time.Duration, author Author) (State, error) {
	switch err := author.validate(); {
	case policy == "" || len(policy) > 64 || strings.Contains(policy, " "):
		return State{}, invalid("policy %q: must be the name of a policy", quote.Short(policy))
	case len(tenant) > throttle.MaxValueBytes:
		return State{}, invalid("tenant %q: must be at most %d bytes", quote.Short(tenant), throttle.MaxValueBytes)
	case ttl < time.Microsecond || ttl > throttle.MaxPeriod:
		return State{}, invalid("duration %v: must be above 0 and at most %v", ttl, throttle.MaxPeriod)
	case err != nil:
		return State{}, err
	}
	return s.State(ctx)
}
