package script

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// The verbs of requests. lua/decide.lua says more.
const (
	Reserve   = "reserve"   // takes the costs in all windows, or in none
	Exempt    = "exempt"    // takes them in any case
	Observe   = "observe"   // takes them in any case, and answers when they would have fitted
	Peek      = "peek"      // answers as Reserve would
	Join      = "join"      // puts a ticket in line
	Leave     = "leave"     // takes it out
	PutBack   = "put_back"  // puts a taken ticket back at its rank
	Cancel    = "cancel"    // gives back all of a reservation
	Settle    = "settle"    // corrects what a reservation took
	Release   = "release"   // gives back what it holds by leases
	Renew     = "renew"     // prolongs its leases
	Pause     = "pause"     // notes that the upstream refused
	Resume    = "resume"    // ends a pause
	Remaining = "remaining" // notes what the upstream has left
	Expect    = "expect"    // answers when a ticket, or the last of a flow, is expected to start
	Refresh   = "refresh"   // writes a tenant's weight and own limits where its tickets wait
)

// A Request is one request of a batch.
type Request struct {
	Op       string
	ID       string   // of the reservation, 16 hex digits
	At       int64    // when it was granted (us)
	Replaces string   // its ID then, for Reserve, if that was another
	Once     string   // made by OnceKey; empty without an idempotency key
	Digest   string   // with Once: made by OnceDigest
	Hold     int64    // how long it may hold units by leases (us), 0 if unknown
	Own      Own      // what differs for the tenant
	Ticket   string   // made by TicketName; empty if it does not wait
	Place    *Place   // nil if no line is asked
	Keys     []string // of the scopes, made by ScopeKey
	Cost     string   // what it takes, such as "requests=1,tokens=5"; may be empty

	Actual  []int64 // of Settle: units by window, below 0 if they stay
	Never   []int   // of Cancel: the windows, by their numbers from 1, that never counted it
	Scopes  []int   // of Pause, Resume and Remaining: the scopes that are meant, from 1
	Refused Refused // of Pause
	Left    Left    // of Remaining

	lost, lostSeq int64 // of Cancel: what call lostSeq granted to its request of this number, from 1
	args          []any // what append adds, if that is known
}

// A Refused is a refusal by the upstream. Times are microseconds.
type Refused struct {
	Wait    int64  // how long nothing is granted
	Guess   int64  // the longest pause, if the upstream did not say how long; else 0
	Ramp    int64  // after Wait, the time in which limits that do not adapt open again
	RampMax int64  // to which repeated refusals double Ramp
	Adapt   int64  // 0 not, 1 by spreading grants, 2 by the rate too
	Tenant  string // the one that was refused
	Cause   string // what the upstream said; empty if that is unknown
	By      string // which limiter reported it
	ByHand  bool
}

// Left is what the upstream has left.
type Left struct {
	Unit         string
	Units, Reset int64 // Reset is in us from now
}

// Own is what differs for a tenant.
type Own struct {
	Windows     []OwnWindow
	Free        bool  // its tickets leave the line at once, uncharged
	PausedUntil int64 // before which its tickets do not leave the line (us); 0 is no pause
}

// An OwnWindow holds a tenant's own parameters of one window.
type OwnWindow struct {
	Window int // its place in Policy.Windows, from 1
	Params [4]int64
}

// A Place tells a line where the request waits, and under which conditions it joins.
type Place struct {
	Flow     string // made by Flow
	Tenant   string
	Weight   int64 // in thousandths
	Key      string
	Since    int64 // when it began to wait (us); 0: when it joins
	Front    bool
	MaxWait  int64 // the longest wait (us); 0 is no limit
	Backlog  int64 // tickets of the flow before it is refused; 0 is no limit
	Deadline int64 // the longest wait that makes sense (us); 0 is no limit
	Rank     int64 // of a ticket that is put back
}

// Refuse is a MaxWait or a Deadline by which a request is refused unless it is granted.
const Refuse = -1

// text returns the part of a place that every ticket has.
func (p *Place) text() string {
	if p == nil {
		return ""
	}
	text := p.Flow + " " + field(p.Tenant) + " " + strconv.FormatInt(p.Weight, 10) + " " + field(p.Key)
	if p.Since > 0 { // it is a part of the key to the scripts, which return it
		text += ":" + strconv.FormatInt(p.Since, 10)
	}
	return text
}

// readKey reads a key and since when its ticket of a rank waits.
func readKey(text string, rank int64) (key string, since int64) {
	key, began, _ := strings.Cut(text, ":")
	since, _ = strconv.ParseInt(began, 10, 64)
	return unfield(key), cmp.Or(since, joinedAt(rank))
}

// text returns it as an argument. What is about no window comes last: see own_text in
// lua/line_leave.lua.
func (o Own) text() string {
	if len(o.Windows) == 0 && !o.Free && o.PausedUntil == 0 {
		return ""
	}
	var b strings.Builder
	for _, w := range o.Windows {
		fmt.Fprintf(&b, "%d,%d,%d,%d;", w.Window, w.Params[0], w.Params[1], w.Params[2])
	}
	switch {
	case o.Free:
		b.WriteString("@!,0,1,0;")
	case o.PausedUntil > 0:
		fmt.Fprintf(&b, "@!,%d,0,0;", o.PausedUntil)
	}
	return b.String()
}

