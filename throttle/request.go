package throttle

import "time"

// MaxKeyBytes bounds Request.Key.
const MaxKeyBytes = 64

// A Request asks one policy for capacity.
type Request struct {
	// Attributes are what scopes other than the tenant are counted by, such as
	// {"user": "bob", "ip": "10.0.0.1"}. Every attribute that a window's scope names must be
	// here, with 1 to MaxValueBytes bytes of any kind.
	Attributes map[string]string

	// Cost is how many units the request takes, per unit: 0 to MaxLimit. It costs 1 of
	// Requests and 0 of everything else unless it says otherwise here.
	Cost map[string]int64

	// Exempt has the request counted, but never denied, whoever the tenant is.
	Exempt bool

	// Front, for a ticket that is not in line yet, takes a place before the others of its flow
	// instead of behind them: for a job that ran, failed and comes again.
	Front bool

	// MaxHold is how long Concurrency windows may hold what they grant: the timeout of a job,
	// say. Expected starts go by it until the first grant is given back. 0 is not known.
	MaxHold time.Duration

	// IdempotencyKey identifies one request of a tenant across calls. A request that is repeated
	// with it within a minute of its grant is charged once. Empty is right unless the caller
	// itself repeats: a call that the client library repeats is charged once in any case. At most
	// MaxValueBytes bytes of any kind.
	IdempotencyKey string

	// Key is handed out with the ticket when it is taken from the line: at most MaxKeyBytes bytes
	// of any kind.
	Key string

	// Policy is the policy's name.
	Policy string

	// Tenant is the value of the attribute "tenant", 1 to MaxValueBytes bytes of any kind.
	// It may be empty if no window of the policy is counted by tenant.
	Tenant string

	// Ticket identifies who asks, across calls: in a worker, queue and task ID. A request with
	// a ticket that is denied joins the line under it, in the same call, and Take hands it out when
	// it fits. Without one a request is granted if it fits behind all who wait, and joins nothing.
	Ticket TicketID
}

func (r Request) costOf(unit string) int64 {
	cost, ok := r.Cost[unit]
	if !ok && unit == Requests {
		cost = 1
	}
	return cost
}

// A TicketID says who stands in line. Both may hold any bytes.
type TicketID struct {
	Queue string // Take is asked for the tickets of some queues
	ID    string // within the queue
}
