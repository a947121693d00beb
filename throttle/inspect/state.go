package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Query selects the part of a policy's state that State returns.
type Query struct {
	After  string // PolicyState.Next of the page before; empty for the first page
	Limit  int    // about how many tenants a page has; at most 500, which is the default
	Policy string // required
	Tenant string // the only one; if it does not wait, it is shown only where windows count by the tenant alone; empty for all
}

// A PolicyState describes a policy now: what all tenants share, and which of them wait.
type PolicyState struct {
	State
	Queues  []QueueState `json:"queues"`         // where tickets wait
	Tenants []State      `json:"tenants"`        // one page of the tenants that wait
	Next    string       `json:"next,omitempty"` // Query.After of the next page; empty at the end
}

// A QueueState describes the tickets of one class that wait in one queue.
type QueueState struct {
	Queue   string         `json:"queue"` // Ticket.Queue; empty for calls that wait in place
	Class   throttle.Class `json:"class"`
	Waiting int64          `json:"waiting"`
	Flows   int64          `json:"flows"`           // tenants, each with its other attributes
	Asked   time.Time      `json:"asked"`           // when a server asked for it last, or else the first ticket joined
	Served  bool           `json:"served"`          // Asked is within the last minute
	Binds   string         `json:"binds,omitempty"` // throttle.BySlots, or empty for limits
	weights int64          // of its flows, in thousandths
}

