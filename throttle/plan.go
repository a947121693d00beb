package throttle

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// plans are all policies of a limiter. They never change: SetPolicies makes new ones.
type plans struct {
	list    []*plan
	byName  map[string]*plan
	matched sync.Map // task type -> *plan or nil, for the types seen so far
	seen    atomic.Int64
}

// matchedMost bounds how many task types are remembered: types are data.
const matchedMost = 10_000

func newPlans(policies []Policy, cache *scriptCache) (*plans, error) {
	ps := &plans{byName: make(map[string]*plan, len(policies))}
	for _, p := range policies {
		pl, err := newPlan(p)
		if err != nil {
			return nil, err
		}
		pl.scripts = cache.of(pl.Windows)
		if ps.byName[p.Name] != nil {
			return nil, &PolicyError{Policy: p.Name, Field: "name", Value: p.Name, Mend: "is taken: policies have different names"}
		}
		for _, other := range ps.list {
			if a, b, ok := overlap(other.Match, p.Match); ok {
				return nil, &PolicyError{Policy: p.Name, Field: "match", Value: b, Mend: fmt.Sprintf(
					"must not match a task type that policy %q matches too, by %q", other.Name, a)}
			}
		}
		ps.byName[p.Name] = pl
		ps.list = append(ps.list, pl)
	}
	return ps, nil
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

// match returns the plan whose globs match the task type, or nil.
func (ps *plans) match(taskType string) *plan {
	if pl, ok := ps.matched.Load(taskType); ok {
		return pl.(*plan)
	}
	var found *plan
	for _, pl := range ps.list {
		if slices.ContainsFunc(pl.Match, func(glob string) bool { return MatchGlob(glob, taskType) }) {
			found = pl
			break
		}
	}
	if ps.seen.Add(1) <= matchedMost {
		ps.matched.Store(taskType, found)
	}
	return found
}

// A plan is a policy made ready for calls: everything that does not depend on the request is
// worked out once.
type plan struct {
	Policy
	scopes  [][]string // the attribute lists of all windows, each once, narrow to broad
	scopeOf []int      // by window: its place in scopes
	scripts *scripts
	detour  atomic.Int64 // when a call had to take the long way last (ns)

	byScope   [][]int     // by scope: its windows
	calendars []*calendar // by window: the ticks of those that have some
	heads     []string    // by window: how its section begins (lua/state.lua)
	shared    bool        // some scope does not contain the tenant
	units     []string    // every unit that a window counts

	flowBy     []string // the attributes of all scopes and the tenant: who waits in one flow
	attributes string   // of all scopes, as the scripts take them
}

func newPlan(p Policy) (*plan, error) {
	p = p.WithDefaults()
	if err := p.Validate(); err != nil {
		return nil, err
	}
	pl := &plan{Policy: p}
	for _, w := range p.Windows {
		if !slices.ContainsFunc(pl.scopes, func(s []string) bool { return slices.Equal(s, w.Per) }) {
			pl.scopes = append(pl.scopes, w.Per)
		}
		if !slices.Contains(w.Per, TenantAttribute) {
			pl.shared = true
		}
		if !slices.Contains(pl.units, w.Unit) {
			pl.units = append(pl.units, w.Unit)
		}
	}
	slices.SortFunc(pl.scopes, func(a, b []string) int {
		if len(a) != len(b) {
			return len(b) - len(a)
		}
		return slices.Compare(a, b)
	})
	flowBy := []string{TenantAttribute}
	lists := make([]string, len(pl.scopes))
	for i, scope := range pl.scopes {
		flowBy = append(flowBy, scope...)
		if lists[i] = strings.Join(scope, ","); lists[i] == "" {
			lists[i] = "-"
		}
	}
	slices.Sort(flowBy)
	pl.flowBy, pl.attributes = slices.Compact(flowBy), strings.Join(lists, " ")
	pl.byScope = make([][]int, len(pl.scopes))
	for i, w := range p.Windows {
		pl.heads = append(pl.heads, string(byte(len(w.Name)))+w.Name+algorithms[w.Algorithm].kind)
		scope := slices.IndexFunc(pl.scopes, func(s []string) bool { return slices.Equal(s, w.Per) })
		pl.byScope[scope] = append(pl.byScope[scope], i)
		pl.calendars = append(pl.calendars, newCalendar(w))
		pl.scopeOf = append(pl.scopeOf, scope)
	}
	return pl, nil
}

// A call is one request against one plan: the keys and arguments that every script takes.
type call struct {
	*plan
	request Request
	tenant  Tenant
	windows []Window // as they hold for the tenant
	costs   []int64  // by window
	scoped  []Scope  // by place in plan.scopes
	keys    []string // of the scopes, then of the nonce and the line
	flow    string   // set if it is another than the request's
	waits   bool     // the reply said that somebody does
}

// lineTenant is the tenant whose line the request would stand in, or empty if it is all tenants'.
func (c *call) lineTenant() string {
	if c.shared {
		return ""
	}
	return c.request.Tenant
}

// newCall makes a request ready to send. The errors are *RequestError.
func (pl *plan) newCall(r Request, t Tenant) (*call, error) {
	bad := func(field string, value any, mend string) error {
		return &RequestError{Policy: pl.Name, Field: field, Value: value, Mend: mend}
	}
	c := &call{plan: pl, request: r, tenant: t}
	tag := hashTag(pl.Name, r.Tenant, pl.shared)
	for _, attributes := range pl.scopes {
		values := make([]string, len(attributes))
		for i, a := range attributes {
			value, field := r.Attributes[a], "attribute "+a
			if a == TenantAttribute {
				value, field = r.Tenant, a
			}
			if value == "" || len(value) > MaxValueBytes {
				return nil, bad(field, value, fmt.Sprintf("must be 1 to %d bytes: a window is counted by it", MaxValueBytes))
			}
			values[i] = value
		}
		c.scoped = append(c.scoped, Scope{attributes, values})
		c.keys = append(c.keys, scopeKey(tag, attributes, values))
	}
	if r.Nonce == "" || len(r.Nonce) > MaxValueBytes {
		return nil, bad("nonce", r.Nonce, fmt.Sprintf("must be 1 to %d bytes", MaxValueBytes))
	}
	c.keys = append(c.keys, nonceKey(tag, r.Nonce), lineKey(tag))
	c.windows = pl.windowsOf(t)
	for _, w := range c.windows {
		c.costs = append(c.costs, r.costOf(w.Unit))
	}
	return c, nil
}

func (pl *plan) windowsOf(t Tenant) []Window {
	if len(t.Windows) == 0 {
		return pl.Windows
	}
	windows := make([]Window, len(pl.Windows))
	for i, w := range pl.Windows {
		windows[i] = t.apply(w)
	}
	return windows
}

// checkCosts tells whether the costs can ever be granted. The errors are *RequestError and
// *NeverFitsError. Cancel does not ask: what was taken is given back under any policy.
func (c *call) checkCosts() error {
	for unit, cost := range c.request.Cost {
		mend := ""
		switch {
		case !slices.Contains(c.units, unit) && unit != Requests:
			mend = "no window counts this unit, but " + strings.Join(c.units, ", ")
		case cost < 0 || cost > MaxLimit:
			mend = fmt.Sprintf("must be 0 to %d", int64(MaxLimit))
		default:
			continue
		}
		return &RequestError{Policy: c.Name, Field: "cost " + printable(unit), Value: cost, Mend: mend}
	}
	for i, w := range c.windows {
		if capacity := algorithms[w.Algorithm].capacity(w); c.costs[i] > capacity && !c.tenant.Exempt {
			return &NeverFitsError{c.Name, w.Name, w.Unit, c.costs[i], capacity}
		}
	}
	return nil
}

// arguments are what the scripts take: the time that is handed to them, others of their own, and
// nine values a window.
func (c *call) arguments(handed int64, own ...any) []any {
	args := make([]any, 0, 1+len(own)+9*len(c.windows))
	args = append(append(args, handed), own...)
	for i, w := range c.windows {
		a := algorithms[w.Algorithm]
		p := a.params(w)
		last := any(p[3])
		if calendar := c.calendars[i]; calendar != nil {
			now := time.Now()
			if handed > 0 {
				now = time.UnixMicro(handed)
			}
			last = calendar.around(now)
		}
		args = append(args, c.scopeOf[i]+1, w.Name, a.kind, c.costs[i], p[0], p[1], p[2], last, w.Unit)
	}
	return args
}

// grantArguments are what lua/grant.lua takes.
func (c *call) grantArguments(handed int64, waits bool) []any {
	args := make([]any, 0, 4+len(c.scopes)+5*len(c.windows))
	args = append(args, handed, "reserve", nonceKept.Milliseconds(), waits)
	for _, windows := range c.byScope {
		args = append(args, len(windows))
		for _, i := range windows {
			w := c.windows[i]
			p := algorithms[w.Algorithm].params(w)
			if w.Algorithm == Fixed {
				p[2] = 2*p[2] + p[3]
			}
			args = append(args, c.heads[i], c.costs[i], p[0], p[1], p[2])
		}
	}
	return args
}

// inOrder puts the windows of grant.lua's reply in the policy's order.
func (c *call) inOrder(reply []any) []any {
	const first, each = 4, 3
	if len(c.scopes) == 1 || len(reply) != first+each*len(c.windows) {
		return reply
	}
	ordered, from := slices.Clone(reply), first
	for _, windows := range c.byScope {
		for _, i := range windows {
			copy(ordered[first+each*i:], reply[from:from+each])
			from += each
		}
	}
	return ordered
}

// lineFields is the scripts' argument "line" (lua/reserve.lua). An empty ticket does not wait.
func (c *call) lineFields(ticket string, budget int, o planOptions) string {
	flow := make([]string, len(c.flowBy))
	for i, a := range c.flowBy {
		if flow[i] = escape(c.request.Attributes[a]); a == TenantAttribute {
			flow[i] = escape(c.request.Tenant)
		}
	}
	if c.flow != "" {
		flow = []string{c.flow}
	}
	costs := make([]string, 0, len(c.units))
	for _, unit := range c.units {
		if cost := c.request.costOf(unit); cost > 0 {
			costs = append(costs, fmt.Sprintf("%s=%d", unit, cost))
		}
	}
	own, base := c.ownParams()
	front := 0
	if c.request.Front {
		front = 1
	}
	return fmt.Sprintf("%s\n%s\n%s\n%d\n%s\n%d\n%d\n%d\n%d\n%d\n%s\n%s\n%s",
		escape(ticket), strings.Join(flow, ","), escape(c.request.Tenant), c.weight(), strings.Join(costs, ","), front,
		holdFor.Microseconds(), budget, o.MaxWait.Microseconds(), o.Backlog, c.attributes, own, base)
}

// ownParams are the parameters of the windows that are the tenant's own, and the policy's of the same.
func (c *call) ownParams() (own, base string) {
	for i, w := range c.windows {
		p, q := algorithms[w.Algorithm].params(w), algorithms[w.Algorithm].params(c.Windows[i])
		if p != q {
			own += fmt.Sprintf("%s %d %d %d;", w.Name, p[0], p[1], p[2])
			base += fmt.Sprintf("%s %d %d %d;", w.Name, q[0], q[1], q[2])
		}
	}
	return own, base
}

// weight is the tenant's, in thousandths.
func (c *call) weight() int64 {
	if c.tenant.Weight == 0 {
		return 1000
	}
	return max(1, int64(c.tenant.Weight*1000))
}
