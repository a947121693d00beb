package inspect

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// servedWithin is how long a queue counts as served after a server asked: as in internal/script/lua/line.lua.
const servedWithin = time.Minute

// A Query says what State returns.
type Query struct {
	After  string // PolicyState.Next of the page before; empty for the first page
	Limit  int    // about how many tenants a page has; at most MaxLimit; by default DefaultLimit
	Policy string // required
	Tenant string // the only one of the page, even if it does not wait; empty for all that wait
}

// A PolicyState is how a policy stands: what it has granted, and who waits.
type PolicyState struct {
	At      time.Time     `json:"at"` // by the clock of Redis
	Policy  string        `json:"policy"`
	Waiting int64         `json:"waiting"` // tickets in line, with those of calls that wait in place
	Queues  []QueueState  `json:"queues"`  // where they wait
	Limits                // those that all tenants share
	Tenants []TenantState `json:"tenants"`        // a page of those that wait
	Next    string        `json:"next,omitempty"` // Query.After of the next page; empty at the end
}

// A QueueState is what waits in one queue, of one class.
type QueueState struct {
	Queue   string         `json:"queue"` // Ticket.Queue; empty for calls that wait in place
	Class   throttle.Class `json:"class"`
	Waiting int64          `json:"waiting"`
	Flows   int64          `json:"flows"`           // tenants, each with its other attributes
	Asked   time.Time      `json:"asked"`           // when a server asked for it last
	Served  bool           `json:"served"`          // a server asked within the last minute
	Binds   string         `json:"binds,omitempty"` // throttle.BySlots, or empty for limits
	weights int64          // of its flows, in thousandths
}

