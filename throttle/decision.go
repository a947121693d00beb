package throttle

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// A Decision is the answer to a request. It belongs to the caller.
type Decision struct {
	// Adapted, if not nil, says that fewer units are granted than the windows allow, as the upstream
	// refused calls: see Policy.KeepRate. Grants do not report it, but Peek does.
	Adapted *Adapted

	AlreadyQueued bool      // the ticket was in line before this call, and keeps its place
	At            time.Time // when the request was decided, by the clock of Redis

	// Binds names the cause of the longest delay: a window, ByPause, ByUpstream, ByLine or BySlots; it is empty if
	// nothing delays the request. If granted, it names the window that the ticket was expected to wait for at its join.
	Binds string

	// ClockBehind is how far the clock of Redis is behind the newest change of these windows: usually
	// 0. If it was set back, the windows stand still until it has caught up.
	ClockBehind time.Duration

	// Exempt says that the tenant is counted, but never denied. Line.Join also sets it if the policy observes.
	Exempt bool

	// FailedOpen is an ErrUnavailable if the request was granted uncounted, by Policy.FailOpen, or else nil.
	// Windows is empty then, and At is by this machine's clock.
	FailedOpen error

	// Granted says that all windows have counted the cost, or after a Peek that they would. If FailedOpen, none has.
	Granted bool

	// Latest is an upper bound of RetryIn, unless others join ahead, a limit is cut, the upstream pauses, or a
	// Calendar window delays it by more than 8 resets. It is RetryIn where that is exact, and 0 where no bound is
	// known, such as with BySlots.
	Latest time.Duration

	Observed *Observed // why the request would have been denied without Policy.Observe; nil if it would not

	// Pause, if not nil, is in force for the request. A window may delay it for longer: see Binds.
	Pause *Pause

	Policy string // its name

	// Queued says that the ticket waits in line: the request was denied, or came by Line.Join.
	Queued bool

	// Remaining, if not nil, is how much the upstream has left, less the grants since it said so. Grants
	// do not report it, but Peek does.
	Remaining *Remaining

	// Reservation is the capacity that was granted. It is zero after a denial and after a Peek.
	Reservation Reservation

	// RetryIn is the time from At until the whole cost is expected to fit, after the tickets that wait
	// before it, and if no other request takes the room: whole microseconds, rounded up. It is 0 if
	// granted. For a denied request that is not in line it is at least 1 microsecond.
	RetryIn time.Duration

	Tenant string // of the request

	// Windows has each window's state after the decision, in the policy's order. Used is 0 if a take's reply was lost.
	// Windows is empty if FailedOpen, from Line.Join, and for tickets uncharged or of another version of the policy.
	Windows []WindowState
}

// An Observed describes the denial that an observing policy would have made: see Policy.Observe.
type Observed struct {
	Binds     string        // the window that would have denied for longest, or ByUpstream
	NeverFits bool          // the cost is above the window's limit: the request would have failed
	Wait      time.Duration // how long the request would have waited; 0 if NeverFits
}

// A WindowState is the state of one window after a decision. JSON has its durations in seconds, as
// period_seconds and retry_in_seconds, and is not read back.
type WindowState struct {
	Algorithm Algorithm     `json:"algorithm"`          // how the window counts
	Burst     int64         `json:"burst"`              // the most units at once: Limit, except for GCRA
	Denied    bool          `json:"denied"`             // the cost does not fit, or the upstream paused it
	Limit     int64         `json:"limit"`              // units a period for this tenant; from Line.Take mostly by Policy.Tenants
	Name      string        `json:"name"`               // of the window
	Period    time.Duration `json:"-"`                  // 0 for Calendar and Concurrency
	Remaining int64         `json:"remaining"`          // units below Burst, even during a pause; at least 0
	ResetsAt  time.Time     `json:"resets_at,omitzero"` // when nothing counts any more; zero from Line.Take
	RetryIn   time.Duration `json:"-"`                  // from Decision.At until the cost fits; 0 unless Denied
	Scope     ScopeValue    `json:"scope"`              // which count of the window this is
	Unit      string        `json:"unit"`               // what it counts
	Used      int64         `json:"used"`               // units counted; may be above a limit that was cut
}

// MarshalJSON writes durations in seconds.
func (w WindowState) MarshalJSON() ([]byte, error) {
	type fields WindowState // without this method
	return json.Marshal(struct {
		fields
		Period  float64 `json:"period_seconds"`
		RetryIn float64 `json:"retry_in_seconds"`
	}{fields(w), w.Period.Seconds(), w.RetryIn.Seconds()})
}

// A ScopeValue identifies one count of a window: its scope's attributes, in alphabetical order, with their values.
type ScopeValue struct {
	Attributes []string `json:"attributes"`
	Values     []string `json:"values"` // one for each attribute
}

// String returns for instance "tenant=acme,user=bob", or "shared" for the count of a shared window.
func (s ScopeValue) String() string {
	if len(s.Attributes) == 0 {
		return "shared"
	}
	parts := make([]string, len(s.Attributes))
	for i, a := range s.Attributes {
		parts[i] = a + "=" + quote.Name(s.Values[i])
	}
	return strings.Join(parts, ",")
}

