package inspect

import (
	"cmp"
	"context"
	"maps"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A TicketState says why a ticket waits, and until when.
type TicketState struct {
	At     time.Time       `json:"at"` // by the clock of Redis
	Ticket throttle.Ticket `json:"ticket"`

	// Waiting is false if the ticket stands in no line. All that follows is then zero.
	Waiting bool   `json:"waiting"`
	Policy  string `json:"policy,omitempty"`

	Tenant     string            `json:"tenant,omitempty"`
	Attributes map[string]string `json:"attributes,omitempty"` // others that windows count by
	Class      throttle.Class    `json:"class,omitempty"`
	Cost       map[string]int64  `json:"cost,omitempty"`  // by unit
	Joined     time.Time         `json:"joined,omitzero"` // when it began to wait, even if it ran since

	// Position is that of the ticket among the Of tickets of its tenant, attributes, queue and class,
	// from 1. It is 0 if it has just left.
	Position int64 `json:"position,omitempty"`
	Of       int64 `json:"of,omitempty"`

	Limits // Denied and RetryIn of windows: when its turn comes there
}

// Explain returns why a ticket waits, in whichever line of the limiter that is. Its cost does not depend on
// how many others wait.
func (i Inspector) Explain(ctx context.Context, t throttle.Ticket) (TicketState, error) {
	s := TicketState{At: time.Now(), Ticket: t}
	name := script.TicketName(script.Escape(t.Queue), t.ID)
	for _, lineName := range i.limiter.Lines() {
		l := i.line(lineName)
		record, position, tickets, err := l.ticket(ctx, name)
		if err == nil && position == 0 {
			continue
		}
		standing := &throttle.Standing{Flow: record.Flow, Costs: record.Costs, Ticket: name, Ask: true}
		if err == nil {
			err = l.Stand(ctx, standing)
		}
		if err != nil {
			return s, err
		}
		r, d := standing.Request, standing.Decision
		s.Policy, s.Waiting = throttle.PolicyOf(lineName), true
		s.Tenant, s.Attributes, s.Cost = r.Tenant, maps.Clone(r.Attributes), r.Cost
		s.Class, s.Joined = cmp.Or(r.Class, throttle.ClassLive), time.UnixMicro(record.Since)
		if standing.Err == nil && d.AlreadyQueued { // else it has just left, or joined by scopes of before
			s.At, s.Position, s.Of = d.At, position, tickets
			s.Limits.add(standing, true, true)
		}
		break
	}
	return s, nil
}
