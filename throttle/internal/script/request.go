package script

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-go/sluice/internal/redischeck"
)

// The verbs of requests.
const (
	Reserve   = "reserve"   // takes the costs in all windows; if one has no room, in none, and a ticket joins the line
	Exempt    = "exempt"    // takes them in any case; while operators pause the request, it acts as Reserve
	Observe   = "observe"   // is Exempt, and answers when they would have fitted
	Peek      = "peek"      // answers as Reserve would without a ticket; it counts nothing, and changes no position
	Join      = "join"      // puts a ticket in line
	Leave     = "leave"     // takes it out
	PutBack   = "put_back"  // puts a taken ticket back at its rank, and gives back the units of its grant, once
	Cancel    = "cancel"    // gives back all of a reservation, once; with a LinePart.Rank it also moves the tenant's tag back
	Settle    = "settle"    // corrects the units of a reservation
	Release   = "release"   // gives back its leases
	Renew     = "renew"     // keeps its leases for as long again
	Pause     = "pause"     // notes that the upstream refused: nothing is granted for a while. Operators' are Policy.Paused and Settings.Paused
	Resume    = "resume"    // ends a pause, and the adapted rates
	Remaining = "remaining" // notes the units that the upstream has left
	Refresh   = "refresh"   // writes a flow's weight and own parameters as they are now
	Expect    = "expect"    // answers when the ticket may start, by default the flow's last one. If none waits, it answers for a request
)

// A Request is one request of a call. Times and durations are microseconds. Fields with names in tags are sent as JSON.
type Request struct {
	Op        string   `json:"-"`
	ID        string   `json:"id,omitempty"`       // of the reservation, 16 hex digits
	At        int64    `json:"at,omitempty"`       // when the reservation was granted; with Replaces, when the replaced one was
	Replaces  string   `json:"replaces,omitempty"` // of verbs that grant: a grant to give back first, once. Only windows may deny such a request
	Hold      int64    `json:"hold,omitempty"`     // how long it may hold units by leases, 0 if unknown
	Settings  Settings `json:"settings,omitzero"`
	Ticket    string   `json:"-"` // made by TicketName; empty if it does not wait
	Keys      []string `json:"-"` // of the scopes, made by ScopeKey
	Cost      string   `json:"-"` // such as "requests=1,tokens=5"; may be empty
	*LinePart          // nil if the verb needs none

	Actual  []int64  `json:"actual,omitempty"`  // of Settle: units by window, below 0 if they stay
	Never   []int    `json:"never,omitempty"`   // of Cancel, PutBack and Renew: windows, by numbers from 1, that never counted it
	Scopes  []int    `json:"scopes,omitempty"`  // of Pause, Resume and Remaining: the scopes that are meant, from 1
	Refused *Refused `json:"refused,omitempty"` // of Pause
	Left    *Left    `json:"left,omitempty"`    // of Remaining

	// Of Cancel, for a grant whose answer was lost: the request for it had the number Lost, from 1, in the call LostSeq.
	Lost    int64 `json:"lost,omitempty"`
	LostSeq int64 `json:"lost_seq,omitempty"`
}

// A Refused is a refusal by the upstream. Durations are microseconds.
type Refused struct {
	Wait     int64  `json:"wait"`               // how long nothing is granted
	Guess    int64  `json:"guess,omitempty"`    // the longest pause to guess if the upstream did not say how long; else 0
	Adapt    bool   `json:"adapt,omitempty"`    // whether the scopes adapt
	Tenant   string `json:"tenant,omitempty"`   // whose call was refused
	Cause    string `json:"cause,omitempty"`    // the upstream's word for it; empty if that is unknown
	Reporter string `json:"reporter,omitempty"` // which limiter reported it
}

// Left is the state of a limit that the upstream reports.
type Left struct {
	Unit  string `json:"unit"`
	Units int64  `json:"units"`
	Reset int64  `json:"reset"` // us from now; in an answer, when that is
}

// Settings are one tenant's own. Lines keep them as a text, as calls carry them.
type Settings struct {
	Windows   map[string][4]int64 `json:"windows,omitempty"`   // parameters, by names and kinds of windows with the tenant's own
	Paused    int64               `json:"paused,omitempty"`    // when operators' pause of the tenant ends; 0: there is none
	Unlimited bool                `json:"unlimited,omitempty"` // tickets leave the line at once, uncharged
}

// MarshalText implements encoding.TextMarshaler.
func (s Settings) MarshalText() ([]byte, error) {
	type fields Settings
	return json.Marshal(fields(s))
}

