package inspect

import (
	"cmp"
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A TicketState says why a ticket waits, and until when.
type TicketState struct {
	At     time.Time       `json:"at"` // by the clock of Redis
	Ticket throttle.Ticket `json:"ticket"`

	// Position is that of the ticket among the Of tickets of its tenant, attributes, queue and class,
	// from 1. It is 0 if the ticket stands in no line. All that follows is then zero.
	Position int64 `json:"position"`
	Of       int64 `json:"of,omitempty"`

	Policy     string            `json:"policy,omitempty"`
	Tenant     string            `json:"tenant,omitempty"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Class      throttle.Class    `json:"class,omitempty"`
	Cost       map[string]int64  `json:"cost,omitempty"`  // by unit
	Joined     time.Time         `json:"joined,omitzero"` // when it began to wait, even if it ran since

	Limits // Denied and RetryIn of windows: when its turn comes there
}

// Explain returns why a ticket waits, in whichever line of the limiter that is. Its cost does not depend on
// how many others wait.
func (i Inspector) Explain(ctx context.Context, t throttle.Ticket) (TicketState, error) {
	for _, name := range i.limiter.Lines() {
		if s, err := i.line(name).explain(ctx, t); s.Position > 0 || err != nil {
			s.Ticket, s.Policy = t, throttle.PolicyOf(name)
			return s, err
		}
	}
	return TicketState{At: time.Now(), Ticket: t}, nil
}

// explain returns why a ticket waits, if it stands in the line.
func (l *line) explain(ctx context.Context, t throttle.Ticket) (s TicketState, err error) {
	name := script.TicketName(script.Escape(t.Queue), t.ID)
	found, err := read(ctx, l, "t", []string{name}, script.ReadTicket)
	if err != nil || len(found) == 0 {
		return s, err
	}
	ticket := found[0]
	standing := &throttle.Standing{Flow: ticket.Flow, Costs: ticket.Costs, Ticket: name, Ask: true}
	err = l.Stand(ctx, standing)
	r, d := standing.Request, standing.Decision
	if err != nil || standing.Err == nil && !d.AlreadyQueued { // it has just left
		return s, err
	}
	s = TicketState{
		At: cmp.Or(d.At, time.Now()), Tenant: r.Tenant, Attributes: r.Attributes,
		Class: cmp.Or(r.Class, throttle.ClassLive), Cost: r.Cost, Joined: time.UnixMicro(ticket.Since),
	}
	s.Limits.add(standing, true, true)
	err = l.Read(ctx, func(client redis.UniversalClient, prefix string) (err error) {
		flow := prefix + "f:" + ticket.Flow
		if s.Of, err = client.ZCard(ctx, flow).Result(); err == nil {
			s.Position, err = client.ZCount(ctx, flow, "-inf", strconv.FormatInt(ticket.Rank, 10)).Result()
		}
		return err
	})
	return s, err
}
