package throttle

import (
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Request asks one policy for capacity. Limiters do not change it.
type Request struct {
	// Attributes are the values that scopes count by besides the tenant, such as {"user": "bob",
	// "ip": "10.0.0.1"}. Each attribute in a scope of the policy is required: 1 to MaxValueBytes
	// bytes of any kind. Others are ignored.
	Attributes map[string]string

	// Backlog refuses the ticket, by a *BacklogError, if that many tickets of the same tenant,
	// attributes and queue wait already. The default, 0, is no limit. Only Line.Join uses it.
	Backlog int

	// Class says who goes first in line. The default is Live.
	Class Class

	// Cost is how many of each unit the request takes: 0 to MaxLimit. The default is 1 of Requests,
	// and 0 of other units.
	Cost map[string]int64

	// Deadline refuses the ticket, by a *TooLateError, if it cannot start before then, even if those
	// of other tenants, attributes and queues leave. It is a time by this machine's clock. The
	// default, zero, is no limit. Only Line.Join uses it.
	Deadline time.Time

	// Exempt requests are counted, but never denied, as those of an exempt tenant. The default is
	// false.
	Exempt bool

	// Front lets a ticket join before the others of its tenant, attributes and queue, not behind them.
	// It is for a job that ran, failed and is retried. The default is false.
	Front bool

	// IdempotencyKey identifies one request of a tenant across calls: at most MaxValueBytes bytes of
	// any kind. A request that is repeated with it within a minute of its grant is charged once. It is
	// for callers that repeat requests. Repeats by the Redis client are charged once without it. The
	// default is none.
	IdempotencyKey string

	// Key is data that Line.Take returns with the ticket: at most MaxKeyBytes bytes of any kind.
	Key string

	// MaxHold bounds how long the work holds what Concurrency windows grant, such as a job's timeout.
	// Expected starts of others use it. The default, 0, is not known.
	MaxHold time.Duration

	// MaxWait bounds the time in line. Limiter.Wait gives up after it, and Line.Join refuses a ticket
	// that may have to wait longer, by a *TooLateError. The default, 0, is no limit. Below 0, nothing
	// waits. Reserve ignores it: a denied ticket joins.
	MaxWait time.Duration

	// Policy is the policy's name. It is required, except by methods of a Line.
	Policy string

	// Tenant is the value of TenantAttribute: 1 to MaxValueBytes bytes of any kind. It may be empty if
	// no window of the policy counts by tenant.
	Tenant string

	// Ticket identifies the work across calls: in a worker, the queue and the task ID. If the request
	// is denied, it joins the policy's line under its ticket. Its work starts only when a server takes
	// it by Line.Take. A request without a ticket joins no line. It is granted only if it fits and
	// delays no ticket in line. The default is none.
	Ticket Ticket
}

// A Class says which requests of a policy go first where they share a window or handler slots.
type Class string

const (
	// Live requests go before those of batches. A live ticket counts no batch before it, except for
	// Policy.BatchShare.
	Live Class = "live"

	// Batch requests go when no live one waits in their windows, or for a handler slot. What live
	// ones leave is theirs, and at least Policy.BatchShare.
	Batch Class = "batch"
)

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
	Queue string // of which servers take tickets: TakeOptions.Queues
	ID    string // unique in the queue; required
}

// name returns the ticket's name in its line.
func (t Ticket) name() string { return script.TicketName(script.Escape(t.Queue), t.ID) }
