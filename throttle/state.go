package throttle

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/quote"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// servedWithin is how long a queue counts as served after a server asked: as in
// internal/script/lua/line.lua.
const servedWithin = time.Minute

// A StateRequest says what Limiter.State returns.
type StateRequest struct {
	// After is PolicyState.Next of the page before. The default is the first page.
	After string

	// Limit is about how many tenants a page has: 1 to MaxStatePage. The default is DefaultStatePage.
	Limit int

	// Policy is the policy's name. It is required.
	Policy string

	// Tenant restricts the page to one tenant, even if it does not wait. The default is all that wait.
	Tenant string
}

// A PolicyState is how a policy stands: what it has granted, and who waits. As JSON, times are of
// RFC 3339, and durations are seconds.
type PolicyState struct {
	At        time.Time     `json:"at"` // by the clock of Redis
	Policy    string        `json:"policy"`
	Waiting   int64         `json:"waiting"`              // tickets in line, with those of calls that wait in place
	Queues    []QueueState  `json:"queues"`               // where they wait
	Windows   []WindowState `json:"windows"`              // those that all tenants share
	Pause     *Pause        `json:"pause,omitempty"`      // of these; nil if there is none
	Adapted   *Adapted      `json:"adapted,omitempty"`    // the rate of these, if it is not the published one
	PerSecond float64       `json:"per_second,omitempty"` // requests, lately, by the shortest of these; 0 if unknown
	Tenants   []TenantState `json:"tenants"`              // a page of those that wait
	Next      string        `json:"next,omitempty"`       // StateRequest.After of the next page; empty at the end
}

// A QueueState is what waits in one queue, of one class.
type QueueState struct {
	Queue     string    `json:"queue"` // Ticket.Queue; empty for calls that wait in place
	Class     Class     `json:"class"`
	Waiting   int64     `json:"waiting"`
	Flows     int64     `json:"flows"`                // tenants, each with its other attributes
	Asked     time.Time `json:"asked"`                // when a server asked for it last
	Served    bool      `json:"served"`               // a server asked within the last minute
	Binds     string    `json:"binds,omitempty"`      // BySlots, or empty if tickets wait for limits
	PerSecond float64   `json:"per_second,omitempty"` // taken while BySlots binds; 0 if that is not known yet
}