// A State describes a policy as a whole, or one of its tenants in one queue and class, with its other
// attributes, or one ticket there. As JSON, times are of RFC 3339, and durations are seconds.
type State struct {
	At         time.Time         `json:"at"` // by the clock of Redis
	Policy     string            `json:"policy"`
	Tenant     string            `json:"tenant,omitempty"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Queue      string            `json:"queue,omitempty"`      // as QueueState.Queue
	Class      throttle.Class    `json:"class,omitempty"`      // of what waits; empty if nothing does
	Waiting    int64             `json:"waiting"`              // tickets, and calls that wait in place
	Oldest     time.Time         `json:"oldest,omitzero"`      // of a tenant: when the oldest began to wait
	Exempt     bool              `json:"exempt,omitempty"`     // the tenant is denied by operators' pauses only
	Weight     float64           `json:"weight,omitempty"`     // as the line has it
	Share      float64           `json:"share,omitempty"`      // its weight's part of all weights of the queue: 0 to 1

	// Of a ticket: its position among the Waiting, from 1; its cost by unit; and when it began to wait, even if its
	// task ran since. Of a tenant only Cost: the average of its tickets.
	Position int64            `json:"position,omitempty"`
	Cost     map[string]int64 `json:"cost,omitempty"`
	Since    time.Time        `json:"since,omitzero"`

	// Windows are, of a policy, the ones that all tenants share; of a tenant, the others; and of a ticket, all, each with
	// the time of the ticket's turn there.
	Windows []throttle.WindowState `json:"windows"`

	// Binds names what delays the ticket, or a tenant's last ticket, for longest, as throttle.Decision.Binds. Expected is
	// when that ticket is expected to start, and Latest the upper bound of Expected: zero where none is known.
	Binds    string    `json:"binds,omitempty"`
	Expected time.Time `json:"expected,omitzero"`
	Latest   time.Time `json:"latest,omitzero"`

	Pause     *throttle.Pause     `json:"pause,omitempty"`      // nil if there is none
	Adapted   *throttle.Adapted   `json:"adapted,omitempty"`    // the rate, if it is not the published one
	Remaining *throttle.Remaining `json:"remaining,omitempty"`  // what the upstream has left, if it says so
	Observes  bool                `json:"observes,omitempty"`   // the policy only observes: nothing is delayed
	Removed   bool                `json:"removed,omitempty"`    // the policy is out of force: its last windows apply
	PerSecond float64             `json:"per_second,omitempty"` // requests, lately; 0 if unknown

	flow, ticket, cost string // the name of the flow; of a ticket its name in the line; Expectation.Cost
	rank               string // of the flow's first ticket, in 16 digits, if the flow waits at a node
	tag                string // of the tenant: each take moves it; 0 if windows count by other attributes, too
	weight             int64  // of its flow, in thousandths
}

// State returns how a policy stands, with a page of the tenants that wait: within the page, most tickets come first. A
// tenant of several queues comes once for each. A page costs a few commands, and a call of a script for each 64
// tenants, or fewer if windows are many. For a Query.Tenant it reads all if windows count by other attributes, too.
//
// Pages are in no order. A tenant that waits all the time comes at least once, and may come twice. A removed policy has
// a state while somebody waits for it.
func (i Inspector) State(ctx context.Context, q Query) (s PolicyState, err error) {
	lines, err := i.lines(q.Policy)
	if err != nil {
		return s, err
	}
	from, cursor := "", uint64(0)
	if n, _ := fmt.Sscanf(q.After, "%d %s", &cursor, &from); n != 2 && q.After != "" {
		return s, &throttle.RequestError{Policy: q.Policy, Field: "after", Value: q.After, Hint: "must be the Next of a page"}
	}
	index := slices.Index(lines, from) // of a removed policy it may be gone by now: the pages begin anew
	if index < 0 {
		index, cursor = 0, 0 // in force, if any is
	}
	if q.Tenant != "" {
		index = max(0, slices.Index(lines, i.limiter.LineOf(q.Policy, q.Tenant)))
	}
	l, queues := i.line(lines[index]), map[[2]string]QueueState{} // by name and class
	for _, name := range lines {
		other := i.line(name)
		other.queues(ctx, queues)
		l.err = cmp.Or(l.err, other.err)
	}
	flows, cursor := l.find(ctx, q, cursor)
	states := l.complete(ctx, append(flows, State{})...) // the last one is what all tenants share
	if l.err != nil {
		return s, l.err
	}
	s = PolicyState{State: states[len(flows)], Queues: []QueueState{}, Tenants: []State{}}
	for _, t := range states[:len(flows)] {
		weights := max(1, t.weight, queues[[2]string{t.Queue, string(t.Class)}].weights)
		if t.Share = float64(t.weight) / float64(weights); q.Tenant == "" || t.Tenant == q.Tenant {
			s.Tenants = append(s.Tenants, t)
		}
	}
	for _, q := range queues {
		q.Served = s.At.Sub(q.Asked) < time.Minute // as line_appointments.lua, where claims have 2 s
		s.Queues, s.Waiting = append(s.Queues, q), s.Waiting+q.Waiting
	}
	slices.SortFunc(s.Tenants, func(a, b State) int {
		return cmp.Or(cmp.Compare(b.Waiting, a.Waiting), cmp.Compare(a.flow, b.flow))
	})
	slices.SortFunc(s.Queues, func(a, b QueueState) int {
		return cmp.Or(cmp.Compare(a.Queue, b.Queue), -cmp.Compare(a.Class, b.Class))
	})
	switch {
	case cursor != 0:
		s.Next = fmt.Sprintf("%d %s", cursor, lines[index])
	case q.Tenant == "" && index+1 < len(lines):
		s.Next = "0 " + lines[index+1]
	}
	return s, nil
}

// find returns the flows of a page, and the next cursor, 0 at the end. Of a tenant that does not wait it returns one
// without tickets, where windows count by the tenant alone.
func (l *line) find(ctx context.Context, q Query, cursor uint64) ([]State, uint64) {
	if q.Tenant == "" {
		return l.page(ctx, cursor, min(cmp.Or(q.Limit, maxTenants), maxTenants))
	}
	asked := &throttle.Expectation{Request: throttle.Request{Policy: q.Policy, Tenant: q.Tenant}}
	l.err = cmp.Or(l.err, l.Expect(ctx, asked))
	if asked.Flow == "" { // windows count by other attributes, too: its flows are among all
		return slices.DeleteFunc(l.all(ctx), func(f State) bool {
			_, _, _, values := script.ParseFlow(f.flow)
			return !slices.Contains(values, q.Tenant)
		}), 0
	}
	_, values, _ := strings.Cut(asked.Flow, "|")
	names := l.queues(ctx, map[[2]string]QueueState{})
	for n := range names {
		names[n] += "|" + values
	}
	flows := read(ctx, l, "f", readFlow, names...)
	if len(flows) == 0 {
		flows = []State{{flow: asked.Flow}}
	}
	return flows, 0
}

// complete completes the states of flows, or of tickets of them. One without a flow is about what all tenants share.
func (l *line) complete(ctx context.Context, states ...State) []State {
	var expectations []*throttle.Expectation
	for _, s := range states {
		e := throttle.Expectation{Flow: s.flow, Ticket: s.ticket, Cost: s.cost, Waiting: s.Waiting, Ask: true}
		expectations = append(expectations, &e)
	}
	if l.err == nil {
		l.err = l.Expect(ctx, expectations...)
	}
	oldest := l.oldest(ctx, states)
	for i, e := range expectations {
		s, r, d, p := &states[i], e.Request, e.Decision, e.Policy
		s.At, s.Policy, s.Tenant, s.Attributes, s.Cost = cmp.Or(d.At, time.Now()), p.Name, r.Tenant, r.Attributes, r.Cost
		s.Removed, s.Observes, s.Exempt = e.Removed, p.Observe, d.Exempt || e.Settings.Exempt
		s.Oldest, s.Pause, s.Adapted, s.Remaining = oldest[s.flow], d.Pause, d.Adapted, d.Remaining
		s.Windows = []throttle.WindowState{}
		if s.flow != "" {
			s.Weight = cmp.Or(float64(s.weight)/1000, e.Settings.Weight)
		}
		if s.Waiting > 0 {
			s.Queue, s.Class = parseQueue(s.flow)
		}
		if d.AlreadyQueued {
			s.Binds, s.Expected = d.Binds, d.At.Add(d.RetryIn)
			if d.Latest >= d.RetryIn {
				s.Latest = d.At.Add(d.Latest)
			}
		}
		shortest := time.Duration(0)
		for _, w := range d.Windows {
			ofTenant := s.flow != ""
			if countsTenants := len(w.Scope.Attributes) > 0; s.ticket == "" && countsTenants != ofTenant {
				continue
			}
			s.Windows = append(s.Windows, w)
			shorter := shortest == 0 || w.Period > 0 && w.Period < shortest
			if rate := w.PerSecond(d.At); w.Unit == throttle.Requests && rate > 0 && shorter {
				s.PerSecond, shortest = rate, w.Period
			}
		}
	}
	return states
}

// Explain returns why a ticket waits, and until when, in whichever line of the limiter that is. It is zero if the
// ticket stands in none. Its cost does not depend on how many others wait.
func (i Inspector) Explain(ctx context.Context, t throttle.Ticket) (s State, err error) {
	name := script.TicketName(script.Escape(t.Queue), t.ID)
	for _, line := range i.limiter.Lines() {
		l := i.line(line)
		for _, t := range read(ctx, l, "t", script.ReadTicket, name) { // one, or none if it is not in this line
			for _, s = range read(ctx, l, "f", readFlow, t.Flow) {
				s.ticket, s.cost, s.Since = name, t.Costs, time.UnixMicro(t.Since)
				s = l.complete(ctx, s)[0]
			}
			l.try(ctx, func(client redis.UniversalClient, prefix string) error {
				position, err := client.ZRank(ctx, prefix+"f:"+t.Flow, name).Result()
				if s.Position = position + 1; errors.Is(err, redis.Nil) { // it has just left
					s, err = State{}, nil
				}
				return err
			})
		}
		if s.Position > 0 || l.err != nil {
			return s, l.err
		}
	}
	return s, nil
}

const (
	starvesAfter = 75 * time.Second // for which a tenant's oldest ticket has stood
	starvesDue   = 20               // and its share of the grants meanwhile is more than this
	maxFlows     = 10_000           // above which a detector forgets all
)

// A StarvationDetector finds tenants that starve in a queue, where others get grants: for exporters of metrics. Between
// noted states it remembers each tenant's oldest ticket. The zero value is ready. It is safe for concurrent use.
type StarvationDetector struct {
	mu  sync.Mutex
	all map[[2]string]State // by policy and flow: as of the last change of its oldest ticket or of its tag
}

// Note notes a state. It returns those of its tenants that starve: for 75 seconds their oldest ticket and their tag
// have been the same, no pause and no window of their own delays them, and more than 20 grants would have
// been their share by weight, while others went first.
func (d *StarvationDetector) Note(s PolicyState) (starving []State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.all == nil || len(d.all) > maxFlows {
		d.all = map[[2]string]State{}
	}
	for _, t := range s.Tenants {
		full := func(w throttle.WindowState) bool { return w.Remaining < max(1, t.Cost[w.Unit]) }
		key := [2]string{s.Policy, t.flow}
		since := d.all[key]
		if !since.Oldest.Equal(t.Oldest) || since.tag != t.tag { // the tag too: retries go first, and the oldest may stay
			since, d.all[key] = t, t
		}
		stood := t.At.Sub(since.At)
		waits, delayed := !t.Oldest.IsZero(), t.Pause != nil || slices.ContainsFunc(t.Windows, full)
		if due := s.PerSecond * stood.Seconds() * t.Share; waits && !delayed && stood >= starvesAfter && due > starvesDue {
			starving = append(starving, t)
		}
	}
	return starving
}