// A LinePart is the part of a request that only a line needs: where it waits, and under which conditions it joins.
type LinePart struct {
	Flow     string `json:"-"` // made by Flow
	Tenant   string `json:"-"`
	Weight   int64  `json:"-"` // in thousandths
	Key      string `json:"-"`
	Since    int64  `json:"-"` // when it began to wait (us); 0: when it joins
	Front    bool   `json:"front,omitempty"`
	MaxWait  int64  `json:"max_wait,omitempty"` // the longest wait (us); 0 is no limit
	Backlog  int64  `json:"backlog,omitempty"`  // with so many tickets of the flow it is refused; 0 is no limit
	Deadline int64  `json:"deadline,omitempty"` // in how many us the ticket must be able to start; 0 is no limit
	Rank     int64  `json:"rank,omitempty"`     // of a taken ticket that is put back or cancelled
}

// Refuse, as a MaxWait or a Deadline, refuses a request that is not granted at once.
const Refuse = -1

// text returns the fields that every ticket has.
func (l *LinePart) text() string {
	if l == nil {
		return ""
	}
	text := l.Flow + " " + word(l.Tenant) + " " + strconv.FormatInt(l.Weight, 10) + " " + word(l.Key)
	if l.Since > 0 { // the scripts keep and return it as a part of the key
		text += ":" + strconv.FormatInt(l.Since, 10)
	}
	return text
}

// argsEach returns the number of arguments that append adds for one request.
func (p *Policy) argsEach() int { return 5 + len(p.Scopes) }

// append adds the arguments of a request. The scripts need the ID of a grant only if it holds leases.
func (r Request) append(args []any, leases bool) []any {
	if grants(r.Op) && !leases {
		r.ID, r.Hold = "", 0
	}
	if f := r.Refused; f != nil {
		r.Refused = &Refused{f.Wait, f.Guess, f.Adapt, Escape(f.Tenant), Escape(f.Cause), Escape(f.Reporter)}
	}
	args = append(args, r.Op, cmp.Or(r.Cost, "-"), r.Ticket, r.LinePart.text(), toJSON(r))
	for _, key := range r.Keys {
		args = append(args, key)
	}
	return args
}

// grants reports whether a verb may grant units.
func grants(op string) bool { return op == Reserve || op == Exempt || op == Observe }

// The statuses of answers. Tickets of a take have others: see lua/take.lua.
const (
	Denied      = "denied"
	Granted     = "ok"
	Done        = Granted // of a verb that grants nothing
	Joined      = "joined"
	TooLong     = "too_long" // refused
	BacklogFull = "backlog"  // refused
	Waits       = "waits"    // was in line already
	TooLate     = "too_late" // refused
	Nothing     = "nothing"  // depends on the verb: see lua/decide.lua
	Failed      = "failed"
)

// The scripts remember the first letter of a status. Only Granted may begin with o, and only Joined with j.
var statuses = []string{Denied, Granted, Joined, TooLong, BacklogFull, Waits, TooLate, Nothing, Failed}

// Values of Answer.Binds that are no window: Slots, a handler slot, and Paused, the pause in Answer.Pause.
const Slots, Paused = -1, -2

// An Answer answers a request. Times are microseconds by the clock of Redis. Fields with names in tags come as JSON.
type Answer struct {
	Status   string        `json:"-"`
	At       int64         `json:"-"`         // when this was decided, or was granted by an earlier copy of the call
	Time     int64         `json:"time"`      // the expected start
	Latest   int64         `json:"latest"`    // the expected start's upper bound; 0 if none is known
	Binds    int64         `json:"binds"`     // the number of the window that delays it for longest, from 1; Slots, Paused, or 0
	Behind   int64         `json:"behind"`    // how far the clock is behind the windows
	Nudge    bool          `json:"nudge"`     // a server should be woken for the ticket
	Pause    PauseAnswer   `json:"pause"`     // zero without one
	Adapted  AdaptedAnswer `json:"adapted"`   // zero while the published rate applies
	Left     Left          `json:"left"`      // zero if unknown
	OldCosts []int64       `json:"old_costs"` // by window, the cost until this correction; nil if it was never corrected
	Fits     []int64       `json:"fits"`      // by window, when the cost fits (0: at once): after tickets that go first, unless it joins
	Used     []int64       `json:"-"`         // by window, its units; nil unless hasWindows
	Resets   []int64       `json:"-"`         // by window, when nothing is counted any more
	Err      error         `json:"-"`         // *ReplyError, if the status is Failed, or of go-redis, if there is no answer

	failedSeq, failedIndex int64 // if the call failed: its number, and the request's in it, from 1; else 0
}

