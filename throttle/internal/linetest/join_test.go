package linetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestJoinAnswersForEachTicket(t *testing.T) {
	p := policy(throttle.Window{Name: "own", Limit: 2, Period: 10 * s}, sharedWindow(5, 10*s))
	p.Tenants = map[string]throttle.Tenant{"x": {Exempt: true}, "b": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, p)
		sc.granted("a0", "a1")
		ticket := func(id string, change func(*throttle.Ticket)) throttle.Ticket {
			ticket := throttle.Ticket{TicketID: ticketID(id), Request: sc.of(id), Key: "key of " + id}
			if change != nil {
				change(&ticket)
			}
			return ticket
		}
		cost := func(n int64) func(*throttle.Ticket) {
			return func(t *throttle.Ticket) { t.Request.Cost = map[string]int64{"requests": n} }
		}
		now := time.Now()
		soon := now.Add(20*s - us)
		tickets := []throttle.Ticket{
			ticket("a2", nil),
			ticket("a9", func(t *throttle.Ticket) { t.TicketID.ID = "" }),
			ticket("a3", cost(3)),
			ticket("x1", nil),
			ticket("b1", cost(2)),
			ticket("a4", func(t *throttle.Ticket) { t.Request.MaxWait = 10*s - us }),
			ticket("a4", func(t *throttle.Ticket) { t.Request.MaxWait = 10 * s }),
			ticket("a5", func(t *throttle.Ticket) { t.Backlog = 2 }),
			ticket("a5", func(t *throttle.Ticket) { t.Backlog = 3 }),
			ticket("a6", func(t *throttle.Ticket) { t.Deadline = soon }),
			ticket("a6", func(t *throttle.Ticket) { t.Deadline = now }),
			ticket("a2", nil),
			ticket("a7", func(t *throttle.Ticket) { t.Key = strings.Repeat("k", 65) }),
			ticket("c1", func(t *throttle.Ticket) { t.Request.Attributes = map[string]string{"unused": "x"} }),
		}
		places, err := sc.l.Line("p").Join(t.Context(), tickets)
		if err != nil || len(places) != len(tickets) {
			t.Fatalf("%d places, %v", len(places), err)
		}
		for i, want := range []string{
			"10s", `throttle: policy "p": ticket "": must have an ID`,
			`throttle: policy "p", window "own": cost of 3 requests never fits: the window holds 2 at most`, "exempt",
			`throttle: policy "p", window "own": cost of 2 requests never fits: the window holds 1 at most`,
			`throttled: p, tenant a, 10s: may wait for 10s, longer than 9.999999s`, "10s",
			`throttle: policy "p": tenant a has 2 waiting already`, "20s",
			`throttled: p, tenant a, 20s: too late for ` + soon.String(),
			`throttled: p, tenant a, 20s: too late for ` + now.String(), "10s again",
			`throttle: policy "p": key "` + strings.Repeat("k", 64) + `...": must be at most 64 bytes`, "0s",
		} {
			got := places[i].StartsIn.String()
			var late *throttle.TooLateError
			switch p := places[i]; {
			case errors.As(p.Err, &late) && !late.Deadline.IsZero():
				got = late.Decision.Reason() + ": too late for " + late.Deadline.String()
				if wait := late.StartsAt.Sub(now); wait < 20*s || wait > 1*m {
					t.Errorf("ticket %d would start in %v", i, wait)
				}
			case p.Err != nil:
				got = p.Err.Error()
			case p.Exempt:
				got = "exempt"
			case p.AlreadyQueued:
				got += " again"
			}
			if got != want {
				t.Errorf("ticket %d: %s, want %s", i, got, want)
			}
			if places[i].StartsInMost < places[i].StartsIn {
				t.Errorf("ticket %d starts in %v at least and %v at most", i, places[i].StartsIn, places[i].StartsInMost)
			}
		}
		var refused *throttle.TooLateError
		if !errors.As(places[5].Err, &refused) || refused.MaxWait != 10*s-us || !refused.Deadline.IsZero() || !errors.Is(refused, context.DeadlineExceeded) || refused.Decision.RetryInMost != 10*s {
			t.Errorf("%+v", refused)
		}
		if got := ids(take(t, sc.l, 64, "q")); got != "c1" {
			t.Errorf("took %s", got)
		}
		sc.at(10*s).takes("a2", "a4")
		sc.at(20 * s).takes("a5")
		if key := sc.took["a5"].Key; key != "key of a5" {
			t.Errorf("key %q", key)
		}
		if _, err := sc.l.Line("q").Join(t.Context(), tickets); !errors.Is(err, throttle.ErrUnknownPolicy) {
			t.Error(err)
		}
	})
}

func TestJoinOfHundreds(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, policy(sharedWindow(50, 10*s)))
		var tickets []throttle.Ticket
		for i := range 300 {
			id := fmt.Sprint("a", i)
			tickets = append(tickets, throttle.Ticket{TicketID: ticketID(id), Request: sc.of(id)})
		}
		places, err := sc.l.Line("p").Join(t.Context(), tickets)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range places {
			if want := time.Duration(i/50) * 10 * s; p.Err != nil || p.StartsIn != want || p.StartsInMost != want {
				t.Fatalf("ticket %d: %+v, want %v", i, p, want)
			}
		}
		if !places[0].Nudge || places[1].Nudge {
			t.Errorf("nudges %v, %v: one is to be woken", places[0].Nudge, places[1].Nudge)
		}
		var got []string
		for i := range 6 {
			sc.at(time.Duration(i) * 10 * s)
			for {
				taken := take(t, sc.l, 20, "q")
				for _, ticket := range taken.Tickets {
					got = append(got, ticket.ID)
				}
				if taken.Next != 0 {
					break
				}
			}
			if len(got) != (i+1)*50 {
				t.Fatalf("after %d periods %d are taken", i+1, len(got))
			}
		}
		if !slices.IsSortedFunc(got, func(a, b string) int { return len(a)*1000 - len(b)*1000 + strings.Compare(a, b) }) {
			t.Errorf("not in order: %q", got)
		}
	})
}
