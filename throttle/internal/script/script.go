// Package script is the only way from Go to the scripts in Redis. It encodes calls, decodes
// replies, gathers calls into batches and assembles the texts in lua/. It knows no policies:
// package throttle says what to send.
//
// A call names one key, by which a cluster finds its server. Its arguments begin with a header
// (Policy.header) and go on with requests (Request) or the fields of a take (TakeRequest).
package script

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// A Policy is what the scripts have to know of a policy. It does not change after Prepare.
type Policy struct {
	Name       string
	Algorithms []string // the Lua files of the algorithms in use, without ".lua", sorted
	Scopes     []string // the attributes of every scope, separated by commas, narrow to broad
	Windows    []Window

	scripts *scripts
	keys    []string
	leases  bool // some window holds what is granted
	lists   bool // some window has a list
	scopes  string
	windows string
}

// A Window is one window of a policy. Overrides of tenants come with a request.
type Window struct {
	Scope  int // its place in Policy.Scopes, from 1
	Name   string
	Kind   string // the algorithm's letter
	Leases bool   // what it grants has to be released
	Unit   string
	Params [4]int64

	// List, if not nil, stands in place of the last parameter: a list for calls around this time.
	List func(now time.Time) string
}

// Prepare makes a policy ready for calls.
func (l *Library) Prepare(p *Policy) *Policy {
	p.scripts = l.of(p.Algorithms)
	p.keys = []string{Prefix(l.Prefix, p.Name) + "q"}
	var scopes, windows strings.Builder
	for _, attributes := range p.Scopes {
		fmt.Fprintf(&scopes, "%s;", attributes)
	}
	for _, w := range p.Windows {
		p.leases, p.lists = p.leases || w.Leases, p.lists || w.List != nil
		last := strconv.FormatInt(w.Params[3], 10)
		if w.List != nil {
			last = listed
		}
		fmt.Fprintf(&windows, "%d %s %s %s %d %d %d %s;",
			w.Scope, w.Name, w.Kind, w.Unit, w.Params[0], w.Params[1], w.Params[2], last)
	}
	p.scopes, p.windows = scopes.String(), windows.String()
	return p
}

// listed stands for a parameter that is a list: those follow in the argument after.
const listed = "@"

// listsText holds the lists of windows around a time, each with its end.
func (p *Policy) listsText(now int64) string {
	if !p.lists {
		return ""
	}
	around := time.Now()
	if now > 0 {
		around = time.UnixMicro(now)
	}
	var b strings.Builder
	for _, w := range p.Windows {
		if w.List != nil {
			b.WriteString(w.List(around))
			b.WriteByte(';')
		}
	}
	return b.String()
}

// header returns arguments, with room for more, that begin as every call does.
func (p *Policy) header(now int64, process string, seq int64, room int) []any {
	args := make([]any, 0, 6+room)
	return append(args, now, process, seq, p.scopes, p.windows, p.listsText(now))
}

// What a request asks for.
const (
	Reserve   = "reserve" // takes the costs in all windows, or in none
	Exempt    = "exempt"  // takes them in any case
	Peek      = "peek"    // tells what Reserve would answer
	Join      = "join"    // puts a ticket in line
	Leave     = "leave"   // takes it out
	PutBack   = "put_back"
	Cancel    = "cancel"
	Settle    = "settle"
	Release   = "release"
	Renew     = "renew"
	Pause     = "pause"
	Resume    = "resume"
	Remaining = "remaining"
	Refresh   = "refresh" // writes a tenant's weight and own limits where its tickets wait
)

// A Request is one of the requests of a batch.
type Request struct {
	Op     string
	ID     string // of the reservation, 16 hex digits
	At     int64  // when it was granted (us)
	Once   string // made by OnceKey; empty without an idempotency key
	Hold   int64  // how long it may hold units by leases (us), 0 if that is not known
	Own    []Own  // parameters of the tenant's own
	Ticket string // made by TicketName; empty if it does not wait
	Place  *Place // nil where the line does not matter
	Word   string
	Keys   []string // of the scopes, made by ScopeKey
	Cost   string   // what it takes, such as "requests=1,tokens=5"; may be empty
}

