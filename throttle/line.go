package throttle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

const (
	// MaxTake is how many tickets one Take returns at most.
	MaxTake = 64

	refreshTimeout = time.Minute
	refreshAgain   = 10 * time.Second // after an error
)

// A Ticket is who joins a line.
type Ticket struct {
	TicketID
	Key      string        // handed out by Take: at most MaxKeyBytes bytes of any kind
	Request  Request       // its Tenant, Attributes, Cost, Exempt, Front and HoldFor
	Backlog  int           // refuse if that many of the same flow wait already; 0 is no limit
	MaxWait  time.Duration // refuse if it may wait for longer; 0 is no limit
	Deadline time.Duration // refuse if it will wait for longer, as the job then is too late; 0 is no limit
}

// A Place is where a ticket stands after Join.
type Place struct {
	// Err is why the ticket has no place: *RequestError, *NeverFitsError or *RefusedError. The
	// others joined.
	Err error

	// AlreadyQueued says that the ticket was in line before. It keeps its place; nothing is refused.
	AlreadyQueued bool

	// Exempt says that the tenant waits for nothing: the ticket did not join.
	Exempt bool

	// Nudge says that the ticket fits now, and no server is about to ask for it: wake one.
	Nudge bool

	// StartsIn is when the ticket is expected to be taken; 0 if it fits now.
	StartsIn time.Duration

	// StartsInMost is an upper bound of the same; it equals StartsIn where that is exact.
	StartsInMost time.Duration
}

// Join puts tickets in the line of a policy, whether or not they fit now: up to hundreds in one
// call. It returns a place for each, in order.
//
// The error is for all of them: ErrUnknownPolicy, ErrUnavailable, ErrState, ErrClock, ErrReply, the
// context's error or that of the TenantFunc. Some may have joined then. A ticket that joins twice
// keeps its first place.
func (l *Limiter) Join(ctx context.Context, policy string, tickets []Ticket) ([]Place, error) {
	cp, err := l.find(policy, false)
	if err != nil {
		return nil, err
	}
	places := make([]Place, len(tickets))
	operations := make([]*operation, 0, len(tickets))
	asks := make([]script.Request, 0, len(tickets))
	var of []int // by ask: its ticket
	for i, t := range tickets {
		o, err := l.joining(ctx, cp, t)
		var request *RequestError
		var never *NeverFitsError
		switch {
		case errors.As(err, &request) || errors.As(err, &never):
			places[i].Err = err
			continue
		case err != nil:
			return nil, err
		case o.tenant.Exempt:
			places[i].Exempt = true
			continue
		}
		ask := o.waiting(script.Join, "")
		ask.Once = ""
		ask.Place.Backlog = int64(max(0, t.Backlog))
		ask.Place.MaxWait = limit(max(0, t.MaxWait))
		ask.Place.Deadline = limit(t.Deadline)
		operations, asks, of = append(operations, o), append(asks, ask), append(of, i)
	}
	answers, err := cp.batcher.Do(ctx, cp.script, asks...)
	if err != nil {
		return nil, classify(ctx, cp.Name, err)
	}
	for j, a := range answers {
		if a.Err != nil {
			return nil, classify(ctx, cp.Name, a.Err)
		}
		if places[of[j]], err = operations[j].placed(a, tickets[of[j]]); err != nil {
			return nil, err
		}
	}
	return places, nil
}

func (l *Limiter) joining(ctx context.Context, cp *compiledPolicy, t Ticket) (*operation, error) {
	r := t.Request
	r.Policy, r.Ticket, r.Key, r.IdempotencyKey = cp.Name, t.TicketID, t.Key, ""
	if t.ID == "" {
		return nil, &RequestError{Policy: cp.Name, Field: "ticket", Value: t.ID, Mend: "must have an ID"}
	}
	o, err := l.operation(ctx, cp, r)
	if err != nil {
		return nil, err
	}
	return o, o.checkCosts()
}

// limit is a duration in microseconds. One that has passed already is the shortest.
func limit(d time.Duration) int64 {
	if d == 0 {
		return 0
	}
	return max(1, d.Microseconds())
}

