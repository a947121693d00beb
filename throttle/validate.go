package throttle

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// A PolicyError says which value of a policy is invalid, and what would be valid.
type PolicyError struct {
	Policy string // the policy's name
	Window string // the window's name, or ""
	Tenant string // the tenant's name, or ""
	Field  string // the field as policy files spell it
	Value  any    // the invalid value
	Hint   string // what it must be
}

func (e *PolicyError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "throttle: policy %q", e.Policy)
	if e.Tenant != "" {
		fmt.Fprintf(&b, ", tenant %q", e.Tenant)
	}
	if e.Window != "" {
		fmt.Fprintf(&b, ", window %q", e.Window)
	}
	value := fmt.Sprint(e.Value)
	if s, ok := e.Value.(string); ok {
		value = fmt.Sprintf("%q", s)
	}
	fmt.Fprintf(&b, ": %s %s: %s", e.Field, value, e.Hint)
	return b.String()
}

var (
	nameShape = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)
	nameHint  = "must be 1 to 64 of the characters A-Z a-z 0-9 _ . -"
)

// Validate returns a *PolicyError that names the first invalid value, or nil. Fields that are not
// set have their defaults.
func (p Policy) Validate() error {
	p = p.WithDefaults()
	for _, check := range []struct {
		valid bool
		field string
		value any
		hint  string
	}{
		{nameShape.MatchString(p.Name), "name", p.Name, nameHint},
		{slices.Contains(adapts, p.Adapt), "adapt", string(p.Adapt), `must be "off", "spread" or "full"`},
		{p.BatchShare >= MinBatchShare && p.BatchShare <= MaxBatchShare, // NaN is not
			"batch_share", p.BatchShare, fmt.Sprintf("must be %v to %v", MinBatchShare, MaxBatchShare)},
		{p.Fail == FailClosed || p.Fail == FailOpen, "fail", string(p.Fail), `must be "closed" or "open"`},
		{p.Mode == ModeEnforce || p.Mode == ModeObserve, "mode", string(p.Mode), `must be "enforce" or "observe"`},
		{p.Requeue == RequeueWhenFits || p.Requeue == RequeueEarliestReset,
			"requeue", string(p.Requeue), `must be "when-fits" or "earliest-reset"`},
		{p.Shards >= 1 && p.Shards <= MaxShards, "shards", p.Shards, fmt.Sprintf("must be 1 to %d", MaxShards)},
		{p.Upstream == UpstreamTenant || p.Upstream == UpstreamShared, "upstream", string(p.Upstream), `must be "tenant" or "shared"`},
		{p.MaxPause >= time.Millisecond && p.MaxPause <= MaxPeriod && p.MaxPause%time.Microsecond == 0,
			"max_pause", p.MaxPause, fmt.Sprintf("must be 1ms to %v, in whole microseconds", MaxPeriod)},
		{p.MaxRefusals >= 0 && p.MaxRefusals <= MaxLimit,
			"max_refusals", p.MaxRefusals, fmt.Sprintf("must be 1 to %d, or left out for no limit", int64(MaxLimit))},
		{p.MaxRefusedWait >= 0 && p.MaxRefusedWait <= MaxPeriod,
			"max_refused_wait", p.MaxRefusedWait, fmt.Sprintf("must be above 0 and at most %v, or left out for no limit", MaxPeriod)},
	} {
		if !check.valid {
			return &PolicyError{Policy: p.Name, Field: check.field, Value: check.value, Hint: check.hint}
		}
	}
	bad := func(field string, value any, hint string) error {
		return &PolicyError{Policy: p.Name, Field: field, Value: value, Hint: hint}
	}
	for i, glob := range p.Match {
		if glob == "" {
			return bad(fmt.Sprintf("match[%d]", i), glob, `must be a task type or a glob such as "http:*"`)
		}
		if len(glob) > MaxGlobBytes {
			return bad(fmt.Sprintf("match[%d]", i), quote.Short(glob), fmt.Sprintf("must be at most %d bytes", MaxGlobBytes))
		}
	}
	if len(p.Windows) == 0 || len(p.Windows) > MaxWindows {
		return bad("windows", len(p.Windows), fmt.Sprintf("must be 1 to %d windows", MaxWindows))
	}
	names := map[string]bool{}
	for _, w := range p.Windows {
		if err := w.validate(p.Name); err != nil {
			return err
		}
		if names[w.Name] {
			return &PolicyError{p.Name, w.Name, "", "name", w.Name, "is taken: windows of one policy have different names"}
		}
		if p.Shards > 1 && !w.Scope.has(TenantAttribute) {
			return bad("shards", p.Shards, fmt.Sprintf(
				"must be left out: tenants share window %q, and so it counts in one place; "+
					"count it per tenant, or split its limit between policies", w.Name))
		}
		names[w.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(p.Tenants)) {
		if err := p.validateTenant(name, p.Tenants[name]); err != nil {
			return err
		}
	}
	return nil
}

func (w Window) validate(policy string) error {
	field, value, hint := w.invalid()
	if hint == "" {
		return nil
	}
	return &PolicyError{Policy: policy, Window: w.Name, Field: field, Value: value, Hint: hint}
}

// invalid returns the first field that cannot be used, its value, and what it must be. The hint is
// empty if all is well.
func (w Window) invalid() (field string, value any, hint string) {
	const whole = "must be whole microseconds"
	a, per := algorithms[w.Algorithm], w.Scope.Attributes()
	switch {
	case !nameShape.MatchString(w.Name):
		return "name", w.Name, nameHint
	case a == nil:
		return "algorithm", string(w.Algorithm), "must be one of " + algorithmNames()
	case w.Limit < 1 || w.Limit > MaxLimit:
		return "limit", w.Limit, fmt.Sprintf("must be 1 to %d", int64(MaxLimit))
	}
	timed := a.Has(algorithm.OptionPeriod)
	notFor := `is not for windows with "algorithm: ` + string(w.Algorithm) + `"`
	switch {
	case !timed && w.Period != 0:
		return "period", w.Period, notFor
	case timed && w.Period < MinPeriod:
		return "period", w.Period, "must be at least 1ms"
	case w.Period > MaxPeriod:
		return "period", w.Period, fmt.Sprintf("must be at most %v", MaxPeriod)
	case w.Period%time.Microsecond != 0:
		return "period", w.Period, whole
	case w.Margin != 0 && !a.Has(algorithm.OptionMargin):
		return "margin", w.Margin, notFor
	case w.Margin < 0 || timed && w.Margin > w.Period:
		return "margin", w.Margin, fmt.Sprintf("must be 0 to the period, %v", w.Period)
	case w.Margin > MaxPeriod:
		return "margin", w.Margin, fmt.Sprintf("must be at most %v", MaxPeriod)
	case w.Margin%time.Microsecond != 0:
		return "margin", w.Margin, whole
	case !nameShape.MatchString(w.Unit):
		return "unit", w.Unit, nameHint
	case len(per) > MaxAttributes:
		return "per", per, fmt.Sprintf("must be at most %d attributes", MaxAttributes)
	case len(slices.Compact(slices.Clone(per))) < len(per):
		return "per", per, "must name every attribute once"
	}
	for _, attribute := range per {
		if !nameShape.MatchString(attribute) {
			return "per", attribute, nameHint
		}
	}
	for _, f := range []struct {
		option algorithm.Option
		value  any
		set    bool
	}{
		{algorithm.OptionBurst, w.Burst, w.Burst != 0},
		{algorithm.OptionLease, w.Lease, w.Lease != 0},
		{algorithm.OptionResets, w.Resets, w.Resets != ""},
		{algorithm.OptionTimezone, w.Timezone, w.Timezone != ""},
		{algorithm.OptionAnchor, string(w.Anchor), w.Anchor != ""},
	} {
		if f.set && !a.Has(f.option) {
			only := strings.ReplaceAll(algorithmNames(f.option), `"`, "")
			return string(f.option), f.value, `is for windows with "algorithm: ` + only + `"`
		}
	}
	if a.Rule == nil {
		return "", nil, ""
	}
	return a.Rule(w.numbers())
}

func (p Policy) validateTenant(name string, t Tenant) error {
	bad := func(field string, value any, hint string) error {
		return &PolicyError{Policy: p.Name, Tenant: name, Field: field, Value: value, Hint: hint}
	}
	if name == "" || len(name) > MaxValueBytes {
		return bad("tenant", name, fmt.Sprintf("must be 1 to %d bytes", MaxValueBytes))
	}
	if !(t.Weight > 0 && t.Weight <= 1e6) || math.IsNaN(t.Weight) {
		return bad("weight", t.Weight, "must be above 0 and at most 1000000")
	}
	for _, window := range slices.Sorted(maps.Keys(t.Windows)) {
		i := slices.IndexFunc(p.Windows, func(w Window) bool { return w.Name == window })
		if i < 0 {
			return bad("windows", window, "must be the name of a window of this policy")
		}
		if !p.Windows[i].Scope.has(TenantAttribute) {
			return bad("windows", window, "is shared: a tenant has a limit of its own only where the scope contains tenant")
		}
		if err := t.apply(p.Windows[i]).validate(p.Name); err != nil {
			err := err.(*PolicyError)
			err.Tenant = name
			return err
		}
	}
	return nil
}

// Warnings describes windows that can never deny, because another window of the same unit and a
// scope at least as wide always denies first. Such a policy is valid, but hardly intended. Each
// warning is one line of text.
func (p Policy) Warnings() []string {
	p = p.WithDefaults()
	var warnings []string
	idle := map[int]bool{}
	for i, loose := range p.Windows {
		for j, tight := range p.Windows {
			if i == j || idle[j] || !p.alwaysFirst(tight, loose) {
				continue
			}
			idle[i] = true
			warnings = append(warnings, fmt.Sprintf(
				"policy %q: window %q (%d per %v) can never bind: window %q (%d per %v) always denies first",
				p.Name, loose.Name, loose.Limit, loose.Period, tight.Name, tight.Limit, tight.Period))
			break
		}
	}
	return warnings
}

// alwaysFirst reports whether tight, for every tenant, grants so little that loose never denies.
func (p Policy) alwaysFirst(tight, loose Window) bool {
	for _, t := range p.Tenants {
		if !alwaysFirst(t.apply(tight), t.apply(loose)) {
			return false
		}
	}
	return alwaysFirst(tight, loose)
}

func alwaysFirst(tight, loose Window) bool {
	grants, lets := algorithms[loose.Algorithm].GrantsWithin, algorithms[tight.Algorithm].UnitsIn
	if tight.Unit != loose.Unit || grants == nil || lets == nil {
		return false
	}
	for _, attribute := range tight.Scope.Attributes() {
		if !loose.Scope.has(attribute) {
			return false // loose sums up several counts of tight
		}
	}
	units, span, ok := grants(loose.numbers())
	granted := lets(tight.numbers(), span)
	return ok && granted >= 0 && granted <= units
}
