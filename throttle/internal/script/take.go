package script

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// A TakeRequest asks a line for tickets.
type TakeRequest struct {
	Claims string         // Taker.Claims, instead of Queues
	Queues map[string]int // their priorities, by name
	Strict bool           // a queue gets only the room that queues of higher priority leave
	Max    int
}

// arguments returns the script's arguments: with a new id_base, and the queues, the most important one first.
func (q TakeRequest) arguments() []any {
	names := slices.SortedFunc(maps.Keys(q.Queues), func(a, b string) int {
		return cmp.Or(cmp.Compare(q.Queues[b], q.Queues[a]), strings.Compare(a, b))
	})
	var queues []any
	for _, name := range names {
		queues = append(queues, fmt.Sprint(max(1, q.Queues[name]), " ", Escape(name)))
	}
	if q.Claims != "" {
		queues = []any{"1 " + q.Claims}
	}
	return append([]any{q.Max, NewID()[:14], len(queues), q.Strict}, queues...)
}

// Taken is the reply to a take.
type Taken struct {
	At      int64
	NextAt  int64 // when to ask again, 0 if nobody waits
	Tickets []TakenTicket
}

// A Ticket waits in a line, or has left it.
type Ticket struct {
	Queue, ID, Flow, Costs, Key string
	Rank, Joined                int64 // its rank among its flow, and when it joined the line (us)
	Since                       int64 // when it began to wait (us)
	Binds                       int64 // Answer.Binds of its join
}

// A TakenTicket has left the line.
type TakenTicket struct {
	Ticket
	At        int64 // when it was granted (us)
	NeverFits bool
	Scopes    string // all of its scopes, for ParseScopes, if the policy lacks one of them
	Tenant    string
	Granted   string  // the ID of the reservation; empty if it was not charged
	Used      []int64 // by window, its units
}

// A Taker takes from one line, one call at a time. A take whose reply was lost is not acknowledged: the next one
// repeats it, with its sequence number, and gets the same tickets. It is safe for concurrent use.
type Taker struct {
	// Claims is the queue of calls that wait in place. Nobody else has it: escaped names have no "!".
	Claims string

	take func(ctx context.Context, p *Policy, seq int64, q TakeRequest) (Taken, error)

	// turn has one value while a call is under way. The sender of that value, and then the goroutine of the call,
	// may use the fields below.
	turn chan struct{}
	seq  int64 // of the last call
	last int   // what became of the last take: one of the states below
}

// States of the last take. A take begins as unanswered. If its caller gets the reply, it becomes one of the others.
const (
	settled        = iota // there is nothing to acknowledge: it took no ticket, or was acknowledged; also before the first take
	unacknowledged        // its caller has its tickets: the next call, of any kind, acknowledges them
	unanswered            // it is under way, failed, or its caller left: the next take repeats it, with its number
)

// NewTaker returns a taker of one line.
func (r *Runner) NewTaker() *Taker {
	process := NewID() // the script keeps the last take under this name
	take := func(ctx context.Context, p *Policy, seq int64, q TakeRequest) (taken Taken, err error) {
		err = r.call(ctx, p, "take", process, seq, q.arguments(), func(reply []any) (n int, err error) {
			taken, err = p.readTaken(reply)
			return len(taken.Tickets), err
		})
		return taken, err
	}
	return &Taker{Claims: "!" + process, take: take, turn: make(chan struct{}, 1)}
}

// Take sends one take. If the context ends it returns at once, and the next take gets the tickets of this one. Without
// queues it only acknowledges the tickets of the last take, if that take was answered and they are not acknowledged yet.
func (t *Taker) Take(ctx context.Context, p *Policy, q TakeRequest) (Taken, error) {
	if err := ctx.Err(); err != nil {
		return Taken{}, err
	}
	select {
	case t.turn <- struct{}{}:
	case <-ctx.Done():
		return Taken{}, ctx.Err()
	}
	if !t.begin(q) {
		<-t.turn
		return Taken{}, nil
	}
	var taken Taken
	var err error
	replied := make(chan struct{})
	call, cancel := context.WithTimeout(ctx, callTimeout)
	go func() {
		defer func() { <-t.turn }()
		defer cancel()
		if taken, err = t.take(call, p, t.seq, q); err != nil && ctx.Err() == nil && call.Err() != nil {
			err = fmt.Errorf("no answer within %v: %v", callTimeout, err)
		}
		select {
		case replied <- struct{}{}:
			if err == nil {
				if t.last = settled; len(taken.Tickets) > 0 {
					t.last = unacknowledged
				}
			}
		case <-ctx.Done(): // the caller has left without the tickets: t.last stays as it is
		}
	}()
	select {
	case <-replied:
		return taken, err
	case <-ctx.Done():
		return Taken{}, ctx.Err()
	}
}