func (o *operation) placed(a script.Answer, t Ticket) (Place, error) {
	p := Place{
		AlreadyQueued: a.Status == script.WaitedBefore,
		Nudge:         a.Nudge,
		StartsIn:      micros(a.Time - a.At),
	}
	p.StartsInMost = max(p.StartsIn, micros(a.Most-a.At))
	refused := RefusedError{Decision: o.decision(a)}
	switch a.Status {
	case script.Waits, script.WaitedBefore:
		return p, nil
	case script.TooLate:
		refused.MaxWait = t.MaxWait
	case script.BacklogFull:
		refused.Backlog = t.Backlog
	case script.PastDeadline:
		refused.Deadline = max(1, t.Deadline)
	default:
		return Place{}, fmt.Errorf("%w: policy %q: a ticket got the status %d", ErrReply, o.Name, a.Status)
	}
	p.Err, p.Nudge = &refused, false
	return p, nil
}

// TakeOptions say what to take.
type TakeOptions struct {
	Queues []string // whose tickets, in the order of preference
	Max    int      // how many, up to MaxTake; 0 takes nothing, and tells Taken.Next
}

// Taken is what a take got.
type Taken struct {
	At      time.Time     // by the clock of Redis
	Next    time.Duration // when to ask next, if nothing happens before: 0 is now, below 0 is that nobody waits in these queues
	Tickets []TakenTicket
}

// A TakenTicket has left the line, with what it costs.
type TakenTicket struct {
	TicketID
	Key        string
	Flow, Cost string   // as they were recorded when it joined; see Limiter.Same
	Rank       int64    // where it stood, for PutBack
	NeverFits  bool     // its cost exceeds a limit for good: nothing was charged, and it is handed out to fail
	Decision   Decision // granted, with a Reservation, unless NeverFits

	policy *compiledPolicy // by which it was taken
}

// Take takes tickets from the line of a policy that fit now, in line order and jointly in all
// windows. It charges them. Next tells when to ask again.
//
// Taken tickets have to be acknowledged, by the next Take or by Acknowledge, within 5 seconds.
// Otherwise, as after the death of a process, whoever takes next puts them back at their ranks. If
// the context ends, or Redis does not answer, the next Take returns what this one would have. One
// Take of a policy is under way at a time.
//
// Take also works for policies that SetPolicies removed: see TakePolicies. Errors are
// ErrUnknownPolicy, ErrUnavailable, ErrState, ErrClock, ErrReply and the context's error.
func (l *Limiter) Take(ctx context.Context, policy string, o TakeOptions) (Taken, error) {
	cp, err := l.find(policy, true)
	if err != nil {
		return Taken{}, err
	}
	if len(o.Queues) == 0 {
		return Taken{At: time.Now(), Next: -1}, nil
	}
	reply, err := cp.taker.Take(ctx, cp.script, script.TakeRequest{Queues: o.Queues, Max: max(0, min(o.Max, MaxTake))})
	if err != nil {
		return Taken{}, classify(ctx, cp.Name, err)
	}
	taken := Taken{At: time.UnixMicro(reply.At), Next: -1}
	if reply.Next > 0 {
		taken.Next = micros(reply.Next - reply.At)
	}
	var others []TakenTicket // of queues that a take asked for which this one repeats
	for _, t := range reply.Tickets {
		ticket := cp.taken(t)
		if slices.Contains(o.Queues, t.Queue) {
			taken.Tickets = append(taken.Tickets, ticket)
		} else {
			others = append(others, ticket)
		}
	}
	if others != nil {
		if err := l.PutBack(ctx, policy, others); err != nil {
			return taken, nil // they are lost to the line, and join again as tasks that wait for nothing
		}
	}
	l.lookAfter(ctx, cp, taken.Next)
	return taken, nil
}

