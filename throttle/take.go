package throttle

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// MaxTake is how many tickets one Line.Take returns at most.
const MaxTake = 64

// TakeOptions say what to take.
type TakeOptions struct {
	Queues []string // whose tickets, in the order of preference
	Max    int      // how many, up to MaxTake; 0 takes nothing, and tells Taken.Next
}

// Taken is what a Line.Take got.
type Taken struct {
	At      time.Time     // by the clock of Redis
	Next    time.Duration // how long until the next Take has something to do; below 0 if nobody waits in these queues
	Tickets []TakenTicket // granted, in the order in which they should start
}

// A TakenTicket has left the line, with its capacity.
type TakenTicket struct {
	TicketID
	Key        string
	Flow, Cost string   // as they were recorded when it joined, for Line.Matches
	Rank       int64    // its place, for Line.PutBack
	NeverFits  bool     // a limit is below its cost by now: nothing was charged, and its work has to fail
	Decision   Decision // granted, with a Reservation, unless NeverFits or not Line.Matches

	policy *compiledPolicy // by which it was taken
}

// Take takes tickets from the line that fit now, in line order and jointly in all windows, and
// charges them. Taken.Next says when to call it again, unless a Place.Nudge asks for it sooner.
//
// Say by the next Take, or by Acknowledge, within 5 seconds that the tickets arrived. Otherwise the
// next caller puts them back at their places, as after the death of a process. If the context ends
// or Redis does not answer, the next Take returns what this one would have. One Take of a policy and
// limiter is under way at a time.
//
// Take also works for a policy that SetPolicies removed. Errors are ErrUnknownPolicy,
// ErrUnavailable, ErrState, ErrClock, ErrReply and the context's error.
func (n *Line) Take(ctx context.Context, o TakeOptions) (Taken, error) {
	cp, err := n.limiter.find(n.policy, true)
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
		ticket.Decision.Reservation.limiter = n.limiter
		if slices.Contains(o.Queues, t.Queue) {
			taken.Tickets = append(taken.Tickets, ticket)
		} else {
			others = append(others, ticket)
		}
	}
	if others != nil {
		if err := n.PutBack(ctx, others); err != nil {
			return taken, nil // they are lost to the line, and join again as tasks that wait for nothing
		}
	}
	n.limiter.lookAfter(ctx, cp, taken.Next)
	return taken, nil
}

func (cp *compiledPolicy) taken(t script.TakenTicket) TakenTicket {
	r, _ := cp.requestOf(t.Flow, t.Costs)
	r.Tenant, r.Ticket, r.Key = t.Tenant, TicketID{Queue: t.Queue, ID: t.ID}, t.Key
	ticket := TakenTicket{
		TicketID: r.Ticket, Key: t.Key, Flow: t.Flow, Cost: t.Costs, Rank: t.Rank, NeverFits: t.NeverFits, policy: cp,
		Decision: Decision{
			At: time.UnixMicro(t.At), Granted: t.Granted != "", Policy: cp.Name, Tenant: t.Tenant,
		},
	}
	if t.Granted == "" {
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

// Acknowledge says that the tickets of the last Take arrived. The next Take says it too, so call it
// when none follows within a second or so. Without such tickets it does nothing. Errors are Take's.
func (n *Line) Acknowledge(ctx context.Context) error {
	cp, err := n.limiter.find(n.policy, true)
	if err != nil {
		return err
	}
	if err := cp.taker.Acknowledge(ctx, cp.script); err != nil {
		return classify(ctx, cp.Name, err)
	}
	return nil
}

// PutBack returns taken tickets that could not start to their places in line, and gives their units
// back. Errors are Take's.
func (n *Line) PutBack(ctx context.Context, tickets []TakenTicket) error {
	return n.handBack(ctx, tickets, script.PutBack)
}

// Refund gives back the units of taken tickets whose work is gone: Reservation.Cancel for many.
// Errors are Take's.
func (n *Line) Refund(ctx context.Context, tickets []TakenTicket) error {
	return n.handBack(ctx, tickets, script.Cancel)
}

func (n *Line) handBack(ctx context.Context, tickets []TakenTicket, op string) error {
	now, err := n.limiter.find(n.policy, true)
	if err != nil {
		return err
	}
	asks := map[*compiledPolicy][]script.Request{}
	for _, t := range tickets {
		if t.Decision.Reservation.ID == "" {
			continue // it has no units, and no place to go back to
		}
		cp := t.policy
		if cp == nil || cp.Name != n.policy {
			cp = now
		}
		r := t.Decision.Reservation.Request
		tenant, err := n.limiter.tenant(ctx, cp, r.Tenant)
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
			return classify(ctx, n.policy, err)
		}
	}
	return nil
}

// ReserveAgain is Limiter.Reserve for a ticket that was taken a while ago. What it was granted then
// is given back, and it is granted anew, in one call; tickets in line are ignored, as it had its
// turn. If it is denied it waits again, under the request's ticket. If the request does not match
// the ticket (Matches), the units are given back and it is a request like any other.
//
// Errors are Reserve's.
func (n *Line) ReserveAgain(ctx context.Context, t TakenTicket, r Request) (Decision, error) {
	l := n.limiter
	o, err := l.checked(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	granted := t.Decision.Reservation
	if granted.ID == "" || o.tenant.Exempt || !n.Matches(t, r) {
		if granted.ID != "" {
			if err := n.Refund(ctx, []TakenTicket{t}); err != nil {
				return Decision{}, err
			}
		}
		return l.reserve(ctx, o, 0, reservationID(r))
	}
	return l.reserve(ctx, o, granted.At.UnixMicro(), granted.ID)
}

// Matches reports whether a request, as it is made now, has the policy, attributes and cost by which
// the ticket was taken.
func (n *Line) Matches(t TakenTicket, r Request) bool {
	cp := n.limiter.policies.Load().byName[r.Policy]
	return cp != nil && t.Decision.Granted && r.Policy == t.Decision.Policy &&
		t.Flow == cp.flow(t.Queue, r) && t.Cost == cp.costsText(r)
}