// A TenantState is how one tenant stands that waits, with its other attributes.
type TenantState struct {
	Tenant     string            `json:"tenant"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Waiting    int64             `json:"waiting"`
	Oldest     time.Time         `json:"oldest,omitzero"`  // when the oldest began to wait; zero if none does
	Exempt     bool              `json:"exempt,omitempty"` // it is never denied
	Weight     float64           `json:"weight"`           // as its tickets joined
	Share      float64           `json:"share"`            // of its weight in all weights of the queue where most wait: 0 to 1
	Limits                       // all but those that all tenants share
	tags       int64             // of its flows, in all
}

// State returns how a policy stands, with a page of the tenants that wait. A page costs a few commands,
// and one call of a script for each 64 tenants, however many wait. Of a page, tenants with most tickets
// come first.
//
// Pages are in no order. A tenant that waits all the time comes at least once, and may come twice.
// A removed policy has a state while somebody waits for it.
func (i Inspector) State(ctx context.Context, q Query) (PolicyState, error) {
	s := PolicyState{At: time.Now(), Policy: q.Policy, Queues: []QueueState{}, Tenants: []TenantState{}}
	names, err := i.lines(q.Policy)
	if err != nil {
		return s, err
	}
	at, cursor := 0, uint64(0)
	if n, _ := fmt.Sscanf(cmp.Or(q.After, "0.0"), "%d.%d", &at, &cursor); n != 2 || at < 0 || at >= len(names) {
		return s, &throttle.RequestError{Policy: q.Policy, Field: "after", Value: q.After, Hint: "must be the Next of a page"}
	}
	if q.Tenant != "" {
		at = max(0, slices.Index(names, i.limiter.LineOf(q.Policy, q.Tenant)))
	}
	var here *line
	for n, name := range names {
		l := i.line(name)
		if err := l.open(ctx); err != nil {
			return s, err
		}
		if n == at {
			here = l
		}
		for _, q := range l.queues {
			s.add(q)
		}
	}
	slices.SortFunc(s.Queues, func(a, b QueueState) int {
		return cmp.Or(cmp.Compare(a.Queue, b.Queue), -cmp.Compare(a.Class, b.Class))
	})
	shared := &throttle.Standing{Ask: true}
	if s.Tenants, cursor, err = here.tenants(ctx, cursor, q, shared); err != nil {
		return s, err
	}
	s.At = shared.Decision.At
	s.Limits.add(shared, true, false)
	for i, q := range s.Queues {
		s.Queues[i].Served = s.At.Sub(q.Asked) < servedWithin
	}
	switch {
	case cursor != 0:
		s.Next = fmt.Sprintf("%d.%d", at, cursor)
	case q.Tenant == "" && at+1 < len(names):
		s.Next = fmt.Sprintf("%d.0", at+1)
	}
	return s, nil
}

// add adds a queue of one line.
func (s *PolicyState) add(q QueueState) {
	s.Waiting += q.Waiting
	i := slices.IndexFunc(s.Queues, func(sum QueueState) bool { return sum.Queue == q.Queue && sum.Class == q.Class })
	if i < 0 {
		s.Queues = append(s.Queues, q)
		return
	}
	sum := &s.Queues[i]
	sum.Waiting, sum.Flows = sum.Waiting+q.Waiting, sum.Flows+q.Flows
	if sum.Binds = cmp.Or(sum.Binds, q.Binds); q.Asked.After(sum.Asked) {
		sum.Asked = q.Asked
	}
}

// tenants returns the page of tenants after a cursor, and the next cursor, 0 at the end. It fills in what all share.
func (l *line) tenants(ctx context.Context, cursor uint64, q Query, shared *throttle.Standing) (
	_ []TenantState, next uint64, err error) {
	asked := &throttle.Standing{Request: throttle.Request{Policy: q.Policy, Tenant: q.Tenant}}
	if q.Tenant != "" {
		if err := l.Stand(ctx, asked); err != nil {
			return nil, 0, err
		}
	}
	found := []flow{newFlow(asked.Flow)}
	if asked.Flow == "" { // windows count by other attributes, too, or all tenants are asked for
		if found, next, err = l.page(ctx, cursor, min(cmp.Or(q.Limit, DefaultLimit), MaxLimit)); err != nil {
			return nil, 0, err
		}
	}
	var names []string // of these tenants in all queues and classes
	for _, f := range found {
		for queue := range l.queues {
			names = append(names, queue+"|"+f.values)
		}
	}
	slices.Sort(names)
	flows, err := read(ctx, l, "f", slices.Compact(names), readFlow)
	if err != nil {
		return nil, 0, err
	}
	if asked.Flow != "" && len(flows) == 0 { // it does not wait
		flows = found
	}
	states, err := l.states(ctx, flows, shared)
	other := func(t TenantState) bool { return q.Tenant != "" && t.Tenant != q.Tenant }
	return slices.DeleteFunc(states, other), next, err
}

// states returns how the tenants of flows stand, those with most tickets first.
func (l *line) states(ctx context.Context, flows []flow, shared *throttle.Standing) ([]TenantState, error) {
	slices.SortFunc(flows, func(a, b flow) int {
		return cmp.Or(strings.Compare(a.values, b.values), cmp.Compare(b.tickets, a.tickets))
	})
	oldest, err := l.oldest(ctx, flows)
	if err != nil {
		return nil, err
	}
	standings := make([]*throttle.Standing, len(flows))
	for i, f := range flows {
		standings[i] = &throttle.Standing{Flow: f.name, Ask: true}
	}
	if err := l.Stand(ctx, append(standings, shared)...); err != nil {
		return nil, err
	}
	states := []TenantState{}
	for i, f := range flows {
		s := standings[i]
		if i == 0 || f.values != flows[i-1].values {
			states = append(states, TenantState{
				Tenant: s.Request.Tenant, Attributes: s.Request.Attributes, Oldest: oldest[f.values],
				Exempt: s.Decision.Exempt, Weight: cmp.Or(float64(f.weight)/1000, s.Weight),
				Share: min(1, float64(f.weight)/float64(max(1, l.queues[f.queue].weights))),
			})
		}
		t := &states[len(states)-1]
		t.Waiting, t.tags = t.Waiting+f.tickets, t.tags+f.tag
		t.Limits.add(s, false, true)
	}
	slices.SortStableFunc(states, func(a, b TenantState) int { return cmp.Compare(b.Waiting, a.Waiting) })
	return states, nil
}
