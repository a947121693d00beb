package throttle

import (
	"context"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// Reserve is Limiter.Reserve for requests with tickets, in one call to Redis. It returns one ticket
// for each, in order. A granted ticket is as Take returns it. The ticket of a denied request has
// joined the line (Decision.Queued). A request that cannot be decided gets the zero TakenTicket:
// Limiter.Reserve returns its error.
//
// Reserve does not fail open. Errors are ErrUnknownPolicy, ErrUnavailable, ErrReply and the
// context's error.
func (n *Line) Reserve(ctx context.Context, requests []Request) ([]TakenTicket, error) {
	cp, err := n.limiter.findLine(n.name, false)
	if err != nil {
		return nil, err
	}
	tickets := make([]TakenTicket, len(requests))
	operations := make([]*operation, len(requests))
	asks := make([]script.Request, 0, len(requests))
	var of []int // by ask: its request
	for i, r := range requests {
		o, err := n.checked(ctx, cp, r)
		if err != nil {
			continue
		}
		operations[i] = o
		asks, of = append(asks, o.reserveRequest(reservationID(r), 0)), append(of, i)
	}
	answers, err := cp.batcher.Do(ctx, cp.script, asks...)
	if err != nil {
		return nil, classify(ctx, cp.Name, err)
	}
	for j, a := range answers {
		o, i := operations[of[j]], of[j]
		if a.Err != nil {
			continue
		}
		d, err := n.limiter.reserved(o, asks[j], a)
		if err != nil || !d.Granted && !d.Queued {
			continue
		}
		r := o.request
		tickets[i] = TakenTicket{
			Ticket: r.Ticket, Key: r.Key, Flow: cp.flow(r.Ticket.Queue, r), Cost: cp.costsText(r), Decision: d, policy: cp,
		}
	}
	return tickets, nil
}
