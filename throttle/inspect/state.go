package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/script"
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

// A TenantState is how one tenant stands in one queue, of one class, with its other attributes; or one of its
// tickets there.
type TenantState struct {
	Policy     string            `json:"policy"`
	Tenant     string            `json:"tenant"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Queue      string            `json:"queue"`                // as QueueState.Queue
	Class      throttle.Class    `json:"class"`                // empty if it does not wait
	Waiting    int64             `json:"waiting"`
	Oldest     time.Time         `json:"oldest,omitzero"`  // when the oldest began to wait; zero if none does
	Exempt     bool              `json:"exempt,omitempty"` // it is never denied
	Weight     float64           `json:"weight"`           // as its tickets joined
	Share      float64           `json:"share,omitempty"`  // of its weight in all weights of the queue: 0 to 1

	// Of a ticket: its position among the Waiting, from 1, its cost by unit, and when it began to wait, even
	// if it ran since.
	Position int64            `json:"position,omitempty"`
	Cost     map[string]int64 `json:"cost,omitempty"`
	Joined   time.Time        `json:"joined,omitzero"`

	Limits // of State, those that not all tenants share; of a ticket all, with when its turn comes there
	flow   flow
}

// State returns how a policy stands, with a page of the tenants that wait. One that waits in several queues
// comes once for each. A page costs a few commands, and one call of a script for each 64 of these, however
// many wait. Of a page, those with most tickets come first.
//
// Pages are in no order. A tenant that waits all the time comes at least once, and may come twice.
// A removed policy has a state while somebody waits for it.
func (i Inspector) State(ctx context.Context, q Query) (s PolicyState, err error) {
	lines, err := i.lines(q.Policy)
	if err != nil {
		return s, err
	}
	at, cursor := 0, uint64(0)
	if n, _ := fmt.Sscanf(cmp.Or(q.After, "0.0"), "%d.%d", &at, &cursor); n != 2 || at < 0 || at >= len(lines) {
		return s, &throttle.RequestError{Policy: q.Policy, Field: "after", Value: q.After, Hint: "must be the Next of a page"}
	}
	if q.Tenant != "" {
		at = max(0, slices.Index(lines, i.limiter.LineOf(q.Policy, q.Tenant)))
	}
	l, queues := i.line(lines[at]), map[[2]string]QueueState{} // by name and class
	for _, name := range lines {
		other := i.line(name)
		other.queues(ctx, queues)
		l.err = cmp.Or(l.err, other.err)
	}
	flows, cursor := l.find(ctx, q, cursor)
	states := l.tenants(ctx, append([]flow{{}}, flows...)...) // the first one is about what all tenants share
	if l.err != nil {
		return s, l.err
	}
	s = PolicyState{Policy: q.Policy, Queues: []QueueState{}, Limits: states[0].Limits, Tenants: []TenantState{}}
	for _, t := range states[1:] {
		weights := max(1, t.flow.weight, queues[[2]string{t.Queue, string(t.Class)}].weights)
		if t.Share = float64(t.flow.weight) / float64(weights); q.Tenant == "" || t.Tenant == q.Tenant {
			s.Tenants = append(s.Tenants, t)
		}
	}
	for _, q := range queues {
		q.Served = s.At.Sub(q.Asked) < servedWithin
		s.Queues, s.Waiting = append(s.Queues, q), s.Waiting+q.Waiting
	}
	slices.SortFunc(s.Tenants, func(a, b TenantState) int {
		return cmp.Or(cmp.Compare(b.Waiting, a.Waiting), cmp.Compare(a.flow.name, b.flow.name))
	})
	slices.SortFunc(s.Queues, func(a, b QueueState) int {
		return cmp.Or(cmp.Compare(a.Queue, b.Queue), -cmp.Compare(a.Class, b.Class))
	})
	switch {
	case cursor != 0:
		s.Next = fmt.Sprintf("%d.%d", at, cursor)
	case q.Tenant == "" && at+1 < len(lines):
		s.Next = fmt.Sprintf("%d.0", at+1)
	}
	return s, nil
}

// find returns the flows of a page, and the next cursor, 0 at the end. Of a tenant that does not wait it returns
// one without tickets.
func (l *line) find(ctx context.Context, q Query, cursor uint64) ([]flow, uint64) {
	asked := &throttle.Standing{Request: throttle.Request{Policy: q.Policy, Tenant: q.Tenant}}
	if q.Tenant != "" {
		l.stand(ctx, asked)
	}
	if asked.Flow == "" { // windows count by other attributes, too, or all tenants are asked for
		return l.page(ctx, cursor, min(cmp.Or(q.Limit, DefaultLimit), MaxLimit))
	}
	_, values, _ := strings.Cut(asked.Flow, "|")
	var names []string
	for _, queue := range l.queues(ctx, map[[2]string]QueueState{}) {
		names = append(names, queue+"|"+values)
	}
	flows := read(ctx, l, "f", readFlow, names...)
	if len(flows) == 0 {
		flows = []flow{{name: asked.Flow}}
	}
	return flows, 0
}

// tenants returns the states of flows, or of one of their tickets. A flow without a name is about what all
// tenants share.
func (l *line) tenants(ctx context.Context, flows ...flow) (states []TenantState) {
	standings := make([]*throttle.Standing, len(flows))
	for i, f := range flows {
		standings[i] = &throttle.Standing{Flow: f.name, Costs: f.cost, Ticket: f.ticket, Ask: true}
	}
	l.stand(ctx, standings...)
	oldest := l.oldest(ctx, flows)
	for i, f := range flows {
		s := standings[i]
		t := TenantState{
			Policy: s.Policy.Name, Tenant: s.Request.Tenant, Attributes: s.Request.Attributes, Waiting: f.tickets,
			Oldest: oldest[f.name], Exempt: s.Decision.Exempt, Weight: cmp.Or(float64(f.weight)/1000, s.Weight),
			Limits: limitsOf(s, f.name == "" || f.ticket != "", f.name != ""), flow: f,
		}
		if f.tickets > 0 {
			t.Queue, t.Class = parseQueue(f.name)
		}
		if f.ticket != "" {
			t.Cost = s.Request.Cost
		}
		states = append(states, t)
	}
	return states
}

// Explain returns why a ticket waits, and until when, in whichever line of the limiter that is. It is zero if the
// ticket stands in none. Its cost does not depend on how many others wait.
func (i Inspector) Explain(ctx context.Context, t throttle.Ticket) (TenantState, error) {
	name := script.TicketName(script.Escape(t.Queue), t.ID)
	for _, line := range i.limiter.Lines() {
		if s, err := i.line(line).explain(ctx, name); s.Position > 0 || err != nil {
			return s, err
		}
	}
	return TenantState{}, nil
}

func (l *line) explain(ctx context.Context, name string) (s TenantState, err error) {
	for _, t := range read(ctx, l, "t", script.ReadTicket, name) {
		for _, f := range read(ctx, l, "f", readFlow, t.Flow) {
			f.ticket, f.cost = name, t.Costs
			s = l.tenants(ctx, f)[0]
			s.Joined = time.UnixMicro(t.Since)
		}
		l.try(ctx, func(client redis.UniversalClient, prefix string) error {
			before, err := client.ZRank(ctx, prefix+"f:"+t.Flow, name).Result()
			if s.Position = before + 1; errors.Is(err, redis.Nil) { // it has just left
				s, err = TenantState{}, nil
			}
			return err
		})
	}
	return s, l.err
}
