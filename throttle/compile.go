package throttle

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A compiledPolicy is a policy made ready for calls: everything that does not depend on the request is
// worked out once. It does not change.
type compiledPolicy struct {
	Policy
	flowBy   []string // the attributes of all scopes and the tenant: who waits in one flow
	flowMark string   // of the scopes
	leases   bool     // some window does
	scopes   [][]string
	scopeOf  []int // by window: its place in scopes
	script   *script.Policy
	units    []string     // every unit that a window counts
	upstream []int        // the places, from 1, of the scopes that the upstream's word is about
	params   [][4]int64   // by window
	known    []*algorithm // by window

	*perName

	drained   atomic.Bool  // it was removed, and nobody waits any more
	refreshAt atomic.Int64 // when to refresh standing tickets (ns); never again once that was done
}

// perName is what all compiled policies of one name have in common: the second one of a name takes
// over from the first.
type perName struct {
	batcher    *script.Batcher
	claims     *claims
	taker      *script.Taker
	refreshing sync.Mutex
}

// compilePolicy returns a *PolicyError if the policy is not valid.
func compilePolicy(p Policy, library *script.Library) (*compiledPolicy, error) {
	p = p.WithDefaults()
	if err := p.Validate(); err != nil {
		return nil, err
	}
	cp := &compiledPolicy{Policy: p}
	flowBy := []string{TenantAttribute}
	for _, w := range p.Windows {
		attributes := w.Scope.Attributes()
		if !slices.ContainsFunc(cp.scopes, func(s []string) bool { return slices.Equal(s, attributes) }) {
			cp.scopes = append(cp.scopes, attributes)
			flowBy = append(flowBy, attributes...)
		}
		if !slices.Contains(cp.units, w.Unit) {
			cp.units = append(cp.units, w.Unit)
		}
	}
	slices.SortFunc(cp.scopes, func(a, b []string) int {
		if len(a) != len(b) {
			return len(b) - len(a)
		}
		return slices.Compare(a, b)
	})
	slices.Sort(cp.units) // so that costs are written alike, whatever the order of windows
	slices.Sort(flowBy)
	cp.flowBy = slices.Compact(flowBy)

	sp := &script.Policy{Name: p.Name}
	for i, attributes := range cp.scopes {
		sp.Scopes = append(sp.Scopes, strings.Join(attributes, ","))
		if slices.Contains(attributes, TenantAttribute) == (p.Upstream == UpstreamTenant) {
			cp.upstream = append(cp.upstream, i+1)
		}
	}
	if cp.upstream == nil {
		for i := range cp.scopes {
			cp.upstream = append(cp.upstream, i+1)
		}
	}
	cp.flowMark = script.FlowMark(sp.Scopes)
	for _, w := range p.Windows {
		a := algorithms[w.Algorithm]
		attributes := w.Scope.Attributes()
		scope := slices.IndexFunc(cp.scopes, func(s []string) bool { return slices.Equal(s, attributes) })
		window := script.Window{Scope: scope + 1, Name: w.Name, Kind: a.kind, Unit: w.Unit, Leases: a.leases, Params: a.params(w)}
		if a.ticks != nil {
			window.List = a.ticks(w).around
		}
		sp.Windows = append(sp.Windows, window)
		sp.Algorithms = append(sp.Algorithms, a.file)
		cp.scopeOf = append(cp.scopeOf, scope)
		cp.known = append(cp.known, a)
		cp.params = append(cp.params, window.Params)
		cp.leases = cp.leases || a.leases
	}
	slices.Sort(sp.Algorithms)
	sp.Algorithms = slices.Compact(sp.Algorithms)
	cp.script = library.Prepare(sp)
	return cp, nil
}