func (cp *compiledPolicy) taken(t script.TakenTicket) TakenTicket {
	r, _ := cp.requestOf(t.Flow, t.Costs)
	r.Tenant, r.Ticket, r.Key = t.Tenant, TicketID{Queue: t.Queue, ID: t.ID}, t.Key
	ticket := TakenTicket{
		TicketID: r.Ticket, Key: t.Key, Flow: t.Flow, Cost: t.Costs, Rank: t.Rank, NeverFits: t.NeverFits, policy: cp,
		Decision: Decision{
			At: time.UnixMicro(t.At), Granted: !t.NeverFits, Policy: cp.Name, Tenant: t.Tenant,
		},
	}
	if t.NeverFits {
		return ticket
	}
	ticket.Decision.Reservation = Reservation{Request: r, At: ticket.Decision.At, ID: t.Granted}
	o, err := cp.newOperation(r, cp.Tenants[t.Tenant])
	if err != nil || t.Windows == nil {
		return ticket // it joined, or was taken, when the policy had other windows
	}
	ticket.Decision.Windows = o.states(t.Windows, t.At, true)
	for i := range ticket.Decision.Windows {
		ticket.Decision.Windows[i].ResetsAt = time.Time{} // a take does not tell
	}
	return ticket
}

// lookAfter does what servers do for a line that they take from.
func (l *Limiter) lookAfter(ctx context.Context, cp *compiledPolicy, next time.Duration) {
	if l.policies.Load().byName[cp.Name] != cp {
		if next < 0 {
			if waiting, err := l.runner.Waiting(ctx, cp.Name); err == nil && !waiting {
				cp.drained.Store(true)
			}
		}
		return
	}
	at, now := cp.refreshAt.Load(), time.Now()
	if next < 0 || now.UnixNano() < at || !cp.refreshAt.CompareAndSwap(at, math.MaxInt64) {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), refreshTimeout)
		defer cancel()
		if err := l.refresh(ctx, cp); err != nil {
			cp.refreshAt.Store(now.Add(refreshAgain).UnixNano())
		}
	}()
}

// refresh makes tenants' weights and own limits, as they are now, hold for those who wait.
func (l *Limiter) refresh(ctx context.Context, cp *compiledPolicy) error {
	cp.refreshing.Lock() // what an older policy says must not come last
	defer cp.refreshing.Unlock()
	known := map[string]Tenant{}
	return l.runner.Flows(ctx, cp.Name, func(flows []string) error {
		if l.policies.Load().byName[cp.Name] != cp {
			return nil
		}
		var asks []script.Request
		for _, flow := range flows {
			r, ok := cp.requestOf(flow, "")
			if !ok {
				continue // of other scopes than the policy has now
			}
			t, ok := known[r.Tenant]
			if !ok {
				var err error
				if t, err = l.tenant(ctx, cp, r.Tenant); err != nil {
					return err
				}
				known[r.Tenant] = t
			}
			o, err := cp.newOperation(r, t)
			if err != nil {
				continue
			}
			ask := o.ask(script.Refresh, "")
			ask.Place = o.place()
			ask.Place.Flow = flow // of a claim it has another name
			asks = append(asks, ask)
		}
		_, err := cp.batcher.Do(ctx, cp.script, asks...)
		return err
	})
}

