package inspect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// servedWithin is how long a queue counts as served after a server asked: as in
// internal/script/lua/line.lua.
const servedWithin = time.Minute

// A Query says what State returns.
type Query struct {
	// After is PolicyState.Next of the page before. The default is the first page.
	After string

	// Limit is about how many tenants a page has: 1 to MaxLimit. The default is DefaultLimit.
	Limit int

	// Policy is the policy's name. It is required.
	Policy string

	// Tenant restricts the page to one tenant, even if it does not wait. The default is all that wait.
	Tenant string
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
	Queue     string         `json:"queue"` // Ticket.Queue; empty for calls that wait in place
	Class     throttle.Class `json:"class"`
	Waiting   int64          `json:"waiting"`
	Flows     int64          `json:"flows"`                // tenants, each with its other attributes
	Asked     time.Time      `json:"asked"`                // when a server asked for it last
	Served    bool           `json:"served"`               // a server asked within the last minute
	Binds     string         `json:"binds,omitempty"`      // throttle.BySlots, or empty for limits
	PerSecond float64        `json:"per_second,omitempty"` // taken while slots bind; 0 if unknown

	weights      int64 // of its flows, in thousandths
	since, taken int64 // since when servers left tickets that fit (us), 0 if they do not; how many they took
}

// A TenantState is how one tenant stands that waits, with its other attributes.
type TenantState struct {
	Tenant     string            `json:"tenant"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Waiting    int64             `json:"waiting"`
	Batch      int64             `json:"batch,omitempty"`  // of Waiting, tickets of batches
	Oldest     time.Time         `json:"oldest,omitzero"`  // when the oldest began to wait; zero if none does
	Exempt     bool              `json:"exempt,omitempty"` // it is never denied
	Weight     float64           `json:"weight"`           // as its tickets joined
	Share      float64           `json:"share"`            // of its weight in all weights of its queue: 0 to 1
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
	s := PolicyState{At: time.Now(), Policy: q.Policy, Tenants: []TenantState{}}
	names, err := i.lines(q.Policy)
	if err != nil {
		return s, err
	}
	bad := func(field string, value any, hint string) (PolicyState, error) {
		return s, &throttle.RequestError{Policy: q.Policy, Field: field, Value: value, Hint: hint}
	}
	if q.Limit = cmp.Or(q.Limit, DefaultLimit); q.Limit < 1 || q.Limit > MaxLimit {
		return bad("limit", q.Limit, fmt.Sprintf("must be 1 to %d", MaxLimit))
	}
	at, cursor := 0, uint64(0)
	if q.After != "" {
		if n, _ := fmt.Sscanf(q.After, "%d.%d", &at, &cursor); n != 2 || at < 0 || at >= len(names) {
			return bad("after", q.After, "must be the Next of a page")
		}
	}
	if q.Tenant != "" {
		at = max(0, slices.Index(names, i.limiter.LineOf(q.Policy, q.Tenant)))
	}
	var queues []QueueState
	var here *line
	for n, name := range names {
		l := i.line(name)
		if err := l.open(ctx); err != nil {
			return s, err
		}
		if queues = slices.AppendSeq(queues, maps.Values(l.queues)); n == at {
			here = l
		}
	}
	shared := &throttle.Standing{Ask: true}
	if err := here.Stand(ctx, shared); err != nil {
		return s, err
	}
	s.At = shared.Decision.At
	s.Limits.add(shared, true, false)
	s.Queues = queueStates(queues, s.At)
	for _, q := range s.Queues {
		s.Waiting += q.Waiting
	}
	if s.Tenants, cursor, err = here.tenants(ctx, cursor, q); err != nil {
		return s, err
	}
	switch {
	case cursor != 0:
		s.Next = fmt.Sprintf("%d.%d", at, cursor)
	case q.Tenant == "" && at+1 < len(names):
		s.Next = fmt.Sprintf("%d.0", at+1)
	}
	return s, nil
}

// queueStates adds up queues of several lines.
func queueStates(queues []QueueState, at time.Time) []QueueState {
	sums := map[string]QueueState{}
	for _, q := range queues {
		if span := at.UnixMicro() - q.since; q.since > 0 && span >= 1_000_000 && q.taken >= 10 {
			q.PerSecond = float64(q.taken) / float64(span) * 1e6
		}
		side := string(q.Class) + q.Queue
		sum := sums[side]
		q.Waiting, q.Flows, q.PerSecond = q.Waiting+sum.Waiting, q.Flows+sum.Flows, q.PerSecond+sum.PerSecond
		if q.Binds = cmp.Or(q.Binds, sum.Binds); sum.Asked.After(q.Asked) {
			q.Asked = sum.Asked
		}
		q.Served = at.Sub(q.Asked) < servedWithin
		sums[side] = q
	}
	states := slices.AppendSeq([]QueueState{}, maps.Values(sums))
	slices.SortFunc(states, func(a, b QueueState) int {
		return cmp.Or(cmp.Compare(a.Queue, b.Queue), -cmp.Compare(a.Class, b.Class))
	})
	return states
}

// tenants returns the page of tenants after a cursor, and the next cursor, 0 at the end.
func (l *line) tenants(ctx context.Context, cursor uint64, q Query) (_ []TenantState, next uint64, err error) {
	var found []flow
	alone := false // it is of one tenant, and no window counts by other attributes
	if q.Tenant != "" {
		asked := &throttle.Standing{Request: throttle.Request{Policy: q.Policy, Tenant: q.Tenant}}
		if err := l.Stand(ctx, asked); err != nil {
			return nil, 0, err
		}
		alone, found = asked.Err == nil, []flow{newFlow(asked.Flow)}
	}
	if !alone {
		if found, next, err = l.page(ctx, cursor, int64(q.Limit)); err != nil {
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
	flows, err := l.named(ctx, slices.Compact(names))
	if err != nil {
		return nil, 0, err
	}
	if alone && len(flows) == 0 { // it does not wait
		flows = found
	}
	states, err := l.states(ctx, flows)
	if q.Tenant != "" {
		states = slices.DeleteFunc(states, func(t TenantState) bool { return t.Tenant != q.Tenant })
	}
	return states, next, err
}

// states returns how the tenants of flows stand, by the order in which State returns them. Weight and share
// are those of the flow with most tickets.
func (l *line) states(ctx context.Context, flows []flow) ([]TenantState, error) {
	oldest, err := l.oldest(ctx, flows)
	if err != nil {
		return nil, err
	}
	standings := make([]*throttle.Standing, len(flows))
	for i, f := range flows {
		standings[i] = &throttle.Standing{Flow: f.name, Ask: true}
	}
	if err := l.Stand(ctx, standings...); err != nil {
		return nil, err
	}
	sums, most := map[string]*TenantState{}, map[string]int64{}
	for i, f := range flows {
		s, t := standings[i], sums[f.values]
		if t == nil {
			r := s.Request
			t = &TenantState{Tenant: r.Tenant, Attributes: maps.Clone(r.Attributes), Weight: cmp.Or(s.Weight, 1)}
			t.Windows, sums[f.values] = []throttle.WindowState{}, t
		}
		t.Waiting, t.tags = t.Waiting+f.tickets, t.tags+f.tag
		if s.Request.Class == throttle.ClassBatch {
			t.Batch += f.tickets
		}
		if f.tickets > most[f.values] {
			most[f.values], t.Weight = f.tickets, float64(f.weight)/1000
			t.Share = min(1, float64(f.weight)/float64(max(1, l.queues[f.queue].weights)))
		}
		if s.Err != nil {
			continue
		}
		t.Exempt = s.Decision.Exempt
		at, waits := oldest[f.name]
		if waits && s.Decision.AlreadyQueued && (t.Oldest.IsZero() || at.Before(t.Oldest)) {
			t.Oldest = at
		}
		t.Limits.add(s, false, true)
	}
	states := make([]TenantState, 0, len(sums))
	for _, t := range sums {
		states = append(states, *t)
	}
	slices.SortFunc(states, func(a, b TenantState) int {
		return cmp.Or(-cmp.Compare(a.Waiting, b.Waiting), strings.Compare(a.Tenant, b.Tenant),
			strings.Compare(fmt.Sprint(a.Attributes), fmt.Sprint(b.Attributes)))
	})
	return states, nil
}
