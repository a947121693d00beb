package throttle

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A TenantOverride replaces settings of one tenant in a policy, until a time. Zero fields replace nothing.
type TenantOverride struct {
	Author  string              `json:"author"`            // who has set it
	Exempt  *bool               `json:"exempt,omitempty"`  // whether the tenant is exempt
	Policy  string              `json:"policy"`            // its name
	Tenant  string              `json:"tenant"`            // its name
	Until   time.Time           `json:"until,omitzero"`    // when it ends, by the clock of Redis
	Weight  float64             `json:"weight,omitempty"`  // 0.001 to 1e6
	Why     string              `json:"why"`               // the reason
	Windows map[string]Override `json:"windows,omitempty"` // as Tenant.Windows: each instead of the tenant's own
}

// Interventions are the overrides and pauses that operators have put in force for a while. Limiters copy the
// lists, but share what Exempt and Windows point to: do not change that afterwards.
type Interventions struct {
	At        time.Time        // now, by the clock of Redis; zero for this machine's
	Overrides []TenantOverride // one for each policy and tenant
	Pauses    []Pause          // one for each policy, and for each tenant of it; they apply to exempt tenants, too
}

// InForce returns the interventions that have not ended at a time.
func (i Interventions) InForce(at time.Time) Interventions {
	i.At = at
	i.Overrides = slices.DeleteFunc(slices.Clone(i.Overrides), func(o TenantOverride) bool { return !o.Until.After(at) })
	i.Pauses = slices.DeleteFunc(slices.Clone(i.Pauses), func(p Pause) bool { return !p.Until.After(at) })
	return i
}

// A target names a policy, and a tenant of it, or "" for all.
type target struct{ policy, tenant string }

// An intervention has the override and the pause in force for one target. Each is zero if there is none.
type intervention struct {
	override TenantOverride
	pause    Pause
}

// interventions are Interventions, with those in force by their targets.
type interventions struct {
	all     Interventions
	inForce map[target]intervention
	offset  time.Duration // how far the clock of Redis is ahead of this machine's
}

// An effectiveTenant is a tenant as operators have changed it.
type effectiveTenant struct {
	Tenant
	pauses [3]Pause // operators': script.OfPolicy and script.OfTenant; zero without one
}

// paused reports whether operators pause the tenant. It decides only where Redis is not asked.
func (t effectiveTenant) paused() bool { return t.pauses != [3]Pause{} }

// SetInterventions replaces what operators have put in force in this process, for calls that begin later. Each ends
// by itself. Tickets that wait follow within seconds, and once one has ended at the next refresh, mostly within a
// minute. An override that does not suit its policy, and an override or pause whose policy does not exist, has no effect
// until that changes. Package control calls this, and so does a program that keeps overrides elsewhere.
func (l *Limiter) SetInterventions(i Interventions) {
	now := &interventions{all: i.InForce(i.At), inForce: map[target]intervention{}, offset: time.Until(cmp.Or(i.At, time.Now()))}
	for _, o := range now.all.Overrides {
		now.inForce[target{o.Policy, o.Tenant}] = intervention{override: o}
	}
	for _, p := range now.all.Pauses {
		p.ByHand = true
		t := target{p.Policy, p.Tenant}
		now.inForce[t] = intervention{now.inForce[t].override, p}
	}
	l.setting.Lock()
	defer l.setting.Unlock()
	before := l.interventions.Swap(now)
	changed := maps.Clone(now.inForce) // only its keys count: the targets that have an intervention, or had one
	maps.Copy(changed, before.inForce)
	for cp := range l.policies.Load().live {
		tenants := map[string]bool{} // tickets in line carry settings of their tenants
		for t := range changed {
			if t.policy == cp.Name && t.tenant != "" {
				tenants[t.tenant] = true
			}
		}
		if len(tenants) > 0 && cp.serves.Load() { // other processes refresh the lines that they serve
			cp.refreshAt.Store(time.Now().Add(followWithin).UnixNano())      // clients may join by older settings until then
			go func() { _ = l.refresh(context.Background(), cp, tenants) }() // if it fails, a take refreshes at refreshAt
		}
	}
}

// Interventions returns what operators have put in force in this process and has not ended, as of now.
func (l *Limiter) Interventions() Interventions {
	now := l.interventions.Load()
	return now.all.InForce(time.Now().Add(now.offset))
}

// applyTo returns a tenant's settings as operators have changed them.
func (now *interventions) applyTo(cp *compiledPolicy, name string, settings Tenant) effectiveTenant {
	t := effectiveTenant{Tenant: settings}
	if len(now.inForce) == 0 {
		return t
	}
	if override := now.inForce[target{cp.Name, name}].override; now.left(override.Until) > 0 {
		if changed := settings.With(override); len(cp.checkTenant(name, changed)) == 0 {
			t.Tenant = changed
		}
	}
	if t.pauses[script.OfPolicy] = now.pause(target{policy: cp.Name}); name != "" {
		t.pauses[script.OfTenant] = now.pause(target{cp.Name, name})
	}
	return t
}

// pause returns operators' pause of a target, or a zero one.
func (now *interventions) pause(t target) Pause {
	if p := now.inForce[t].pause; now.left(p.Until) > 0 {
		return p
	}
	return Pause{}
}

// ends returns when operators' pause ends (us), or 0 for a zero one.
func (p Pause) ends() int64 { return max(0, p.Until.UnixMicro()) }

// left returns how long it is until a time by the clock of Redis.
func (now *interventions) left(until time.Time) time.Duration {
	return time.Until(until.Add(-now.offset))
}

// With returns the tenant's settings, with defaults, as an override changes them.
func (t Tenant) With(o TenantOverride) Tenant {
	t = t.withDefaults() // a copy
	t.Weight = cmp.Or(o.Weight, t.Weight)
	if o.Exempt != nil {
		t.Exempt = *o.Exempt
	}
	if t.Windows == nil {
		t.Windows = map[string]Override{}
	}
	maps.Copy(t.Windows, o.Windows)
	return t
}