func (p *Policy) size() int { return 5 + len(p.Scopes) }

func (r *Request) append(args []any, leases bool) []any {
	if r.args != nil {
		return append(args, r.args...)
	}
	args = append(args, r.Op, dash(r.Cost), r.Ticket, r.Place.text(), r.fields(leases))
	for _, key := range r.Keys {
		args = append(args, key)
	}
	return args
}

// requestFields are the fields of a request, as lua/decide.lua lists them. Each returns a number or a
// text. What is 0 or empty is left out.
var requestFields = []struct {
	name string
	of   func(r *Request, p *Place) any
}{
	{"own", func(r *Request, _ *Place) any { return r.Own.text() }},
	{"front", func(_ *Request, p *Place) any { return flag(p.Front) }},
	{"max_wait", func(_ *Request, p *Place) any { return p.MaxWait }},
	{"backlog", func(_ *Request, p *Place) any { return p.Backlog }},
	{"deadline", func(_ *Request, p *Place) any { return p.Deadline }},
	{"rank", func(_ *Request, p *Place) any { return p.Rank }},
	{"id", func(r *Request, _ *Place) any { return r.ID }},
	{"at", func(r *Request, _ *Place) any { return r.At }},
	{"replaces", func(r *Request, _ *Place) any { return r.Replaces }},
	{"hold", func(r *Request, _ *Place) any { return r.Hold }},
	{"once", func(r *Request, _ *Place) any { return r.Once }},
	{"digest", func(r *Request, _ *Place) any { return r.Digest }},
	{"lost", func(r *Request, _ *Place) any { return r.lost }},
	{"lost_seq", func(r *Request, _ *Place) any { return r.lostSeq }},
	{"never", func(r *Request, _ *Place) any { return commas(r.Never) }},
	{"actual", func(r *Request, _ *Place) any { return commas(r.Actual) }},
	{"scopes", func(r *Request, _ *Place) any { return commas(r.Scopes) }},
	{"wait", func(r *Request, _ *Place) any { return r.Refused.Wait }},
	{"guess", func(r *Request, _ *Place) any { return r.Refused.Guess }},
	{"ramp", func(r *Request, _ *Place) any { return r.Refused.Ramp }},
	{"ramp_most", func(r *Request, _ *Place) any { return r.Refused.RampMax }},
	{"adapt", func(r *Request, _ *Place) any { return r.Refused.Adapt }},
	{"tenant", func(r *Request, _ *Place) any { return Escape(r.Refused.Tenant) }},
	{"cause", func(r *Request, _ *Place) any { return Escape(r.Refused.Cause) }},
	{"by", func(r *Request, _ *Place) any { return Escape(r.Refused.By) }},
	{"hand", func(r *Request, _ *Place) any { return flag(r.Refused.ByHand) }},
	{"unit", func(r *Request, _ *Place) any { return r.Left.Unit }},
	{"units", func(r *Request, _ *Place) any { return r.Left.Units }},
	{"reset", func(r *Request, _ *Place) any { return r.Left.Reset }},
}

func flag(set bool) int64 {
	if set {
		return 1
	}
	return 0
}

// fields writes what a request says as lua/codec.lua reads it: "name=12", or "name:text", by blanks.
// The scripts need the ID of a grant only if it holds leases or has an idempotency key.
func (r *Request) fields(leases bool) string {
	var text []byte
	named := leases || r.At > 0 || r.Once != "" || !grants(r.Op)
	place := cmp.Or(r.Place, &Place{})
	for _, f := range requestFields {
		switch value := f.of(r, place).(type) {
		case int64:
			if value != 0 && (named || f.name != "hold") {
				text = strconv.AppendInt(append(append(text, f.name...), '='), value, 10)
				text = append(text, ' ')
			}
		case string:
			if value != "" && (named || f.name != "id") {
				text = append(append(append(append(text, f.name...), ':'), value...), ' ')
			}
		}
	}
	return string(text)
}

// grants reports whether a verb may grant something.
func grants(op string) bool { return op == Reserve || op == Exempt || op == Observe }

// readFields calls number and text for the fields of a text. Each returns whether it knows the field.
func readFields(s string, number func(name string, n int64) bool, text func(name, value string) bool) bool {
	for field := range strings.FieldsSeq(s) {
		i := max(0, strings.IndexAny(field, "=:"))
		name, value := field[:i], field[i+1:]
		n, err := strconv.ParseInt(value, 10, 64)
		if field[i] == '=' && (err != nil || !number(name, n)) || field[i] != '=' && !text(name, value) {
			return false
		}
	}
	return true
}

func dash(s string) string { return cmp.Or(s, "-") }

func commas[T int | int64](numbers []T) string {
	list := make([]string, len(numbers))
	for i, n := range numbers {
		list[i] = strconv.FormatInt(int64(n), 10)
	}
	return strings.Join(list, ",")
}
