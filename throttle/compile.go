package throttle

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A policySet is all policies of a limiter. It does not change: SetPolicies makes a new one.
type policySet struct {
	list    []*compiledPolicy
	byName  map[string]*compiledPolicy
	former  map[string]*compiledPolicy // those that SetPolicies removed
	matched sync.Map                   // task type -> *compiledPolicy or nil, for the types seen so far
	seen    atomic.Int64
}

// maxMatched bounds how many task types are remembered: types are data.
const maxMatched = 10_000

func compile(policies []Policy, library *script.Library) (*policySet, error) {
	set := &policySet{byName: make(map[string]*compiledPolicy, len(policies))}
	for _, p := range policies {
		cp, err := compilePolicy(p, library)
		if err != nil {
			return nil, err
		}
		if set.byName[p.Name] != nil {
			return nil, &PolicyError{Policy: p.Name, Field: "name", Value: p.Name, Mend: "is taken: policies have different names"}
		}
		for _, other := range set.list {
			if a, b, ok := overlap(other.Match, p.Match); ok {
				return nil, &PolicyError{Policy: p.Name, Field: "match", Value: b, Mend: fmt.Sprintf(
					"must not match a task type that policy %q matches too, by %q", other.Name, a)}
			}
		}
		set.byName[p.Name] = cp
		set.list = append(set.list, cp)
	}
	return set, nil
}

func overlap(as, bs []string) (a, b string, ok bool) {
	for _, a := range as {
		for _, b := range bs {
			if GlobsOverlap(a, b) {
				return a, b, true
			}
		}
	}
	return "", "", false
}

// match returns the policy whose globs match the task type, or nil.
func (set *policySet) match(taskType string) *compiledPolicy {
	if cp, ok := set.matched.Load(taskType); ok {
		return cp.(*compiledPolicy)
	}
	var found *compiledPolicy
	for _, cp := range set.list {
		if slices.ContainsFunc(cp.Match, func(glob string) bool { return MatchGlob(glob, taskType) }) {
			found = cp
			break
		}
	}
	if set.seen.Add(1) <= maxMatched {
		set.matched.Store(taskType, found)
	}
	return found
}