// A Pause is the effect of a refusal by the upstream, or of operators: nothing is granted until it ends. Only
// operators' pauses stop exempt tenants, too. Of several pauses the longest counts. Tickets in line keep their places.
type Pause struct {
	At     time.Time `json:"at,omitzero"` // when it was reported; zero if it was set by an operator
	Author string    `json:"author"`      // which limiter reported it (Config.Name), or which operator set it
	ByHand bool      `json:"by_hand"`     // set by an operator, and not by a refusal
	Cause  string    `json:"cause"`       // what refused, such as "429", or the operator's reason; empty if unknown
	Policy string    `json:"policy"`      // its name
	Tenant string    `json:"tenant"`      // whose call was refused, or who is paused; empty if there is none
	Until  time.Time `json:"until"`       // before which nothing is granted
}

// Describe says what the pause means at a time, and who reported or set it, such as "paused until
// 14:02:10 UTC by the upstream's 429 to acme, reported by worker-7".
func (p *Pause) Describe(at time.Time) string {
	until := p.Until.Add(time.Second - 1).UTC()
	layout := "15:04:05"
	if until.Sub(at) > 12*time.Hour {
		layout = time.DateTime
	}
	text, verb := "paused until "+until.Format(layout)+" UTC by ", "reported"
	switch {
	case p.ByHand && p.Cause != "":
		text, verb = text+"hand: "+quote.Name(p.Cause), "set"
	case p.ByHand:
		text, verb = text+"hand", "set"
	default:
		text += "the upstream's " + cmp.Or(quote.Name(p.Cause), "refusal")
		if p.Tenant != "" {
			text += " to " + quote.Name(p.Tenant)
		}
	}
	if p.Author == "" {
		return text
	}
	return text + ", " + verb + " by " + quote.Name(p.Author)
}

// An Adapted is the rate that a policy adapted to, after refusals by the upstream: see Policy.KeepRate.
type Adapted struct {
	Published float64   `json:"published"` // what the window grants: units per second
	Rate      float64   `json:"rate"`      // what is granted now: units per second
	Refusals  int64     `json:"refusals"`  // how often the upstream refused; calls of one moment count once
	Since     time.Time `json:"since"`     // the first of them
	Until     time.Time `json:"until"`     // when the window grants as before, unless a call is refused
	Window    string    `json:"window"`    // the window by which grants are spread
}

// String says how often the upstream refused, and what is granted now, such as "refused 3 times since
// 14:02 UTC, now 85% of the limit", or "now spread evenly" while only the spread has changed.
func (a Adapted) String() string {
	times, now := "once", "now spread evenly"
	if a.Refusals > 1 {
		times = fmt.Sprintf("%d times", a.Refusals)
	}
	if percent := fmt.Sprintf("%.3g%%", 100*a.Rate/a.Published); percent != "100%" {
		now = "now " + percent + " of the limit"
	}
	return fmt.Sprintf("refused %s since %s UTC, %s", times, a.Since.UTC().Format("15:04"), now)
}

// Remaining reports how much of a limit is left at an upstream.
type Remaining struct {
	Unit  string    `json:"unit"`  // what it counts, as a window of the policy does
	Units int64     `json:"units"` // how many are left
	Until time.Time `json:"until"` // when the upstream counts from 0 again
}

// EarliestReset returns the time from At until the first of the windows that denied has room for
// the cost. Others may still deny then. It is the delay of Policy.EarliestReset.
func (d Decision) EarliestReset() time.Duration {
	earliest := d.RetryIn
	for _, w := range d.Windows {
		if w.Denied {
			earliest = min(earliest, w.RetryIn)
		}
	}
	return earliest
}

// What Decision.Binds may name besides windows. Each text has a space, which no window's name has.
const (
	ByPause    = "a pause"                 // by operators
	ByUpstream = "a pause by the upstream" // after a refusal
	ByLine     = "earlier tickets"         // they go first; also where no cause is known
	BySlots    = "handler slots"           // servers have none free for tickets that fit
)

// Reason says in one line which window denied which tenant, and for how long, such as "throttled:
// github-api/burst, tenant acme, 1.8s"; or which pause, or that others wait before it. While the
// policy adapts it adds the rate: see Adapted.String. It is empty if granted.
func (d Decision) Reason() string {
	if d.Granted {
		return ""
	}
	window, why := "", ""
	switch d.Binds {
	case ByPause, ByUpstream:
		why = ": " + d.Pause.Describe(d.At)
	case ByLine:
		why = ": others wait before it"
	case "", BySlots: // nobody else delays it
	default:
		window = "/" + d.Binds
	}
	if d.Adapted != nil {
		why += ": " + d.Adapted.String()
	}
	return fmt.Sprintf("throttled: %s%s, tenant %s, %v%s",
		d.Policy, window, quote.Name(d.Tenant), roundUp(d.RetryIn), why)
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
