package throttle

import "fmt"

// Warnings describes windows that can never deny, because another window of the same unit and a scope
// at least as wide always denies first. Such a policy is valid, but hardly intended. Each warning is
// one line of text.
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
	grants := algorithms[loose.Algorithm].grantsWithin
	if tight.Unit != loose.Unit || grants == nil {
		return false
	}
	for _, attribute := range tight.Scope.Attributes() {
		if !loose.Scope.has(attribute) {
			return false // loose sums up several counts of tight
		}
	}
	units, span, ok := grants(loose)
	granted := algorithms[tight.Algorithm].unitsIn(tight, span)
	return ok && granted >= 0 && granted <= units
}
