package throttle

import (
	"fmt"
	"slices"
	"time"
)

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

	// Front, for a ticket that is not in line yet, takes a place before the others of the same
	// scopes instead of behind them: for a job that ran, failed and comes again.
	Front bool

	// HoldFor is for how long, at the most, what Concurrency windows grant is held: the timeout of
	// a job, say. Promises go by it until the first that was granted is given back. 0 is not known.
	HoldFor time.Duration

	// Nonce identifies this one call: a call repeated with the same nonce within a minute is
	// charged once. Empty means a new one, which is right unless the caller itself repeats.
	Nonce string

	// Policy is the policy's name.
	Policy string

	// Tenant is the value of the attribute "tenant", 1 to MaxValueBytes bytes of any kind.
	// It may be empty if no window of the policy is counted by tenant.
	Tenant string

	// Ticket identifies who asks, across calls: in a worker, queue and task ID. A request with
	// a ticket that is denied waits in line under it, and is called when it fits (OnLine).
	// Without one, or while nobody listens to OnLine, it is granted if it fits behind all that
	// wait, and waits for nothing.
	Ticket string
}

func (r Request) costOf(unit string) int64 {
	cost, ok := r.Cost[unit]
	if !ok && unit == Requests {
		cost = 1
	}
	return cost
}

// A Reservation is capacity that was granted. It is plain data: another process can cancel,
// release or settle it.
type Reservation struct {
	Request
	At time.Time // when it was granted, by the clock of Redis, to the microsecond
}

// A Decision is the answer to a request, with the state of every window after it.
type Decision struct {
	// At is when this was decided, by the clock of Redis.
	At time.Time

	// ClockBehind is how far the clock of Redis is behind the newest change of these windows:
	// more than moments if it was set back. They stand still until it has caught up.
	ClockBehind time.Duration

	// Exempt says that the tenant, or this request, is counted, but never denied.
	Exempt bool

	// FailedOpen is why a request was granted without being counted: Redis did not answer and
	// the policy says fail: open. Windows is empty then.
	FailedOpen error

	// Granted says that the cost was taken from all windows. For Peek: that it would have been.
	Granted bool

	// Known says that Plan found the ticket in line already, and left it at its place.
	Known bool

	// Planned says that Plan took a place in line; RetryIn is when it is expected to fit.
	Planned bool

	Policy string

	refused bool // Plan took no place

	// Reservation is what was granted, for Cancel; zero unless Reserve granted.
	Reservation Reservation

	// RetryIn is how long after At the whole cost fits, if nobody else takes it first.
	// It is 0 if granted, else at least 1 microsecond, and never rounded down.
	RetryIn time.Duration

	Tenant string

	// Windows holds the state of every window, in the policy's order.
	Windows []WindowState
}

// A WindowState is what one window looks like after a decision.
type WindowState struct {
	Algorithm Algorithm     // how it counts
	Burst     int64         // of a GCRA window: how many units it holds; else the limit
	Denied    bool          // this window alone would have denied
	Limit     int64         // units per period, for this tenant
	Name      string        //
	Period    time.Duration //
	Remaining int64         // units that would fit at Decision.At; never below 0
	ResetsAt  time.Time     // when nothing is counted any more, if nothing else is granted
	RetryIn   time.Duration // how long after Decision.At the cost fits this window alone
	Scope     Scope         // whom it counts
	Unit      string        // what it counts
	Used      int64         // units counted; above the limit after a cut, or by exempt tenants
}

// MayBeSooner says that RetryIn is an upper bound: a Concurrency window denied, and what it holds may
// be given back at any time.
func (d Decision) MayBeSooner() bool {
	return slices.ContainsFunc(d.Windows, func(w WindowState) bool { return w.Denied && w.Algorithm == Concurrency })
}

// EarliestReset is how long after At any of the windows that denied would have room for the
// cost: the literal rule of RequeueEarliestReset. The others may still deny then.
func (d Decision) EarliestReset() time.Duration {
	earliest := d.RetryIn
	for _, w := range d.Windows {
		if w.Denied {
			earliest = min(earliest, w.RetryIn)
		}
	}
	return earliest
}

// Reason tells a person who was denied by what and for how long, such as
// "throttled: github-api/burst, tenant acme, 1.8s". It is empty if granted.
func (d Decision) Reason() string {
	if d.Granted {
		return ""
	}
	window := ""
	longest := time.Duration(-1)
	for _, w := range d.Windows {
		if w.Denied && w.RetryIn > longest {
			window, longest = "/"+w.Name, w.RetryIn
		}
	}
	return fmt.Sprintf("throttled: %s%s, tenant %s, %v", d.Policy, window, printable(d.Tenant), roundUp(d.RetryIn))
}

// printable keeps names that are data from breaking out of a line of text.
func printable(s string) string {
	s = cut(s)
	quoted := fmt.Sprintf("%q", s)
	if quoted[1:len(quoted)-1] == s {
		return s
	}
	return quoted
}

// roundUp keeps two digits or so, and never says less than d.
func roundUp(d time.Duration) time.Duration {
	unit := time.Microsecond
	for _, u := range []time.Duration{time.Millisecond, 100 * time.Millisecond, time.Second} {
		if d >= 10*u {
			unit = u
		}
	}
	return (d + unit - 1) / unit * unit
}
