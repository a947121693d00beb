package script

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A TakeRequest asks a line for tickets.
type TakeRequest struct {
	Claims string         // Taker.Claims, in place of Queues
	Queues map[string]int // their priorities, by name
	Strict bool           // a queue gets only the room that queues of higher priority leave
	Max    int
	Paused int64 // when operators' pause of the policy ends; 0 is no pause
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
	return append([]any{q.Max, NewID()[:14], len(queues), q.Paused, q.Strict}, queues...)
}

// A Taker takes from one line, one call at a time. A take whose reply was lost is not acknowledged: the next one
// repeats it, with its sequence number, and gets the same tickets. It is safe for concurrent use.
type Taker struct {
	// Claims is the queue of calls that wait in place. Nobody else has it: escaped names hold no "!".
	Claims string

	take func(ctx context.Context, p *Policy, seq int64, q TakeRequest) (Taken, error)

	// turn holds one value while a call is under way. Whoever sent it, and then the goroutine of the call,
	// may use the fields below.
	turn     chan struct{}
	seq      int64 // of the last call
	answered bool  // its caller got the answer
	owing    bool  // its tickets are not acknowledged
}

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
	return &Taker{Claims: "!" + process, take: take, turn: make(chan struct{}, 1), answered: true}
}

// Take sends one take. If the context ends it returns at once, and the next take gets the tickets of this
// one. Without queues it only acknowledges the tickets of the last take, if that has an answer and they
// are not acknowledged.
func (t *Taker) Take(ctx context.Context, p *Policy, q TakeRequest) (Taken, error) {
	if err := ctx.Err(); err != nil {
		return Taken{}, err
	}
	select {
	case t.turn <- struct{}{}:
	case <-ctx.Done():
		return Taken{}, ctx.Err()
	}
	acknowledges := len(q.Queues) == 0 && q.Claims == ""
	if acknowledges && !(t.owing && t.answered) {
		<-t.turn
		return Taken{}, nil
	}
	if t.answered {
		t.seq, t.answered = t.seq+1, acknowledges // never repeat an acknowledgement: the next take includes it
	}
	type reply struct {
		taken Taken
		err   error
	}
	replied := make(chan reply)
	call, cancel := context.WithTimeout(ctx, callTimeout)
	go func() {
		defer func() { <-t.turn }()
		defer cancel()
		taken, err := t.take(call, p, t.seq, q)
		if err != nil && ctx.Err() == nil && call.Err() != nil {
			err = fmt.Errorf("no answer within %v: %v", callTimeout, err)
		}
		select {
		case replied <- reply{taken, err}:
			if err == nil {
				t.answered, t.owing = true, len(taken.Tickets) > 0
			}
		case <-ctx.Done():
		}
	}()
	select {
	case r := <-replied:
		return r.taken, r.err
	case <-ctx.Done():
		return Taken{}, ctx.Err()
	}
}
