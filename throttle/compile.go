package throttle

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A compiledPolicy is one shard of a policy, with all that can be computed before there is a request.
type compiledPolicy struct {
	Policy            // with defaults
	line     string   // its name: see Policy.lineOfShard
	flowBy   []string // the attributes by which flows differ: all that scopes have, and the tenant
	flowMark string   // of the scopes: see script.FlowMark
	scopes   [][]string
	script   *script.Policy
	settings Policy   // without Match, Tenants and Windows: see Limiter.Match
	units    []string // every unit that a window counts
	upstream []int    // the numbers, from 1, of the scopes that Policy.UpstreamShared selects
	counting []Window // its windows as they count: see Policy.Observe

	*policyState

	removed     atomic.Bool  // it is in force no more
	emptyCounts atomic.Int32 // after it was removed: how many counts in a row found no ticket in its line
	refreshAt   atomic.Int64 // when to refresh the tickets in line (ns since 1970), or refreshNew or refreshUnderWay
}

// A policyState belongs to a line. Each compiled policy of the line takes it over from its predecessor.
type policyState struct {
	group      *script.Group
	claims     *claims
	refreshing sync.Mutex
	serves     atomic.Bool // this process takes from the line
	taker      *script.Taker
}

// compile prepares a policy, which is valid and has its defaults, for the line of one shard. The caller adds its state.
func compile(runner *script.Runner, p Policy, line string, paused func() int64) *compiledPolicy {
	cp := &compiledPolicy{Policy: p, line: line, settings: p, flowBy: []string{TenantAttribute}}
	cp.settings.Match, cp.settings.Tenants, cp.settings.Windows = nil, nil, nil
	for _, w := range p.Windows {
		cp.scopes = append(cp.scopes, append([]string{}, w.Per...))
		cp.flowBy = append(cp.flowBy, w.Per...)
		cp.units = append(cp.units, w.Unit)
	}
	slices.SortFunc(cp.scopes, func(a, b []string) int {
		return cmp.Or(cmp.Compare(len(b), len(a)), slices.Compare(a, b))
	})
	cp.scopes = slices.CompactFunc(cp.scopes, slices.Equal)
	cp.units = sortedSet(cp.units) // so that costs are written alike, whatever the order of windows
	cp.flowBy = sortedSet(cp.flowBy)

	sp := &script.Policy{BatchShare: p.BatchShare, Line: line, Paused: paused}
	var everyScope []int
	for i, attributes := range cp.scopes {
		ofTenant := slices.Contains(attributes, TenantAttribute)
		sp.Scopes = append(sp.Scopes, script.Scope{Attributes: strings.Join(attributes, ","), OfTenant: ofTenant})
		everyScope = append(everyScope, i+1)
		if shared := !ofTenant; shared == p.UpstreamShared {
			cp.upstream = append(cp.upstream, i+1)
		}
	}
	if cp.upstream == nil { // UpstreamShared selects no scope
		cp.upstream = everyScope
	}
	cp.flowMark = script.FlowMark(sp.Scopes)
	for i, w := range p.Windows {
		if p.Observe {
			w = w.underObserve()
		}
		a := w.Algorithm.side()
		scope := slices.IndexFunc(cp.scopes, func(s []string) bool { return slices.Equal(s, w.Per) })
		sw := script.Window{Scope: scope + 1, Name: w.Name, Kind: a.Kind, Unit: w.Unit, Params: a.Params(w.numbers())}
		if a.Ticks != nil {
			sw.List = a.Ticks(w.numbers()).Around
		}
		sp.Windows, sp.Leases = append(sp.Windows, sw), sp.Leases || a.Leases
		sp.Scopes[scope].Windows = append(sp.Scopes[scope].Windows, i+1)
		sp.Algorithms = append(sp.Algorithms, a.File)
		cp.counting = append(cp.counting, w)
	}
	sp.Algorithms = sortedSet(sp.Algorithms)
	cp.script = runner.Prepare(sp)
	return cp
}

// underObserve returns a window as a policy that observes counts it. Without Observe, units above the limit would wait,
// and count later. A window that forgets them cannot show for how long. So it counts as a GCRA window: that works as a
// virtual queue, which drains at the rate of the limit.
func (w Window) underObserve() Window {
	if w.Algorithm.side().ForgetsExcess {
		w.Algorithm, w.Burst = AlgorithmGCRA, w.Limit
	}
	return w
}

func sortedSet(texts []string) []string {
	slices.Sort(texts)
	return slices.Compact(texts)
}
