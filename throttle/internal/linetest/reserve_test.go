package linetest

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Tickets that reserve together are granted or wait, each for its own, and one that is wrong changes
// nothing. What was granted can be handled as if it was taken.
func TestTicketsReserveTogether(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l := limitertest.New(t, client, limitertest.Policy(limitertest.SharedWindow(4, h)))
		var requests []throttle.Request
		for i, cost := range []int64{1, 2, 5, 1, 1} { // 5 never fits
			r := limitertest.Acme(cost)
			r.Ticket = throttle.Ticket{Queue: "q", ID: string(rune('a' + i))}
			requests = append(requests, r)
		}
		tickets, err := l.Line("p").Reserve(t.Context(), requests)
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []struct{ granted, queued bool }{{true, false}, {true, false}, {}, {true, false}, {false, true}} {
			d := tickets[i].Decision
			if d.Granted != want.granted || d.Queued != want.queued {
				t.Errorf("%s: granted %v, queued %v, want %+v", requests[i].Ticket.ID, d.Granted, d.Queued, want)
			}
			if got := l.Line("p").Matches(tickets[i], requests[i]); got != want.granted {
				t.Errorf("%s: matches: %v", requests[i].Ticket.ID, got)
			}
		}
		if d := limitertest.Peek(t, l, limitertest.Acme(1)); d.Windows[0].Used != 4 {
			t.Errorf("%d are counted", d.Windows[0].Used)
		}
		if err := l.Line("p").Refund(t.Context(), tickets); err != nil {
			t.Fatal(err)
		}
		if got := ids(limitertest.Take(t, l, 64, "q")); got != "e" {
			t.Errorf("took %q", got)
		}
		if d := limitertest.Peek(t, l, limitertest.Acme(1)); d.Windows[0].Used != 1 {
			t.Errorf("%d are counted", d.Windows[0].Used)
		}
	})
}