// A compiledPolicy is a policy made ready for calls: everything that does not depend on the request is
// worked out once. It does not change.
type compiledPolicy struct {
	Policy
	flowBy   []string // the attributes of all scopes and the tenant: who waits in one flow
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
		if !slices.ContainsFunc(cp.scopes, func(s []string) bool { return slices.Equal(s, w.Per) }) {
			cp.scopes = append(cp.scopes, w.Per)
			flowBy = append(flowBy, w.Per...)
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
		if slices.Contains(attributes, TenantAttribute) == (p.Remote == RemoteTenant) {
			cp.upstream = append(cp.upstream, i+1)
		}
	}
	if cp.upstream == nil {
		for i := range cp.scopes {
			cp.upstream = append(cp.upstream, i+1)
		}
	}
	for _, w := range p.Windows {
		a := algorithms[w.Algorithm]
		scope := slices.IndexFunc(cp.scopes, func(s []string) bool { return slices.Equal(s, w.Per) })
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

// An operation is one request against one policy.
type operation struct {
	*compiledPolicy
	request Request
	tenant  Tenant
	windows []Window // as they hold for the tenant
	costs   []int64  // by window
	values  [][]string
	keys    []string // of the scopes
}

// newOperation makes a request ready to send. The errors are *RequestError.
func (cp *compiledPolicy) newOperation(r Request, t Tenant) (*operation, error) {
	bad := func(field string, value any, mend string) error {
		return &RequestError{Policy: cp.Name, Field: field, Value: value, Mend: mend}
	}
	o := &operation{compiledPolicy: cp, request: r, tenant: t, windows: cp.windowsOf(t)}
	o.keys, o.values = make([]string, len(cp.scopes)), make([][]string, len(cp.scopes))
	for i, attributes := range cp.scopes {
		values := make([]string, len(attributes))
		for j, a := range attributes {
			value, field := r.Attributes[a], "attribute "+a
			if a == TenantAttribute {
				value, field = r.Tenant, a
			}
			if value == "" || len(value) > MaxValueBytes {
				return nil, bad(field, value, fmt.Sprintf("must be 1 to %d bytes: a window is counted by it", MaxValueBytes))
			}
			values[j] = value
		}
		o.keys[i], o.values[i] = script.ScopeKey(attributes, values), values
	}
	switch {
	case len(r.IdempotencyKey) > MaxValueBytes:
		return nil, bad("idempotency key", r.IdempotencyKey, fmt.Sprintf("must be at most %d bytes", MaxValueBytes))
	case len(r.Tenant) > MaxValueBytes:
		return nil, bad(TenantAttribute, r.Tenant, fmt.Sprintf("must be at most %d bytes", MaxValueBytes))
	case len(r.Key) > MaxKeyBytes:
		return nil, bad("key", r.Key, fmt.Sprintf("must be at most %d bytes", MaxKeyBytes))
	}
	o.costs = make([]int64, len(o.windows))
	for i, w := range o.windows {
		o.costs[i] = r.costOf(w.Unit)
	}
	return o, nil
}

func (cp *compiledPolicy) windowsOf(t Tenant) []Window {
	if len(t.Windows) == 0 {
		return cp.Windows
	}
	windows := make([]Window, len(cp.Windows))
	for i, w := range cp.Windows {
		windows[i] = t.apply(w)
	}
	return windows
}

// checkCosts tells whether the costs can ever be granted. The errors are *RequestError and
// *NeverFitsError. Cancel does not ask: what was taken is given back under any policy.
func (o *operation) checkCosts() error {
	if err := o.checkUnits("cost", o.request.Cost); err != nil {
		return err
	}
	for i, w := range o.windows {
		if capacity := o.known[i].capacity(w); o.costs[i] > capacity && !o.tenant.Exempt {
			return &NeverFitsError{o.Name, w.Name, w.Unit, o.costs[i], capacity}
		}
	}
	return nil
}

func (cp *compiledPolicy) checkUnits(field string, costs map[string]int64) error {
	for unit, cost := range costs {
		mend := ""
		switch {
		case !slices.Contains(cp.units, unit) && unit != Requests:
			mend = "no window counts this unit, but " + strings.Join(cp.units, ", ")
		case cost < 0 || cost > MaxLimit:
			mend = fmt.Sprintf("must be 0 to %d", int64(MaxLimit))
		default:
			continue
		}
		return &RequestError{Policy: cp.Name, Field: field + " " + printable(unit), Value: cost, Mend: mend}
	}
	return nil
}

// ask is the request as the scripts take it, but for what is peculiar to some operations.
func (o *operation) ask(op, id string) script.Request {
	r := script.Request{Op: op, ID: id, Own: o.own(), Keys: o.keys, Cost: o.costsText()}
	if o.request.IdempotencyKey != "" {
		r.Once = script.OnceKey(o.request.Tenant, o.request.IdempotencyKey)
	}
	return r
}

// own are the parameters of the windows that are the tenant's own.
func (o *operation) own() (own []script.Own) {
	if len(o.tenant.Windows) == 0 {
		return nil
	}
	for i, w := range o.windows {
		if params := o.known[i].params(w); params != o.params[i] {
			own = append(own, script.Own{Window: i + 1, Params: params})
		}
	}
	return own
}

// place is what the line has to know of the request.
func (o *operation) place() *script.Place {
	p := &script.Place{
		Flow: o.flow(o.request.Ticket.Queue), Tenant: o.request.Tenant, Weight: o.weight(),
		Front: o.request.Front,
	}
	if o.request.Ticket != (TicketID{}) {
		p.Key = o.request.Key
	}
	return p
}

func (cp *compiledPolicy) flowValues(r Request) []string {
	values := make([]string, len(cp.flowBy))
	for i, a := range cp.flowBy {
		if values[i] = r.Attributes[a]; a == TenantAttribute {
			values[i] = r.Tenant
		}
	}
	return values
}

func (o *operation) flow(queue string) string { return script.Flow(queue, o.flowValues(o.request)) }

// costsText lists the units that the request takes, such as "requests=1,tokens=5".
func (o *operation) costsText() string { return o.compiledPolicy.costsText(o.request) }

func (cp *compiledPolicy) costsText(r Request) string {
	var b strings.Builder
	for _, unit := range cp.units {
		if cost := r.costOf(unit); cost > 0 {
			if b.Len() > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, "%s=%d", unit, cost)
		}
	}
	return b.String()
}

// requestOf is the request of a ticket, as far as its flow and costs tell of it.
func (cp *compiledPolicy) requestOf(flow, costs string) (Request, bool) {
	r := Request{Policy: cp.Name, Cost: map[string]int64{Requests: 0}}
	queue, values := script.ParseFlow(flow)
	r.Ticket.Queue = queue
	if len(values) != len(cp.flowBy) {
		return r, false
	}
	for i, a := range cp.flowBy {
		if a == TenantAttribute {
			r.Tenant = values[i]
			continue
		}
		if r.Attributes == nil {
			r.Attributes = map[string]string{}
		}
		r.Attributes[a] = values[i]
	}
	for part := range strings.SplitSeq(costs, ",") {
		unit, n, ok := strings.Cut(part, "=")
		if !ok {
			continue
		}
		cost, err := strconv.ParseInt(n, 10, 64)
		if err != nil {
			return r, false
		}
		r.Cost[unit] = cost
	}
	return r, true
}

// weight is the tenant's, in thousandths.
func (o *operation) weight() int64 {
	if o.tenant.Weight == 0 {
		return 1000
	}
	return max(1, int64(o.tenant.Weight*1000))
}

// micros turns microseconds into a duration that is never negative and never overflows.
func micros(us int64) time.Duration {
	const most = math.MaxInt64 / int64(time.Microsecond)
	return time.Duration(min(max(us, 0), most)) * time.Microsecond
}