// Own are a tenant's own parameters of a window.
type Own struct {
	Window int // its place in Policy.Windows, from 1
	Params [4]int64
}

// A Place is what the line has to know of a request.
type Place struct {
	Flow     string // made by Flow
	Tenant   string
	Weight   int64 // in thousandths
	Key      string
	Front    bool
	MaxWait  int64 // us; 0 is no limit, also below
	Backlog  int64 // tickets
	Deadline int64 // us
	Rank     int64 // of a ticket that is put back
}

// text is what the line has to know of every ticket.
func (p *Place) text() string {
	if p == nil {
		return ""
	}
	b := make([]byte, 0, 96)
	b = append(append(b, p.Flow...), ' ')
	b = append(append(b, field(p.Tenant)...), ' ')
	b = append(strconv.AppendInt(b, p.Weight, 10), ' ')
	return string(append(b, field(p.Key)...))
}

// options are what few tickets have.
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

func ownText(own []Own) string {
	if len(own) == 0 {
		return ""
	}
	var b strings.Builder
	for _, o := range own {
		fmt.Fprintf(&b, "%d %d %d %d;", o.Window, o.Params[0], o.Params[1], o.Params[2])
	}
	return b.String()
}

// size is how many arguments a request has.
func (p *Policy) size() int { return 5 + len(p.Scopes) }

func (r *Request) append(args []any, leases bool) []any {
	args = append(args, r.Op, dash(r.Cost), r.Ticket, r.Place.text(), r.more(leases))
	for _, key := range r.Keys {
		args = append(args, key)
	}
	return args
}

// more is what most requests do not have.
func (r *Request) more(leases bool) string {
	own, options, extra := ownText(r.Own), r.Place.options(), r.extra(leases)
	if own == "" && options == "" && extra == "" {
		return ""
	}
	return own + "\t" + options + "\t" + extra
}

// extra is what a request has that is repeated by its caller, holds leases or is of a reservation.
func (r *Request) extra(leases bool) string {
	switch r.Op {
	case Reserve, Exempt, Peek, Join, Leave, Refresh:
		if r.At == 0 && r.Once == "" && !leases {
			return ""
		}
	}
	b := make([]byte, 0, 96)
	b = append(append(b, dash(r.ID)...), ' ')
	b = append(strconv.AppendInt(b, r.At, 10), ' ')
	b = append(append(b, dash(r.Once)...), ' ')
	b = append(strconv.AppendInt(b, r.Hold, 10), ' ')
	return string(append(b, r.Word...))
}

// dash stands for what is empty.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// SettleWord is Request.Word of a correction: its id, and by window what to add, or to give back if
// below 0.
func SettleWord(id string, changes []int64) string {
	b := append([]byte(id), ' ')
	for i, change := range changes {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, change, 10)
	}
	return string(b)
}

// A Refused is what an upstream's refusal means for the scopes at Places, from 1. All times are
// microseconds.
type Refused struct {
	Places        []int
	Wait          int64 // how long the pause is
	Guess         int64 // if above 0, the upstream did not say how long: then the longest pause
	Ramp, RampMax int64 // within which what follows opens, unless it adapts
	Adapt         int   // 0 not, 1 by spreading grants, 2 by the rate too
	Tenant        string
}

// PauseWord is Request.Word of a pause.
func PauseWord(r Refused) string {
	return fmt.Sprintf("%s %d %d %d %d %d %s", commas(r.Places), r.Wait, r.Guess, r.Ramp, r.RampMax, r.Adapt, field(r.Tenant))
}

// ResumeWord is Request.Word of the end of a pause.
func ResumeWord(places []int) string { return commas(places) }

// RemainingWord is Request.Word of what the upstream has left: so many units until reset (us from now).
func RemainingWord(places []int, unit string, units, reset int64) string {
	return fmt.Sprintf("%s %s %d %d", commas(places), unit, units, reset)
}

func commas(places []int) string {
	list := make([]string, len(places))
	for i, place := range places {
		list[i] = strconv.Itoa(place)
	}
	return strings.Join(list, ",")
}

// A TakeRequest asks a line for tickets.
type TakeRequest struct {
	Claims string   // the queue of NewClaims, in place of Queues
	Queues []string // in the order of preference
	Max    int
}
