package throttle

import (
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Request asks one policy for capacity. Limiters do not change it.
type Request struct {
	// Attributes are the values that scopes count by besides the tenant, such as {"user": "bob"}.
	// Those in a scope of the policy are required: 1 to MaxValueBytes bytes. Others are ignored.
	Attributes map[string]string

	// Backlog makes Line.Join refuse the ticket, by a *DeniedError, if that many of the same tenant,
	// class, attributes and queue wait already. The default, 0, is no limit.
	Backlog int

	Class Class // who goes first in line; by default ClassLive

	// Cost is how many of each unit the request takes: 0 to MaxLimit. The default is 1 of Requests, and 0 of others.
	Cost map[string]int64

	// Deadline is a time by this machine's clock. A request that is denied or joins a line is refused, by a
	// *DeniedError, if it could not start before then even if all requests of other tenants, classes, attributes and
	// queues left. Limiter.Wait ignores it. The default, zero, is no limit.
	Deadline time.Time

	// Front lets a ticket join before others of its tenant, class, attributes and queue, for a job that has had its turn.
	Front bool

	Key string // data that Line.Take returns with the ticket: at most MaxKeyBytes bytes

	// MaxHold bounds how long the work holds what Concurrency windows grant, such as a job's timeout. Expected
	// starts of others use it, unless Line.Take grants the request. The default, 0, means unknown.
	MaxHold time.Duration

	// MaxWait bounds the time in line. Limiter.Wait gives up after it. Other methods refuse, by a
	// *DeniedError, a request that is denied or joins a line and may have to wait longer. The default,
	// 0, is no limit. Below 0, nothing waits.
	MaxWait time.Duration

	Policy string // its name; required, except by methods of a Line

	// Since is when the work began to wait, by the clock of Redis, if that was before it joins the line: see
	// TakenTicket.Since. It changes no position. The default is the join.
	Since time.Time

	// Tenant is the value of TenantAttribute: 1 to MaxValueBytes bytes. It may be empty if no window counts by it.
	Tenant string

	// Ticket identifies the work across calls: in a worker, the queue and the task ID. A request that is denied joins
	// the policy's line under it, and starts when a server takes it by Line.Take. A request without a ticket, the
	// default, joins no line, and is denied while tickets wait at its scopes.
	Ticket Ticket
}

// A Class says which requests of a policy go first where they share a window or handler slots.
type Class string

const (
	// ClassLive requests go before those of batches, except for Policy.BatchShare.
	ClassLive Class = "live"

	// ClassBatch requests get what live ones leave of windows and handler slots, and at least Policy.BatchShare.
	ClassBatch Class = "batch"
)

// bad returns a *RequestError about one of its fields.
func (r Request) bad(field string, value any, hint string) error {
	return &RequestError{Policy: r.Policy, Field: field, Value: value, Hint: hint}
}

// hasTicket reports whether a request has a ticket. The request of a flow has only the queue of one.
func (r Request) hasTicket() bool { return r.Ticket.ID != "" }

// values returns the values of attributes.
func (r Request) values(attributes []string) []string {
	values := make([]string, len(attributes))
	for i, a := range attributes {
		if values[i] = r.Attributes[a]; a == TenantAttribute {
			values[i] = r.Tenant
		}
	}
	return values
}

// CostOf returns what the request takes of a unit: Cost, or its default.
func (r Request) CostOf(unit string) int64 {
	cost, ok := r.Cost[unit]
	if !ok && unit == Requests {
		cost = 1
	}
	return cost
}

// A Ticket identifies who stands in a line. Both fields may have any bytes.
type Ticket struct {
	Queue string // servers take tickets by queues: see TakeOptions.Queues
	ID    string // unique in the queue; required
}

func (t Ticket) name() string { return script.TicketName(script.Escape(t.Queue), t.ID) }
