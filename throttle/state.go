package throttle

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// Bounds and default of StateRequest.Limit.
const (
	DefaultStatePage = 50
	MaxStatePage     = 500
)

// servedWithin is for how long a queue counts as served after a server asked: as in
// internal/script/lua/line.lua.
const servedWithin = time.Minute

// A StateRequest says what Limiter.State is to tell.
type StateRequest struct {
	// After is PolicyState.Next of the page before. The default is the first page.
	After string

	// Limit is about how many tenants a page has: 1 to MaxStatePage. The default is
	// DefaultStatePage.
	Limit int

	// Policy is the policy's name. It is required.
	Policy string

	// Tenant restricts the page to one tenant, which is told of even if it does not wait. The default
	// is all tenants that wait.
	Tenant string
}

// A PolicyState is how a policy stands: what it has granted, and who waits. As JSON, times are of RFC
// 3339, and durations are seconds.
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
	SlotsBind bool      `json:"slots_bind"`           // tickets that fit wait for handler slots
	PerSecond float64   `json:"per_second,omitempty"` // taken while SlotsBind; 0 if that is not known yet
}

// A TenantState is how one tenant stands that waits, with its other attributes.
type TenantState struct {
	Tenant     string            `json:"tenant"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Waiting    int64             `json:"waiting"`
	Batch      int64             `json:"batch,omitempty"` // of Waiting, tickets of batches

	// Oldest is when the ticket joined that waits longest. It is zero if none waits.
	Oldest time.Time `json:"oldest,omitzero"`

	// LastAt is when the last ticket is expected to start. LastAtMost is the upper bound, as that of
	// Place.StartsInMost.
	LastAt     time.Time `json:"last_at,omitzero"`
	LastAtMost time.Time `json:"last_at_most,omitzero"`

	// SlotsBind says that servers without a free slot hold the last ticket up, and not limits: LastAt
	// goes by the rate at which they took tickets, and is above LastAtMost.
	SlotsBind bool `json:"slots_bind,omitempty"`

	Exempt    bool          `json:"exempt,omitempty"`
	Weight    float64       `json:"weight"`               // as its tickets joined
	Share     float64       `json:"share"`                // of its weight in those of all that wait in its queue: 0 to 1
	PerSecond float64       `json:"per_second,omitempty"` // requests, lately, by the shortest of its windows; 0 if unknown
	Windows   []WindowState `json:"windows"`              // all but those that all tenants share
	Pause     *Pause        `json:"pause,omitempty"`      // that holds it back, also if it holds back all
	Adapted   *Adapted      `json:"adapted,omitempty"`
}

// State tells how a policy stands, with a page of the tenants that wait. It changes nothing. The cost
// of a page does not depend on how many tenants and tickets wait: it is a few commands, and one call
// of a script for each 64 tenants. Of a page, tenants with most tickets come first.
//
// Tenants come in no particular order of pages. One that waits all the time comes at least once; one
// may come twice. A policy that was removed is told of while somebody waits for it.
//
// Errors are Reserve's, and a *RequestError for an After or a Limit that cannot be.
func (l *Limiter) State(ctx context.Context, q StateRequest) (PolicyState, error) {
	lines, err := l.linesOf(q.Policy)
	if err != nil {
		return PolicyState{}, err
	}
	if q.Limit == 0 {
		q.Limit = DefaultStatePage
	}
	if q.Limit < 1 || q.Limit > MaxStatePage {
		return PolicyState{}, &RequestError{Policy: q.Policy, Field: "limit", Value: q.Limit, Hint: fmt.Sprintf("must be 1 to %d", MaxStatePage)}
	}
	line, cursor := 0, uint64(0)
	if q.After != "" {
		if n, _ := fmt.Sscanf(q.After, "%d.%d", &line, &cursor); n != 2 || line < 0 || line >= len(lines) {
			return PolicyState{}, &RequestError{Policy: q.Policy, Field: "after", Value: q.After, Hint: "must be the Next of a page"}
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
	p := page{limiter: l, compiledPolicy: lines[line], queues: queues[line], at: s.At, only: q.Tenant}
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
		return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, shorten(policy))
	}
	slices.SortFunc(former, func(a, b *compiledPolicy) int { return cmp.Compare(a.line, b.line) })
	return former, nil
}

// sharedState tells of the windows that all tenants share.
func (l *Limiter) sharedState(ctx context.Context, cp *compiledPolicy, s *PolicyState) error {
	o := &operation{compiledPolicy: cp, request: Request{Policy: cp.Name}, windows: cp.Windows}
	o.tenant = l.interventions.Load().over(cp, "", Tenant{})
	o.costs = make([]int64, len(o.windows))
	for _, attributes := range cp.scopes { // no count has empty values
		values := make([]string, len(attributes))
		o.values = append(o.values, values)
		o.keys = append(o.keys, script.ScopeKey(attributes, values))
	}
	d, err := o.expect(ctx, script.Request{Op: script.Expect, Keys: o.keys})
	if err != nil {
		return err
	}
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

// expect asks what a request would have to wait for.
func (o *operation) expect(ctx context.Context, ask script.Request) (Decision, error) {
	a, err := o.do(ctx, ask)
	if err != nil {
		return Decision{}, err
	}
	return o.decision(a), nil
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
		sum.SlotsBind = sum.SlotsBind || q.Since > 0
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
		return Batch
	}
	return Live
}

// perSecond returns what windows have granted in a second, lately, by the shortest one of requests
// that tells; 0 if none does.
func perSecond(windows []WindowState, at time.Time) float64 {
	rate, shortest := 0.0, time.Duration(0)
	for _, w := range windows {
		span := w.Period
		switch {
		case w.Unit != Requests || shortest > 0 && w.Period >= shortest:
			continue
		case w.Algorithm == Fixed:
			if left := w.ResetsAt.Sub(at); left > 0 {
				span -= left
			}
			span = max(span, w.Period/10) // a bucket that has just begun says little
		case w.Algorithm != Sliding:
			continue
		}
		rate, shortest = float64(w.Used)/span.Seconds(), w.Period
	}
	return rate
}

// A page is the tenants that are told of at once, of one line.
type page struct {
	limiter *Limiter
	*compiledPolicy
	queues  []script.Queue
	at      time.Time
	only    string // tenant
	tenants []TenantState
}

// alike reports whether a tenant has one flow in a queue and class: none differs in other attributes.
func (p *page) alike() bool { return len(p.flowBy) == 1 }

// A row is a tenant of a page, with its flows.
type row struct {
	operation *operation // nil if the flows are of other scopes than the policy has now
	request   Request
	flows     []script.Standing
}

// read reads about n tenants behind a cursor, and returns the next one.
func (p *page) read(ctx context.Context, cursor uint64, n int) (uint64, error) {
	var flows []script.Standing
	var err error
	if p.only != "" && p.alike() {
		cursor = 0
		flows = []script.Standing{{Name: p.flow("", Request{Tenant: p.only})}} // in whichever queue
	} else if flows, cursor, err = p.limiter.runner.FlowPage(ctx, p.line, cursor, int64(n)); err != nil {
		return 0, classify(ctx, p.Name, err)
	}
	rows, err := p.rows(ctx, flows)
	if err != nil {
		return 0, err
	}
	if err := p.tell(ctx, rows); err != nil {
		return 0, err
	}
	slices.SortStableFunc(p.tenants, func(a, b TenantState) int {
		return cmp.Or(-cmp.Compare(a.Waiting, b.Waiting), cmp.Compare(a.Tenant, b.Tenant))
	})
	return cursor, nil
}

// rows puts flows of one tenant together: those of other queues and of the other class too. Only the
// first of them in order makes a row, as the others come with other pages.
func (p *page) rows(ctx context.Context, flows []script.Standing) ([]*row, error) {
	var names []string
	for _, f := range flows {
		_, rest, _ := strings.Cut(f.Name, "|")
		for _, q := range p.queues {
			if q.Tickets > 0 {
				names = append(names, q.Name+"|"+rest)
			}
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	byRest := map[string][]script.Standing{}
	for part := range slices.Chunk(names, 1000) {
		all, err := p.limiter.runner.FlowsOf(ctx, p.line, part)
		if err != nil {
			return nil, classify(ctx, p.Name, err)
		}
		for _, f := range all {
			_, rest, _ := strings.Cut(f.Name, "|")
			byRest[rest] = append(byRest[rest], f)
		}
	}
	var rows []*row
	for _, f := range flows {
		_, rest, _ := strings.Cut(f.Name, "|")
		all := byRest[rest]
		switch {
		case f.Tickets == 0 && len(all) == 0: // the tenant that is asked for does not wait
			all = []script.Standing{f}
		case len(all) == 0 || f.Tickets > 0 && f.Name != all[0].Name:
			continue
		}
		r, err := p.row(ctx, all)
		if err != nil {
			return nil, err
		}
		if p.only == "" || r.request.Tenant == p.only {
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// row returns a tenant by its flows.
func (p *page) row(ctx context.Context, flows []script.Standing) (*row, error) {
	r := &row{flows: flows}
	var ok bool
	r.request, ok = p.requestOf(flows[0].Name, "")
	r.request.Ticket, r.request.Class = Ticket{}, ""
	t, err := p.limiter.tenant(ctx, p.compiledPolicy, r.request.Tenant)
	if err != nil {
		return nil, err
	}
	if ok {
		if r.operation, err = p.newOperation(r.request, t); err != nil {
			r.operation = nil // nobody can wait so
		}
	}
	return r, nil
}

// tell asks about the flows of rows, and makes states of the answers.
func (p *page) tell(ctx context.Context, rows []*row) error {
	var flows []script.Standing
	var asks []script.Request
	var of []*row
	for _, r := range rows {
		for _, f := range r.flows {
			if r.operation == nil {
				continue
			}
			ask := r.operation.scriptRequest(script.Expect, "")
			ask.Cost, ask.Once, ask.Place = "", "", r.operation.place()
			ask.Place.Flow = f.Name
			flows, asks, of = append(flows, f), append(asks, ask), append(of, r)
		}
	}
	ranks, err := p.limiter.runner.FirstRanks(ctx, p.line, flows)
	if err != nil {
		return classify(ctx, p.Name, err)
	}
	answers, err := p.batcher.Do(ctx, p.compiledPolicy.script, asks...)
	if err != nil {
		return classify(ctx, p.Name, err)
	}
	weights := map[string]int64{}
	for _, q := range p.queues {
		weights[q.Name] = q.Weights
	}
	states := map[*row]*TenantState{}
	for _, r := range rows {
		s := &TenantState{Tenant: r.request.Tenant, Attributes: maps.Clone(r.request.Attributes), Windows: []WindowState{}}
		states[r] = s
		most := int64(0)
		for _, f := range r.flows {
			queue, _, _ := strings.Cut(f.Name, "|")
			s.Waiting += f.Tickets
			if strings.HasSuffix(queue, "!") {
				s.Batch += f.Tickets
			}
			if f.Tickets > most {
				most = f.Tickets
				s.Weight = float64(f.Weight) / 1000
				s.Share = min(1, float64(f.Weight)/float64(max(1, weights[queue])))
			}
		}
		if most == 0 {
			s.Weight = 1
			if r.operation != nil {
				s.Weight = float64(r.operation.weight()) / 1000
			}
		}
	}
	for i, a := range answers {
		if a.Err != nil {
			return classify(ctx, p.Name, a.Err)
		}
		states[of[i]].add(of[i].operation, a, ranks[i])
	}
	for _, r := range rows {
		p.tenants = append(p.tenants, *states[r])
	}
	return nil
}

// add adds what is known of a tenant's tickets in one queue and class.
func (s *TenantState) add(o *operation, a script.Answer, rank int64) {
	s.Exempt = o.tenant.Exempt
	if a.Status == script.WaitedBefore {
		if oldest := time.UnixMicro(script.JoinedAt(rank)); rank > 0 && (s.Oldest.IsZero() || oldest.Before(s.Oldest)) {
			s.Oldest = oldest
		}
		if last := time.UnixMicro(a.Time).Add(o.pauseLeft()); last.After(s.LastAt) {
			s.LastAt, s.SlotsBind = last, a.Time > a.Most
		}
		if most := time.UnixMicro(a.Most).Add(o.pauseLeft()); most.After(s.LastAtMost) {
			s.LastAtMost = most
		}
	}
	d := o.decision(a)
	o.hold(&d)
	s.Pause, s.Adapted, s.Windows = d.Pause, d.Adapted, s.Windows[:0]
	for _, w := range d.Windows {
		if len(w.Scope.Attributes) > 0 {
			s.Windows = append(s.Windows, w)
		}
	}
	s.PerSecond = perSecond(s.Windows, d.At)
}