// Values of PauseAnswer.Whose: the upstream's pause, or operators' by Policy.Paused or Settings.Paused.
const OfUpstream, OfPolicy, OfTenant = 0, 1, 2

// A PauseAnswer is the longest pause in force for a request.
type PauseAnswer struct {
	Whose    int64  `json:"whose"`
	Until    int64  `json:"ends"`     // nothing is granted until then
	At       int64  `json:"reported"` // when it was reported; like the fields below, only of the upstream's
	Reporter string `json:"reporter"`
	Cause    string `json:"cause"`
	Tenant   string `json:"tenant"` // whose call was refused
}

// An AdaptedAnswer is a window's rate after refusals by the upstream.
type AdaptedAnswer struct {
	Rate     int64 `json:"rate"`  // in millionths of the published rate
	Since    int64 `json:"since"` // the first refusal
	Refusals int64 `json:"refusals"`
	Window   int64 `json:"window"` // its number, from 1
	Changed  int64 `json:"cut"`    // when a refusal last cut the rate, or began to spread grants
	Until    int64 `json:"spread"` // until when grants are spread
}

// A ReplyError names the malformed value of a reply, or quotes why the script could not decide a request:
// SLUICE_STATE or SLUICE_CLOCK, and a reason.
type ReplyError struct{ Reason string }

func (e *ReplyError) Error() string { return e.Reason }

// ScriptFailed reports whether an error of Redis means that a script failed, rather than that it cannot run now.
func ScriptFailed(err error) bool {
	text := err.Error()
	return isAnswer(err) && strings.HasPrefix(text, "ERR ") && strings.Contains(text, "script") && !redischeck.CannotServe(err)
}

// hasWindows reports whether an answer has the state of every window.
func hasWindows(op string) bool { return grants(op) || op == Peek || op == Expect || op == Cancel }

// A reader reads a flat reply value by value, up to the first malformed one. After that all values are zero.
type reader struct {
	reply []any
	index int  // of the next value
	bad   bool // a value was malformed
}

func (r *reader) text() string { return next[string](r) }

// integer reads an integer. None in a reply may be below 0.
func (r *reader) integer() int64 {
	n := next[int64](r)
	r.bad = r.bad || n < 0
	return n
}

func next[T any](r *reader) (zero T) {
	if !r.bad && r.index < len(r.reply) {
		if value, ok := r.reply[r.index].(T); ok {
			r.index++
			return value
		}
	}
	r.bad = true
	return zero
}

func (p *Policy) readAnswers(reply []any, requests []Request) ([]Answer, error) {
	r := &reader{reply: reply}
	answers := make([]Answer, len(requests))
	for i := range answers {
		p.readAnswer(r, requests[i].Op, &answers[i])
	}
	if r.bad || r.index != len(reply) {
		return nil, &ReplyError{fmt.Sprintf("value %d of %d for %d requests", r.index+1, len(reply), len(requests))}
	}
	return answers, nil
}

func (p *Policy) readAnswer(r *reader, op string, a *Answer) {
	a.Status = r.text()
	r.bad = r.bad || !slices.Contains(statuses, a.Status)
	if a.Status == Failed {
		a.Err = &ReplyError{r.text()}
		return
	}
	a.At = r.integer()
	a.Time, a.Latest = a.At, a.At
	if fields := r.text(); fields != "" {
		r.bad = json.Unmarshal([]byte(fields), a) != nil || a.Latest < 0 || r.bad
		pause := &a.Pause
		r.bad = r.bad || pause.Whose < OfUpstream || pause.Whose > OfTenant
		pause.Reporter, pause.Cause, pause.Tenant = Unescape(pause.Reporter), Unescape(pause.Cause), Unescape(pause.Tenant)
	}
	if !hasWindows(op) {
		return
	}
	r.bad = r.bad || a.Fits != nil && len(a.Fits) != len(p.Windows)
	for range p.Windows {
		a.Used, a.Resets = append(a.Used, r.integer()), append(a.Resets, r.integer())
	}
}

// Sections returns the payloads in a scope's value, by label. The value begins with 8 bytes, and each section with 11:
// three of them have the length of the payload, and the last one that of the label. See lua/scope.lua.
func Sections(value string) map[string]string {
	found := map[string]string{}
	for i := 8; i+11 <= len(value); {
		payload := i + 11 + int(value[i+10]) // where it begins, after the label
		end := payload + int(value[i+7])<<16 + int(value[i+8])<<8 + int(value[i+9])
		if end > len(value) {
			break
		}
		found[value[i+11:payload]] = value[payload:end]
		i = end
	}
	return found
}