// TakePolicies returns the names of the policies that a server should take from: all, and those
// that SetPolicies removed until nobody waits in their lines.
func (l *Limiter) TakePolicies() []string {
	set := l.policies.Load()
	var names []string
	for _, cp := range set.list {
		names = append(names, cp.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(set.former)) {
		if !set.former[name].drained.Load() {
			names = append(names, name)
		}
	}
	return names
}

// Acknowledge says that the tickets of the last Take have reached their tasks. The next Take says
// it too, so this is for when none follows within a second or so. Without such tickets it does
// nothing. Errors are Take's.
func (l *Limiter) Acknowledge(ctx context.Context, policy string) error {
	cp, err := l.find(policy, true)
	if err != nil {
		return err
	}
	if err := cp.taker.Acknowledge(ctx, cp.script); err != nil {
		return classify(ctx, cp.Name, err)
	}
	return nil
}

// PutBack returns taken tickets that could not start to the line, at their ranks, and gives their
// units back. Errors are Take's.
func (l *Limiter) PutBack(ctx context.Context, policy string, tickets []TakenTicket) error {
	return l.handBack(ctx, policy, tickets, script.PutBack)
}

// GiveBack gives back the units of taken tickets that want no place any more. It is Cancel for each
// of them. Errors are Take's.
func (l *Limiter) GiveBack(ctx context.Context, policy string, tickets []TakenTicket) error {
	return l.handBack(ctx, policy, tickets, script.Cancel)
}

func (l *Limiter) handBack(ctx context.Context, policy string, tickets []TakenTicket, op string) error {
	now, err := l.find(policy, true)
	if err != nil {
		return err
	}
	asks := map[*compiledPolicy][]script.Request{}
	for _, t := range tickets {
		if t.NeverFits {
			continue // it has no units, and no place to go back to
		}
		cp := t.policy
		if cp == nil || cp.Name != policy {
			cp = now
		}
		r := t.Decision.Reservation.Request
		tenant, err := l.tenant(ctx, cp, r.Tenant)
		if err != nil {
			tenant = cp.Tenants[r.Tenant] // better with other limits than not at all
		}
		o, err := cp.newOperation(r, tenant)
		if err != nil {
			continue // it joined when the policy had other scopes: its units run out
		}
		ask := o.waiting(op, t.Decision.Reservation.ID)
		ask.Once, ask.At = "", t.Decision.Reservation.At.UnixMicro()
		ask.Place.Flow, ask.Cost = t.Flow, t.Cost
		if op == script.PutBack {
			ask.Place.Rank = t.Rank
		} else {
			ask.Ticket = ""
		}
		asks[cp] = append(asks[cp], ask)
	}
	for cp, asks := range asks {
		answers, err := now.batcher.Do(ctx, cp.script, asks...)
		for _, a := range answers {
			err = errors.Join(err, a.Err)
		}
		if err != nil {
			return classify(ctx, policy, err)
		}
	}
	return nil
}

// Leave withdraws tickets from the line of a policy. Those that do not wait are no error. Errors
// are Take's.
func (l *Limiter) Leave(ctx context.Context, policy string, tickets ...TicketID) error {
	cp, err := l.find(policy, true)
	if err != nil {
		return err
	}
	asks := make([]script.Request, len(tickets))
	for i, t := range tickets {
		asks[i] = script.Request{
			Op: script.Leave, Ticket: script.TicketName(t.Queue, t.ID), Keys: make([]string, len(cp.scopes)),
		}
	}
	answers, err := cp.batcher.Do(ctx, cp.script, asks...)
	for _, a := range answers {
		err = errors.Join(err, a.Err)
	}
	if err != nil {
		return classify(ctx, policy, err)
	}
	return nil
}

// ReserveAgain is Reserve for a ticket that was taken a while ago: what it was granted then is
// given back, and it is granted anew, in one call. Who waits is ignored, as the ticket had its
// turn. If it is denied it waits again, under the request's ticket. A request that is not Same
// gives its units back, and is a request like any other. Errors are Reserve's.
func (l *Limiter) ReserveAgain(ctx context.Context, t TakenTicket, r Request) (Decision, error) {
	o, err := l.checked(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	granted := t.Decision.Reservation
	if granted.ID == "" || o.tenant.Exempt || !l.Same(t, r) {
		if granted.ID != "" {
			if err := l.GiveBack(ctx, t.Decision.Policy, []TakenTicket{t}); err != nil {
				return Decision{}, err
			}
		}
		return l.reserve(ctx, o, 0, reservationID(r))
	}
	return l.reserve(ctx, o, granted.At.UnixMicro(), granted.ID)
}

// Same reports whether a request, as it is made now, has the policy, flow and cost by which the
// ticket was taken.
func (l *Limiter) Same(t TakenTicket, r Request) bool {
	cp := l.policies.Load().byName[r.Policy]
	return cp != nil && r.Policy == t.Decision.Policy &&
		t.Flow == script.Flow(t.Queue, cp.flowValues(r)) && t.Cost == cp.costsText(r)
}
