package throttle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Line holds the tickets that wait for one policy. It is first come, first served for one tenant,
// attributes and queue, and fair between tenants by weight. Package worker uses it for asynq. For
// another job queue, call Join in its clients, and Take in its servers when they have free slots. A
// Line is safe for concurrent use.
type Line struct {
	limiter *Limiter
	name    string
}

// Line returns the line of a policy, or with Policy.Shards the line that LineOf or Lines names. It
// does not check the name: methods of a line without a policy return ErrUnknownPolicy.
func (l *Limiter) Line(name string) *Line { return &Line{l, name} }

// Lines returns the names of the lines that a server should take from: all, and those that
// SetPolicies removed, until nobody waits there. A line has the name of its policy, unless that has
// shards.
func (l *Limiter) Lines() []string { return l.policies.Load().lines() }

// A Ticket asks for a place in a line.
type Ticket struct {
	TicketID

	// Backlog refuses the ticket, by a *BacklogError, if that many tickets of the same tenant,
	// attributes and queue wait already. The default, 0, is no limit.
	Backlog int

	// Deadline refuses the ticket, by a *TooLateError, if it cannot start before then, even if those
	// of other tenants, attributes and queues leave. It is a time by this machine's clock. The default, zero, is no limit.
	Deadline time.Time

	// Key is data that Take returns with the ticket: at most MaxKeyBytes bytes of any kind.
	Key string

	// Request is what the ticket waits for. If it may have to wait for longer than Request.MaxWait,
	// the ticket is refused, by a *TooLateError. Policy, Ticket, Key and IdempotencyKey are ignored.
	Request Request
}

// A Place is the answer to one ticket of a Join.
type Place struct {
	// Err says why the ticket did not join: *RequestError, *NeverFitsError, *TooLateError or
	// *BacklogError. It does not affect the other tickets.
	Err error

	// AlreadyQueued says that the ticket was in line before. It keeps its place, and is not refused.
	AlreadyQueued bool

	// ClockBehind is how far the clock of Redis is behind the newest change of the windows: see
	// Decision.ClockBehind.
	ClockBehind time.Duration

	// Exempt says that the ticket did not join, as its tenant or request is exempt: its work can
	// start.
	Exempt bool

	// Nudge says that the ticket fits now, and that no server is about to take: make one call Take.
	Nudge bool

	// SlotsBind says that servers without a free slot hold the ticket up, and not the limits. Then
	// StartsIn is an estimate, by the rate at which they took tickets of its queue, since they left
	// some that fit or in the last minute. It is above StartsInMost.
	SlotsBind bool

	// StartsIn is the time until the ticket is expected to be taken. It is 0 if it fits now.
	StartsIn time.Duration

	// StartsInLeast is a lower bound of StartsIn, even if all leave but the tickets before it of the
	// same tenant, attributes and queue.
	StartsInLeast time.Duration

	// StartsInMost is an upper bound of StartsIn, unless other tenants join later, a limit is cut or
	// SlotsBind. It equals StartsIn where that is exact.
	StartsInMost time.Duration
}

// Join puts tickets in line, whether or not they fit now, and returns a place for each, in order. A
// ticket that is in line keeps its place. Use it for up to a few hundred tickets at once.
//
// The error concerns the whole call, and some tickets may have joined: ErrUnknownPolicy,
// ErrUnavailable, ErrState, ErrClock, ErrReply, the context's error or that of the TenantFunc.
func (n *Line) Join(ctx context.Context, tickets []Ticket) ([]Place, error) {
	cp, err := n.limiter.findLine(n.name, false)
	if err != nil {
		return nil, err
	}
	places := make([]Place, len(tickets))
	operations := make([]*operation, 0, len(tickets))
	asks := make([]script.Request, 0, len(tickets))
	var of []int // by ask: its ticket
	for i, t := range tickets {
		o, err := n.checked(ctx, cp, t)
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
		ask := o.lineRequest(script.Join, "")
		ask.Once = ""
		ask.Place.Backlog = int64(max(0, t.Backlog))
		ask.Place.MaxWait = limitMicros(t.Request.MaxWait)
		if !t.Deadline.IsZero() {
			ask.Place.Deadline = max(1, limitMicros(time.Until(t.Deadline)))
		}
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

func (n *Line) checked(ctx context.Context, cp *compiledPolicy, t Ticket) (*operation, error) {
	r := t.Request
	r.Policy, r.Ticket, r.Key, r.IdempotencyKey = cp.Name, t.TicketID, t.Key, ""
	if t.ID == "" {
		return nil, &RequestError{Policy: cp.Name, Field: "ticket", Value: t.ID, Hint: "must have an ID"}
	}
	if own := lineName(cp.Name, r.Tenant, cp.Shards); own != cp.line {
		return nil, &RequestError{Policy: cp.Name, Field: TenantAttribute, Value: r.Tenant, Hint: "must join its own line, " + own}
	}
	o, err := n.limiter.operation(ctx, cp, r)
	if err != nil {
		return nil, err
	}
	return o, o.checkCosts()
}

// limitMicros returns a limit in microseconds, at least 1: 0 is no limit.
func limitMicros(d time.Duration) int64 {
	if d == 0 {
		return 0
	}
	return max(1, d.Microseconds())
}

func (o *operation) placed(a script.Answer, t Ticket) (Place, error) {
	p := Place{
		AlreadyQueued: a.Status == script.WaitedBefore,
		ClockBehind:   micros(a.Behind),
		Nudge:         a.Nudge,
		SlotsBind:     a.Time > a.Most,
		StartsIn:      micros(a.Time - a.At),
		StartsInMost:  micros(a.Most - a.At),
	}
	p.StartsInLeast = min(p.StartsIn, micros(a.Least-a.At))
	d := o.decision(a)
	switch a.Status {
	case script.Waits, script.WaitedBefore:
		return p, nil
	case script.TooLate:
		p.Err = &TooLateError{Decision: d, StartsAt: time.Now().Add(d.RetryInMost), MaxWait: t.Request.MaxWait}
	case script.BacklogFull:
		p.Err = &BacklogError{Decision: d, Backlog: t.Backlog}
	case script.PastDeadline:
		p.Err = &TooLateError{Decision: d, StartsAt: time.Now().Add(d.RetryInLeast), Deadline: t.Deadline}
	default:
		return Place{}, fmt.Errorf("%w: policy %q: a ticket got the status %d", ErrReply, o.Name, a.Status)
	}
	p.Nudge = false
	return p, nil
}

// Tickets calls do for pages of the tickets in line, some hundred each, until do returns an error.
// Calls that wait in place are left out, and a ticket may come twice. Use it before Leave, to find
// tickets whose work no longer exists. Errors are Take's and those of do.
func (n *Line) Tickets(ctx context.Context, do func([]TicketID) error) error {
	cp, err := n.limiter.findLine(n.name, true)
	if err != nil {
		return err
	}
	var own error // of do
	err = n.limiter.runner.Tickets(ctx, cp.line, func(queues, ids []string) error {
		tickets := make([]TicketID, len(ids))
		for i := range ids {
			tickets[i] = TicketID{Queue: queues[i], ID: ids[i]}
		}
		own = do(tickets)
		return own
	})
	if err != nil && own == nil {
		return classify(ctx, cp.Name, err)
	}
	return own
}

// Leave withdraws tickets from the line. It ignores tickets that do not wait. Errors are Take's.
func (n *Line) Leave(ctx context.Context, tickets ...TicketID) error {
	cp, err := n.limiter.findLine(n.name, true)
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
		return classify(ctx, cp.Name, err)
	}
	return nil
}