// A TenantState is how one tenant stands that waits, with its other attributes.
type TenantState struct {
	Tenant     string            `json:"tenant"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Waiting    int64             `json:"waiting"`
	Batch      int64             `json:"batch,omitempty"` // of Waiting, tickets of batches

	// Oldest is when the ticket joined that waits longest. It is zero if none waits.
	Oldest time.Time `json:"oldest,omitzero"`

	// Binds, Expected and Latest are those of a Place, for the last ticket. Latest is zero where no bound
	// is known.
	Binds    string    `json:"binds,omitempty"`
	Expected time.Time `json:"expected,omitzero"`
	Latest   time.Time `json:"latest,omitzero"`

	Exempt    bool          `json:"exempt,omitempty"`
	Weight    float64       `json:"weight"`               // as its tickets joined
	Share     float64       `json:"share"`                // of its weight in those of all that wait in its queue: 0 to 1
	PerSecond float64       `json:"per_second,omitempty"` // requests, lately, by the shortest of its windows; 0 if unknown
	Windows   []WindowState `json:"windows"`              // all but those that all tenants share
	Pause     *Pause        `json:"pause,omitempty"`      // that holds it back, alone or with all
	Adapted   *Adapted      `json:"adapted,omitempty"`
}

// State returns how a policy stands, with a page of the tenants that wait. It changes nothing. A
// page costs a few commands, and one call of a script for each 64 tenants, however many wait. Of a
// page, tenants with most tickets come first.
//
// Pages are in no order. A tenant that waits all the time comes at least once, and may come twice.
// A removed policy has a state while somebody waits for it. Errors are Reserve's.
func (l *Limiter) State(ctx context.Context, q StateRequest) (PolicyState, error) {
	lines, err := l.linesOf(q.Policy)
	if err != nil {
		return PolicyState{}, err
	}
	if q.Limit = cmp.Or(q.Limit, DefaultStatePage); q.Limit < 1 || q.Limit > MaxStatePage {
		return PolicyState{}, &RequestError{Policy: q.Policy, Field: "limit", Value: q.Limit,
			Hint: fmt.Sprintf("must be 1 to %d", MaxStatePage)}
	}
	line, cursor := 0, uint64(0)
	if q.After != "" {
		if n, _ := fmt.Sscanf(q.After, "%d.%d", &line, &cursor); n != 2 || line < 0 || line >= len(lines) {
			return PolicyState{}, &RequestError{Policy: q.Policy, Field: "after", Value: q.After,
				Hint: "must be the Next of a page"}
		}
	}
	s := PolicyState{At: time.Now(), Policy: q.Policy, Queues: []QueueState{}, Windows: []WindowState{}, Tenants: []TenantState{}}
	queues := make([][]script.Queue, len(lines))
	for i, cp := range lines {
		waiting, err := l.runner.CountTickets(ctx, cp.line)
		if err == nil {
			queues[i], err = l.runner.Queues(ctx, cp.line)
		}
		if err != nil {
			return PolicyState{}, classify(ctx, q.Policy, err)
		}
		s.Waiting += waiting
	}
	if err := l.sharedState(ctx, lines[0], &s); err != nil {
		return PolicyState{}, err
	}
	s.Queues = queueStates(queues, s.At)
	if q.Tenant != "" {
		line = shardOf(q.Tenant, len(lines))
	}
	p := page{limiter: l, compiledPolicy: lines[line], queues: queues[line], only: q.Tenant}
	if cursor, err = p.read(ctx, cursor, q.Limit); err != nil {
		return PolicyState{}, err
	}
	switch s.Tenants = p.tenants; {
	case q.Tenant != "" && p.alike():
	case cursor != 0:
		s.Next = fmt.Sprintf("%d.%d", line, cursor)
	case q.Tenant == "" && line+1 < len(lines):
		s.Next = fmt.Sprintf("%d.0", line+1)
	}
	return s, nil
}

// linesOf returns a policy by its lines, also one that was removed.
func (l *Limiter) linesOf(policy string) ([]*compiledPolicy, error) {
	set := l.policies.Load()
	if shards := set.byName[policy]; shards != nil {
		return shards, nil
	}
	var former []*compiledPolicy
	for line, cp := range set.former {
		if PolicyOf(line) == policy {
			former = append(former, cp)
		}
	}
	if former == nil {
		return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, quote.Short(policy))
	}
	slices.SortFunc(former, func(a, b *compiledPolicy) int { return cmp.Compare(a.line, b.line) })
	return former, nil
}

// sharedState reads the windows that all tenants share.
func (l *Limiter) sharedState(ctx context.Context, cp *compiledPolicy, s *PolicyState) error {
	o := &operation{compiledPolicy: cp, request: Request{Policy: cp.Name}, windows: cp.Windows}
	o.tenant = l.interventions.Load().over(cp, "", Tenant{})
	o.costs = make([]int64, len(o.windows))
	for _, attributes := range cp.scopes { // no count has empty values
		values := make([]string, len(attributes))
		o.values = append(o.values, values)
		o.keys = append(o.keys, script.ScopeKey(attributes, values))
	}
	a, err := o.do(ctx, script.Request{Op: script.Expect, Keys: o.keys})
	if err != nil {
		return err
	}
	d := o.decision(a)
	o.hold(&d)
	s.At, s.Pause, s.Adapted = d.At, d.Pause, d.Adapted
	for _, w := range d.Windows {
		if len(w.Scope.Attributes) == 0 {
			s.Windows = append(s.Windows, w)
		}
	}
	s.PerSecond = perSecond(s.Windows, s.At)
	return nil
}

func queueStates(queues [][]script.Queue, at time.Time) []QueueState {
	type name struct {
		queue string
		batch bool
	}
	sums := map[name]*QueueState{}
	for _, q := range slices.Concat(queues...) {
		if q.Tickets == 0 {
			continue
		}
		n := name{q.Queue, q.Batch}
		if q.Claims {
			n = name{}
		}
		sum := sums[n]
		if sum == nil {
			sum = &QueueState{Queue: n.queue, Class: classOf(n.batch)}
			sums[n] = sum
		}
		sum.Waiting += q.Tickets
		sum.Flows += q.Flows
		if asked := time.UnixMicro(q.Asked); asked.After(sum.Asked) {
			sum.Asked = asked
		}
		sum.Served = at.Sub(sum.Asked) < servedWithin
		if q.Since > 0 {
			sum.Binds = BySlots
		}
		sum.PerSecond += q.Rate(at.UnixMicro())
	}
	states := make([]QueueState, 0, len(sums))
	for _, sum := range sums {
		states = append(states, *sum)
	}
	slices.SortFunc(states, func(a, b QueueState) int {
		return cmp.Or(cmp.Compare(a.Queue, b.Queue), -cmp.Compare(a.Class, b.Class))
	})
	return states
}

func classOf(batch bool) Class {
	if batch {
		return ClassBatch
	}
	return ClassLive
}

// perSecond returns what windows have granted in a second, lately, by the shortest one of requests
// that says so; 0 if none does.
func perSecond(windows []WindowState, at time.Time) float64 {
	rate, shortest := 0.0, time.Duration(0)
	for _, w := range windows {
		lately := algorithms[w.Algorithm].Lately
		if w.Unit != Requests || lately == nil || shortest > 0 && w.Period >= shortest {
			continue
		}
		rate, shortest = float64(w.Used)/lately(w.Period, w.ResetsAt.Sub(at)).Seconds(), w.Period
	}
	return rate
}
