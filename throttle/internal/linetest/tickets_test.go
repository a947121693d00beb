package linetest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Tickets lists all that wait, whatever their names, without calls that wait in place.
func TestTicketsOfALine(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l := newLimiter(t, client, policy(sharedWindow(1, h)))
		line, waiting := l.Line("p"), map[throttle.TicketID]bool{}
		var tickets []throttle.Ticket
		for i := range 700 {
			id := throttle.TicketID{Queue: "a/b c", ID: fmt.Sprintf("%08x-0000-4000-8000-000000000000", i)}
			if i%2 == 0 {
				id = throttle.TicketID{Queue: "q", ID: fmt.Sprint("!é/", i)}
			}
			tickets = append(tickets, throttle.Ticket{TicketID: id, Request: throttle.Request{Tenant: "acme"}})
			waiting[id] = true
		}
		if _, err := line.Join(t.Context(), tickets); err != nil {
			t.Fatal(err)
		}
		if err := line.Leave(t.Context(), tickets[0].TicketID); err != nil {
			t.Fatal(err)
		}
		delete(waiting, tickets[0].TicketID)
		listed := map[throttle.TicketID]bool{}
		if err := line.Tickets(t.Context(), func(page []throttle.TicketID) error {
			for _, id := range page {
				if listed[id] = true; !waiting[id] {
					t.Errorf("%v is listed", id)
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if len(listed) != len(waiting) {
			t.Errorf("%d of %d are listed", len(listed), len(waiting))
		}
		if n, err := line.Len(t.Context()); err != nil || n != int64(len(waiting)) {
			t.Errorf("%d are counted, %v, want %d", n, err, len(waiting))
		}
		enough := errors.New("enough")
		if err := line.Tickets(t.Context(), func([]throttle.TicketID) error { return enough }); err != enough {
			t.Errorf("error %v", err)
		}
		if err := l.Line("other").Tickets(t.Context(), nil); !errors.Is(err, throttle.ErrUnknownPolicy) {
			t.Errorf("error %v of a policy that is none", err)
		}
	})
}
