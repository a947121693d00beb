package throttle

import "fmt"

// Warnings tells what is legal in a policy but cannot be meant: windows that can never bind,
// because another one that counts at least the same units always denies first.
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

// alwaysFirst reports whether tight lets so little through, for whichever tenant, that loose is
// never exceeded.
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
			return false // loose adds up over several counts of tight
		}
	}
	units, span, ok := grants(loose)
	most := algorithms[tight.Algorithm].unitsIn(tight, span)
	return ok && most >= 0 && most <= units
}
