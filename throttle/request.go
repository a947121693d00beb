package throttle

import "time"

// MaxKeyBytes bounds Request.Key.
const MaxKeyBytes = 64

// A Request asks one policy for capacity.
type Request struct {
	// Attributes are the values that scopes other than the tenant are counted by, such as
	// {"user": "bob", "ip": "10.0.0.1"}. Every attribute that a window's scope names is required,
	// with 1 to MaxValueBytes bytes of any kind. Others are ignored.
	Attributes map[string]string

	// Cost is how much the request takes of each unit: 0 to MaxLimit. The default is 1 of Requests,
	// and 0 of any other unit.
	Cost map[string]int64

	// Exempt requests are counted, but never denied, whatever Tenant.Exempt says.
	Exempt bool

	// Front gives a ticket that is not in line yet a place before the others of its tenant, attributes
	// and queue, instead of behind them: for a job that ran, failed and comes back.
	Front bool

	// MaxHold is how long the work may hold what Concurrency windows grant: a job's timeout, for
	// instance. Expected starts are computed by it until a grant was given back. 0 is not known.
	MaxHold time.Duration

	// IdempotencyKey identifies one request of a tenant across calls. A request that is repeated
	// with it within a minute of its grant is charged once. It is at most MaxValueBytes bytes of any
	// kind. The default, empty, is right unless the caller itself repeats: what the Redis client
	// repeats is charged once in any case.
	IdempotencyKey string

	// Key is the ticket key: Line.Take hands it out with the ticket. It is at most MaxKeyBytes bytes
	// of any kind.
	Key string

	// Policy is the policy's name. It is required.
	Policy string

	// Tenant is the value of the attribute "tenant": 1 to MaxValueBytes bytes of any kind. It may be
	// empty if no window of the policy is counted by tenant.
	Tenant string

	// Ticket identifies the work across calls: in a worker, its queue and task ID. A denied request
	// joins the policy's line under its ticket, in the same call. A server must then take from that
	// line (Line.Take): nothing else starts the work. Without a ticket a request joins no line, and
	// is granted only if it fits beside all that wait.
	Ticket TicketID
}

func (r Request) costOf(unit string) int64 {
	cost, ok := r.Cost[unit]
	if !ok && unit == Requests {
		cost = 1
	}
	return cost
}

// A TicketID identifies a ticket in a line. Both fields may hold any bytes.
type TicketID struct {
	Queue string // servers take the tickets of the queues they serve
	ID    string // unique in the queue; not empty
}
