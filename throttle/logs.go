package throttle

import (
	"maps"
	"reflect"
	"slices"
)

// logRefusal logs the refusal that starts a pause.
func (l *Limiter) logRefusal(refusal Refusal) {
	if refusal.Pause <= 0 {
		return
	}
	about := []any{"policy", refusal.Policy, "tenant", refusal.Tenant, "for", refusal.Pause}
	if refusal.Adapted != nil {
		about = append(about, "rate", refusal.Adapted.String())
	}
	l.config.Logger.Warn("throttle: the upstream refused a call: its policy pauses", about...)
}

func (l *Limiter) logPolicies(before, now *policySet) {
	names := map[string][]string{}
	for _, name := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(before.names, now.names)))) {
		switch was, is := before.byName[name], now.byName[name]; {
		case was == nil:
			names["added"] = append(names["added"], name)
		case is == nil:
			names["removed"] = append(names["removed"], name)
		case !reflect.DeepEqual(was[0].declared, is[0].declared):
			names["changed"] = append(names["changed"], name)
		}
	}
	var about []any
	for _, what := range slices.Sorted(maps.Keys(names)) {
		about = append(about, what, names[what])
	}
	if about != nil {
		l.config.Logger.Info("throttle: the policies were replaced", about...)
	}
}
