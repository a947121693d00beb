package script

import (
	"cmp"
	"fmt"
	"reflect"
	"strconv"
)

// The verbs of requests.
const (
	Reserve   = "reserve"   // takes the costs in all windows, or in none; then a ticket joins the line
	Exempt    = "exempt"    // takes them in any case
	Observe   = "observe"   // takes them in any case, and answers when they would have fitted
	Peek      = "peek"      // answers as Reserve would, and changes nothing
	Join      = "join"      // puts a ticket in line
	Leave     = "leave"     // takes it out
	PutBack   = "put_back"  // puts a taken ticket back at its rank, once, with the units of its grant
	Cancel    = "cancel"    // gives back all of a reservation, once; with a Place also its tenant's turns
	Settle    = "settle"    // corrects the units of a reservation
	Release   = "release"   // gives back its leases
	Renew     = "renew"     // keeps its leases for as long again
	Pause     = "pause"     // notes that the upstream refused: nothing is granted for a while
	Resume    = "resume"    // ends a pause, and the adapted rates
	Remaining = "remaining" // notes the units that the upstream has left
	Refresh   = "refresh"   // writes a flow's weight and own parameters as they are now
	Expect    = "expect"    // answers when a ticket, or the last of a flow, may start, else when costs fit
)

// A Request is one request of a call. Times and durations are microseconds.
type Request struct {
	Op       string
	ID       string   `lua:"id"`       // of the reservation, 16 hex digits
	At       int64    `lua:"at"`       // when it was granted; for Reserve: a grant to give back first, once
	Replaces string   `lua:"replaces"` // for Reserve: the ID of that grant. Others that wait go after it
	Once     string   `lua:"once"`     // made by OnceKey; empty without an idempotency key
	Digest   string   `lua:"digest"`   // with Once: made by OnceDigest
	Hold     int64    `lua:"hold"`     // how long it may hold units by leases, 0 if unknown
	Own      string   `lua:"own"`      // made by OwnParams, by window that differs; then OwnPause or OwnFree
	Paused   int64    `lua:"paused"`   // when operators' pause of the policy or the tenant ends; 0 is no pause
	Ticket   string   // made by TicketName; empty if it does not wait
	Place    *Place   // nil if no line is asked
	Keys     []string // of the scopes, made by ScopeKey
	Cost     string   // such as "requests=1,tokens=5"; may be empty

	Actual  []int64 `lua:"actual"` // of Settle: units by window, below 0 if they stay
	Never   []int   `lua:"never"`  // of Cancel: the windows, by their numbers from 1, that never counted it
	Scopes  []int   `lua:"scopes"` // of Pause, Resume and Remaining: the scopes that are meant, from 1
	Refused Refused // of Pause
	Left    Left    // of Remaining

	lost    int64 `lua:"lost"` // of Cancel: the grant of call lostSeq to its request of this number, from 1
	lostSeq int64 `lua:"lost_seq"`
}

// A Refused is a refusal by the upstream. Durations are microseconds.
type Refused struct {
	Wait   int64  `lua:"wait"`           // how long nothing is granted
	Guess  int64  `lua:"guess"`          // the longest pause, if the upstream did not say how long; else 0
	Adapt  int64  `lua:"adapt"`          // 0 not, 1 by spreading grants, 2 by the rate too
	Tenant string `lua:"tenant,escaped"` // the one that was refused
	Cause  string `lua:"cause,escaped"`  // the upstream's word for it; empty if that is unknown
	By     string `lua:"by,escaped"`     // which limiter reported it
}

// Left is the state of a limit that the upstream reports.
type Left struct {
	Unit  string `lua:"unit"`
	Units int64  `lua:"units"`
	Reset int64  `lua:"reset"` // us from now
}

// OwnParams returns a tenant's own parameters of a window, for Request.Own: see own_parameters in
// lua/windows.lua.
func OwnParams(window string, params [4]int64) string {
	return fmt.Sprintf("%s,%d,%d,%d;", window, params[0], params[1], params[2])
}

// OwnPause returns the last part of Request.Own where no ticket leaves the line before a time (us).
func OwnPause(until int64) string { return OwnParams("!", [4]int64{until}) }

// OwnFree is the last part of Request.Own where tickets leave the line at once, uncharged.
const OwnFree = "!,0,1,0;"

// A Place tells a line where the request waits, and under which conditions it joins.
type Place struct {
	Flow     string // made by Flow
	Tenant   string
	Weight   int64 // in thousandths
	Key      string
	Since    int64 // when it began to wait (us); 0: when it joins
	Front    bool  `lua:"front"`
	MaxWait  int64 `lua:"max_wait"` // the longest wait (us); 0 is no limit
	Backlog  int64 `lua:"backlog"`  // tickets of the flow before it is refused; 0 is no limit
	Deadline int64 `lua:"deadline"` // the longest wait that makes sense (us); 0 is no limit
	Rank     int64 `lua:"rank"`     // of a ticket that is put back
}

// Refuse is a MaxWait or a Deadline by which a request is refused unless it is granted.
const Refuse = -1

// text returns the part of a place that every ticket has.
func (p *Place) text() string {
	if p == nil {
		return ""
	}
	text := p.Flow + " " + escapeWord(p.Tenant) + " " + strconv.FormatInt(p.Weight, 10) + " " + escapeWord(p.Key)
	if p.Since > 0 { // it is a part of the key to the scripts, which return it
		text += ":" + strconv.FormatInt(p.Since, 10)
	}
	return text
}

// size is the number of arguments of a request.
func (p *Policy) size() int { return 5 + len(p.Scopes) }

// append adds the arguments of a request. The scripts need the ID of a grant only if it holds leases
// or has an idempotency key.
func (r Request) append(args []any, leases bool) []any {
	if grants(r.Op) && !leases && r.At == 0 && r.Once == "" {
		r.ID, r.Hold = "", 0
	}
	args = append(args, r.Op, dash(r.Cost), r.Ticket, r.Place.text(),
		string(appendFields(nil, reflect.ValueOf(&r).Elem(), requestFields)))
	for _, key := range r.Keys {
		args = append(args, key)
	}
	return args
}

// grants reports whether a verb may grant something.
func grants(op string) bool { return op == Reserve || op == Exempt || op == Observe }

func dash(s string) string { return cmp.Or(s, "-") }
