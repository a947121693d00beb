package throttle

import (
	"cmp"
	"context"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// TakeOptions are the options of Line.Take.
type TakeOptions struct {
	// Queues to take from, with their priorities, as asynq.Config.Queues: while several wait, each
	// gets its part by priority. A priority below 1 counts as 1. Without any queue, Take does nothing.
	Queues map[string]int

	// Strict, as asynq.Config.StrictPriority, takes from a queue only what queues of higher priority
	// leave. So a take of a less important queue names the more important ones too.
	Strict bool

	Max int // the most tickets to take, up to MaxTake; with 0, only tickets of a take whose reply was lost
}

// Taken is the result of a Line.Take.
type Taken struct {
	At      time.Time     // of the take, by the clock of Redis
	Next    time.Duration // when to take again, from now; below 0 if no ticket waits in these queues
	Tickets []TakenTicket // in the order in which they should start

	// Others are tickets of an earlier take, whose reply was lost, for queues that this one does not name. They
	// are out of the line until the caller puts them back.
	Others []TakenTicket
}

// A TakenTicket is a ticket that left the line with its capacity. It was not charged if it never fits, if its tenant
// is exempt or the policy observes by now, or if the policy has gained a scope since. Line.Matches is false for these.
type TakenTicket struct {
	Ticket
	Key        string   // Request.Key
	Flow, Cost string   // as recorded at the join, for Line.PutBack and Refund; if empty, as its Reservation.Request would join now
	Rank       int64    // in its line, for Line.PutBack; 0 if it was granted by Reserve
	NeverFits  bool     // its cost is above a limit by now: it was not charged, and its work must fail
	Weight     float64  // of its tenant, above 0, by which lines of shards share slots; 0 without shards
	Decision   Decision // granted, with a Reservation, unless the ticket was not charged
	untold     bool     // no Observer knows of it

	Since  time.Time     // when the work began to wait: when it joined, or Request.Since
	Waited time.Duration // how long it was in line, including the time after it was put back
}

// Take removes tickets from the line that fit now, and charges them: in line order, and together in
// all windows. Taken.Next is when to call it again. A LineDecision.Nudge asks for it sooner.
//
// Call Take again, or Acknowledge, within 5 seconds. Otherwise the tickets count as lost: the next
// Take of another process puts them back. If ctx ends or Redis does not answer, the next Take
// returns the tickets of this one. Concurrent Takes of one line go one after the other.
//
// Take serves removed policies, too. Errors are ErrUnknownPolicy, ErrUnavailable, ErrReply and the context's. Methods
// whose errors "are Take's" may also return ErrState and ErrClock: Take leaves such tickets in line.
func (n *Line) Take(ctx context.Context, o TakeOptions) (Taken, error) {
	if len(o.Queues) == 0 {
		return Taken{At: time.Now(), Next: -1}, nil
	}
	most := max(0, min(o.Max, MaxTake))
	taken, err := n.take(ctx, nil, script.TakeRequest{Queues: o.Queues, Strict: o.Strict, Max: most})
	if err != nil {
		return taken, err
	}
	all := taken.Tickets
	taken.Tickets = nil
	for _, t := range all {
		if _, asked := o.Queues[t.Queue]; asked {
			taken.Tickets = append(taken.Tickets, t)
			tell(n.limiter, t)
		} else {
			t.untold = true
			taken.Others, taken.Next = append(taken.Others, t), 0 // Next was for other queues, too
		}
	}
	return taken, nil
}

// take takes by the taker of calls that wait in place, or without one by cp.taker, which takes for queues.
func (n *Line) take(ctx context.Context, taker *script.Taker, q script.TakeRequest) (Taken, error) {
	l := n.limiter
	cp, err := l.policyOfLine(n.name, orRemoved)
	if err != nil {
		return Taken{}, err
	}
	cp.serves.Store(true)
	reply, err := cmp.Or(taker, cp.taker).Take(ctx, cp.script, q)
	if err != nil {
		cp.emptyCounts.Store(0) // the next take may get the tickets of this one
		return Taken{}, classify(ctx, cp.Name, err)
	}
	taken := Taken{At: time.UnixMicro(reply.At), Next: micros(reply.NextAt - reply.At)}
	if reply.NextAt == 0 {
		taken.Next = -1
	}
	l.maintain(ctx, cp, taken.Next)
	for _, t := range reply.Tickets {
		cp.emptyCounts.Store(0) // the ticket's work looks this policy up
		// A lookup for each ticket is not worth its cost: without it Windows have the policy's limits.
		tenant := effectiveTenant{Tenant: cp.Tenants[t.Tenant]}
		if q.Claims != "" || cp.Shards > 1 {
			tenant, _ = l.tenant(ctx, cp, t.Tenant)
		}
		taken.Tickets = append(taken.Tickets, cp.taken(t, tenant))
	}
	return taken, nil
}

func (cp *compiledPolicy) taken(t script.TakenTicket, tenant effectiveTenant) TakenTicket {
	r, _ := cp.requestOf(t.Flow, t.Costs, 1)
	if t.Scopes != "" {
		r.Attributes = script.ParseScopes(t.Scopes)
	}
	r.Tenant, r.Ticket, r.Key = t.Tenant, Ticket{Queue: t.Queue, ID: t.ID}, t.Key
	ticket := TakenTicket{
		Ticket: r.Ticket, Key: t.Key, Flow: t.Flow, Cost: t.Costs, Rank: t.Rank, NeverFits: t.NeverFits,
		Since: time.UnixMicro(t.Since), Waited: micros(t.At - t.Joined),
		Decision: Decision{At: time.UnixMicro(t.At), Granted: t.Granted != "", Policy: cp.Name, Tenant: t.Tenant},
	}
	if cp.Shards > 1 {
		ticket.Weight = cmp.Or(tenant.Weight, 1)
	}
	if t.Granted == "" {
		return ticket
	}
	ticket.Decision.Reservation = Reservation{
		Request: r, At: ticket.Decision.At, ID: t.Granted, grantor: cp, limiter: cp.claims.line.limiter,
	}
	o, err := cp.newOperation(r, tenant, allValues)
	if err != nil {
		return ticket // it joined, or was taken, while the policy had other windows
	}
	if t.Binds > 0 {
		ticket.Decision.Binds = o.binds(script.Answer{Binds: t.Binds}, 1) // any wait: with 0 nothing binds
	}
	ticket.Decision.Windows = o.states(script.Answer{Used: t.Used}, true)
	return ticket
}

// Acknowledge reports that the tickets of the last Take arrived, as the next Take does. Call it if
// none follows in time: see Take. Errors are Take's.
func (n *Line) Acknowledge(ctx context.Context) error {
	cp, err := n.limiter.policyOfLine(n.name, orRemoved)
	if err != nil {
		return err
	}
	_, err = cp.taker.Take(ctx, cp.script, script.TakeRequest{}) // without queues it takes nothing
	return classify(ctx, cp.Name, err)
}

// PutBack returns taken tickets to their positions in the line that they were taken from, and refunds them. It skips
// tickets that were not charged. Errors are Take's.
func (n *Line) PutBack(ctx context.Context, tickets []TakenTicket) error {
	return n.giveBack(ctx, tickets, script.PutBack)
}

// Refund is Reservation.Cancel for taken tickets whose work no longer exists, but for uncharged ones. Errors are Take's.
func (n *Line) Refund(ctx context.Context, tickets []TakenTicket) error {
	return n.giveBack(ctx, tickets, script.Cancel)
}

func (n *Line) giveBack(ctx context.Context, tickets []TakenTicket, op string) error {
	asksOf, given := map[*compiledPolicy][]script.Request{}, map[*compiledPolicy][]TakenTicket{} // in the same order
	for _, t := range tickets {
		r := t.Decision.Reservation
		o, err := r.operation(ctx)
		if scopesChanged := o != nil && o.flowMark != r.grantor.flowMark; scopesChanged && op == script.PutBack {
			o, err = r.grantor.newOperation(r.Request, o.tenant, allValues) // the ticket's flow is named by the scopes as they were
		}
		if o == nil || err != nil {
			continue // it has no units to give back; or it has other scopes: its units expire
		}
		ask := o.lineRequest(op)
		ask.ID, ask.At, ask.Never = r.ID, r.At.UnixMicro(), o.neverCounted(r)
		ask.LinePart.Flow, ask.Cost = cmp.Or(t.Flow, ask.LinePart.Flow), cmp.Or(t.Cost, ask.Cost)
		ask.LinePart.Rank, ask.LinePart.Since = t.Rank, t.Since.UnixMicro()
		asksOf[o.compiledPolicy] = append(asksOf[o.compiledPolicy], ask)
		given[o.compiledPolicy] = append(given[o.compiledPolicy], t)
	}
	for cp, asks := range asksOf {
		cp.emptyCounts.Store(0)
		answers, err := cp.decide(ctx, asks...)
		for i, a := range answers {
			if t := given[cp][i]; a.Status == script.Done && !t.untold {
				r := t.Decision.Reservation
				tell(n.limiter, Correction{Cancelled: true, Reservation: r, Requests: -r.CostOf(Requests)})
			}
		}
		if err != nil {
			return err
		}
		cp.claims.takeIn(0)
	}
	return nil
}

// ReserveAgain replaces the grant of a ticket that was taken too long ago by a new one. Tickets in
// line do not deny it, as it had its turn. A denied one waits again under Request.Ticket. If the
// request does not match the ticket, or the policy has other windows by now, ReserveAgain refunds the
// ticket, and then is Limiter.Reserve. Errors are Reserve's.
func (n *Line) ReserveAgain(ctx context.Context, t TakenTicket, r Request) (Decision, error) {
	l := n.limiter
	cp, err := l.policyFor(r.Policy, r.Tenant, orRemoved)
	if err != nil {
		return Decision{}, err
	}
	o, err := l.checkedFor(ctx, cp, r)
	if err != nil {
		return Decision{}, err
	}
	granted := t.Decision.Reservation
	replaces := cp.matches(t, r) && o.neverCounted(granted) == nil
	if !replaces {
		if err := n.Refund(ctx, []TakenTicket{t}); err != nil {
			return l.failOpen(ctx, o, err)
		}
	}
	ask := o.reserveRequest()
	if replaces { // the same call gives it back
		ask.At, ask.Replaces = max(0, granted.At.UnixMicro()), granted.ID
	}
	cp.emptyCounts.Store(0)
	d, err := l.send(ctx, o, ask)
	switch isDenied := !d.Granted && d.Policy != ""; { // after another error it is unknown what Redis did
	case d.Granted:
		d.Binds = t.Decision.Binds
	case replaces && isDenied: // the earlier grant was given back all the same
		tell(l, Correction{Cancelled: true, Reservation: granted, Requests: -granted.CostOf(Requests)})
	}
	return d, err
}

// Matches reports whether a request has the policy, attributes and cost by which a ticket was taken. It does if
// neither policy nor job has changed since the join, or if the policy has only lost scopes or units since.
func (n *Line) Matches(t TakenTicket, r Request) bool {
	cp, err := n.limiter.policyFor(r.Policy, r.Tenant, orRemoved)
	return err == nil && cp.matches(t, r)
}

func (cp *compiledPolicy) matches(t TakenTicket, r Request) bool {
	granted, grantor := t.Decision.Reservation.Request, t.Decision.Reservation.grantor
	return grantor != nil && grantor.line == cp.line && grantor.flow("", granted) == cp.flow("", r) &&
		cp.costsText(granted) == cp.costsText(r)
}
