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
	Hold     int64    // how long it may hold units by leases (us), 0 if unknown
	Own      Own      // what differs for the tenant
	Ticket   string   // made by TicketName; empty if it does not wait
	Place    *Place   // nil if no line is asked
	Word     string   // of some verbs: made by OnceWord, SettleWord, CancelWord, PauseWord, ResumeWord or RemainingWord
	Keys     []string // of the scopes, made by ScopeKey
	Cost     string   // what it takes, such as "requests=1,tokens=5"; may be empty

	args []any // what append adds, if that is known
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
	return p.Flow + " " + field(p.Tenant) + " " + strconv.FormatInt(p.Weight, 10) + " " + field(p.Key)
}

// options returns the part that few tickets have.
func (p *Place) options() string {
	if p == nil || !p.Front && p.MaxWait == 0 && p.Backlog == 0 && p.Deadline == 0 && p.Rank == 0 {
		return ""
	}
	front := 0
	if p.Front {
		front = 1
	}
	return fmt.Sprintf("%d %d %d %d %d", front, p.MaxWait, p.Backlog, p.Deadline, p.Rank)
}

// text returns it as an argument. What is about no window comes last: see own_text in
// lua/line_leave.lua.
func (o Own) text() string {
	if len(o.Windows) == 0 && !o.Free && o.PausedUntil == 0 {
		return ""
	}
	var b strings.Builder
	for _, w := range o.Windows {
		fmt.Fprintf(&b, "%d %d %d %d;", w.Window, w.Params[0], w.Params[1], w.Params[2])
	}
	switch {
	case o.Free:
		b.WriteString("@! 0 1 0;")
	case o.PausedUntil > 0:
		fmt.Fprintf(&b, "@! %d 0 0;", o.PausedUntil)
	}
	return b.String()
}

func (p *Policy) size() int { return 5 + len(p.Scopes) }

func (r *Request) append(args []any, leases bool) []any {
	if r.args != nil {
		return append(args, r.args...)
	}
	own, options, extra := r.Own.text(), r.Place.options(), r.extra(leases)
	more := "" // for most requests
	if own+options+extra != "" {
		more = own + "\t" + options + "\t" + extra
	}
	args = append(args, r.Op, dash(r.Cost), r.Ticket, r.Place.text(), more)
	for _, key := range r.Keys {
		args = append(args, key)
	}
	return args
}

// extra returns what a request has if its caller repeats it, if it holds leases, or if it is about
// a reservation.
func (r *Request) extra(leases bool) string {
	switch r.Op {
	case Reserve, Exempt, Observe, Peek, Join, Leave, Refresh, Expect:
		if r.At == 0 && r.Once == "" && !leases {
			return ""
		}
	}
	at, hold := strconv.FormatInt(r.At, 10), strconv.FormatInt(r.Hold, 10)
	if r.Replaces != "" {
		at += ":" + r.Replaces
	}
	return dash(r.ID) + " " + at + " " + dash(r.Once) + " " + hold + " " + r.Word
}

func dash(s string) string { return cmp.Or(s, "-") }

// SettleWord returns Request.Word of a correction. Costs are units by window, below 0 if they stay.
func SettleWord(costs []int64) string {
	list := make([]string, len(costs))
	for i, cost := range costs {
		if list[i] = "-"; cost >= 0 {
			list[i] = strconv.FormatInt(cost, 10)
		}
	}
	return strings.Join(list, ",")
}

// A Refused is a refusal by the upstream, for the scopes at Places, from 1. Times are microseconds.
type Refused struct {
	Places  []int
	Wait    int64  // how long nothing is granted
	Guess   int64  // the longest pause, if the upstream did not say how long; else 0
	Ramp    int64  // after Wait, the time in which limits that do not adapt open again
	RampMax int64  // to which repeated refusals double Ramp
	Adapt   int    // 0 not, 1 by spreading grants, 2 by the rate too
	Tenant  string // the one that was refused
	Cause   string // what the upstream said; empty if that is unknown
	By      string // which limiter reported it
	ByHand  bool
}

// PauseWord returns Request.Word of a pause. It ends with who reported what, by colons: the script
// adds when. See PauseAnswer.
func PauseWord(r Refused) string {
	hand := ""
	if r.ByHand {
		hand = "h"
	}
	return fmt.Sprintf("%s %d %d %d %d %d %s:%s:%s:%s", commas(r.Places), r.Wait, r.Guess, r.Ramp,
		r.RampMax, r.Adapt, Escape(r.Tenant), Escape(r.Cause), Escape(r.By), hand)
}

// CancelWord returns Request.Word of a cancel. The windows, by their numbers from 1, never counted
// what is given back.
func CancelWord(windows []int) string { return commas(windows) }

// ResumeWord returns Request.Word of the end of a pause.
func ResumeWord(places []int) string { return commas(places) }

// RemainingWord returns Request.Word of what the upstream has left: units until reset, in us from
// now.
func RemainingWord(places []int, unit string, units, reset int64) string {
	return fmt.Sprintf("%s %s %d %d", commas(places), unit, units, reset)
}

func commas(numbers []int) string {
	list := make([]string, len(numbers))
	for i, n := range numbers {
		list[i] = strconv.Itoa(n)
	}
	return strings.Join(list, ",")
}
