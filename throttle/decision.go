package throttle

import (
	"fmt"
	"slices"
	"time"
)

// A Decision is the answer to a request, with the state of every window after it.
type Decision struct {
	// Adapted, if not nil, says that fewer units are granted than the windows allow, as the upstream
	// refused calls: see Policy.Adapt. Grants do not tell, but Peek does.
	Adapted *Adapted

	// AlreadyQueued says that the ticket was in line before this call.
	AlreadyQueued bool

	// At is when this was decided, by the clock of Redis.
	At time.Time

	// ClockBehind is how far the clock of Redis is behind the newest change of these windows. More
	// than moments means that it was set back: the windows stand still until it has caught up.
	ClockBehind time.Duration

	// Exempt says that the tenant, or this request, is counted, but never denied.
	Exempt bool

	// FailedOpen is why a request was granted without being counted: Redis did not answer and
	// the policy says fail: open. Windows is empty then.
	FailedOpen error

	// Granted says that the cost was taken from all windows. For Peek: that it would have been.
	Granted bool

	// Pause, if not nil, is what the upstream has paused of the request's scopes. It is nil if
	// granted.
	Pause *Pause

	Policy string

	// Queued says that the ticket waits in line: the request was denied, and joined.
	Queued bool

	// Reservation is what was granted. It is zero after a denial and after a Peek.
	Reservation Reservation

	// RetryIn is how long after At the whole cost is expected to fit, given the tickets that wait
	// before it, and if no other request takes the room first. It is 0 if granted. Otherwise it is at
	// least 1 microsecond unless the ticket is queued, and never rounded down.
	RetryIn time.Duration

	// RetryInLeast is a lower bound of RetryIn, whatever becomes of the tickets before it. A deadline
	// that is sooner will be missed.
	RetryInLeast time.Duration

	// RetryInMost is an upper bound of RetryIn, under the same conditions. It equals RetryIn where
	// that is exact.
	RetryInMost time.Duration

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
	Scope     ScopeValue    // whom it counts
	Unit      string        // what it counts
	Used      int64         // units counted; above the limit after a cut, or by exempt tenants
}

// RetryInIsBound reports whether RetryIn is only an upper bound: a Concurrency window denied, and what
// it holds may be given back at any time.
func (d Decision) RetryInIsBound() bool {
	return slices.ContainsFunc(d.Windows, func(w WindowState) bool {
		a := algorithms[w.Algorithm]
		return w.Denied && a != nil && a.leases
	})
}

// EarliestReset is how long after At the first of the windows that denied has room for the cost.
// Others may still deny then: RequeueEarliestReset goes by it, RetryIn does not.
func (d Decision) EarliestReset() time.Duration {
	earliest := d.RetryIn
	for _, w := range d.Windows {
		if w.Denied {
			earliest = min(earliest, w.RetryIn)
		}
	}
	return earliest
}

// Reason says in one line which window denied which tenant and for how long, such as
// "throttled: github-api/burst, tenant acme, 1.8s". Where an upstream's pause is longer, it names the
// pause and the tenant that was refused; where no window denied, it says that others wait. While the
// policy adapts it adds the rate: "refused 3 times since 14:02 UTC, now 8.5/s of 10/s". It is empty if
// granted.
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
	pause := ""
	if d.Pause != nil && !d.At.Add(longest).After(d.Pause.OpensAt) {
		window, pause = "", ": "+d.Pause.describe(d.At)
	} else if window == "" && d.Queued {
		pause = ": others wait before it"
	}
	if d.Adapted != nil {
		pause += ": " + d.Adapted.String()
	}
	return fmt.Sprintf("throttled: %s%s, tenant %s, %v%s", d.Policy, window, printable(d.Tenant), roundUp(d.RetryIn), pause)
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