// begin sets the number of a call, and returns false if the call is not needed: there is nothing to acknowledge.
func (t *Taker) begin(q TakeRequest) bool {
	onlyAcknowledges := len(q.Queues) == 0 && q.Claims == ""
	switch {
	case onlyAcknowledges && t.last != unacknowledged:
		return false
	case onlyAcknowledges:
		t.seq++ // if the reply is lost, t.last stays as it is, and the next call acknowledges
	case t.last != unanswered: // otherwise the call repeats the last take, by its number
		t.seq, t.last = t.seq+1, unanswered
	}
	return true
}

func (p *Policy) readTaken(reply []any) (Taken, error) {
	r := &reader{reply: reply}
	t := Taken{At: r.integer(), NextAt: r.integer()}
	base := r.text()
	for !r.bad && r.index < len(reply) {
		ticket, ok := readTakenTicket(r.text(), fmt.Sprintf("%s%02x", base, len(t.Tickets)+1))
		ticket.At = r.integer()
		for range p.Windows {
			ticket.Used = append(ticket.Used, r.integer())
		}
		r.bad = r.bad || !ok
		t.Tickets = append(t.Tickets, ticket)
	}
	if r.bad {
		return Taken{}, &ReplyError{fmt.Sprintf("value %d of %d of a take", r.index, len(reply))}
	}
	return t, nil
}

// A ticket's rank is its time of joining plus LineZero, or at the front of the line plus lineFront.
const (
	LineZero  = 1 << 52
	lineFront = 1e15
)

// readTakenTicket reads "TICKET RECORD TENANT STATUS:SCOPES". The ID is the reservation's, if it was charged.
func readTakenTicket(text, id string) (t TakenTicket, ok bool) {
	f := strings.Split(text, " ")
	if len(f) != 6 {
		return t, false
	}
	waited, err := ReadTicket(f[0], strings.Join(f[1:4], " "))
	status, scopes, _ := strings.Cut(f[5], ":")
	t = TakenTicket{Ticket: waited, NeverFits: status == "never", Scopes: scopes, Tenant: Unescape(f[4])}
	if status == "granted" {
		t.Granted = id
	}
	return t, err == nil && slices.Contains([]string{"granted", "never", "uncharged"}, status)
}

// ReadTicket reads a ticket's record as lua/line.lua keeps it: "RANKcosts |VALUES key:SINCE+BINDS".
func ReadTicket(name, record string) (t Ticket, err error) {
	digits := record[:min(16, len(record))]
	f := strings.Split(record[len(digits):], " ")
	queue, id, ok := parseTicket(name)
	t.Rank, err = strconv.ParseInt(digits, 10, 64)
	if len(f) != 3 || err != nil || !ok {
		return t, &ReplyError{fmt.Sprintf("ticket %q", name)}
	}
	escaped, _, _ := strings.Cut(name, "/")
	key, binds, _ := strings.Cut(f[2], "+")
	key, since, _ := strings.Cut(key, ":")
	t.Binds, _ = strconv.ParseInt(binds, 10, 64)
	t.Since, _ = strconv.ParseInt(since, 10, 64)
	if t.Joined = t.Rank - LineZero; t.Joined < 0 {
		t.Joined = t.Rank - lineFront
	}
	t.Since = cmp.Or(t.Since, t.Joined)
	t.Queue, t.ID, t.Flow = queue, id, escaped+f[1]
	t.Costs, t.Key = Unescape(cmp.Or(f[0], "requests=1")), Unescape(key)
	return t, nil
}
