package linetest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Tickets lists all that wait, whatever their names, without calls that wait in place.
func TestTicketsOfALine(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l := limitertest.New(t, client, limitertest.Policy(limitertest.SharedWindow(1, h)))
		line, waiting := l.Line("p"), map[throttle.Ticket]bool{}
		var requests []throttle.Request
		for i := range 700 {
			id := throttle.Ticket{Queue: "a/b c", ID: fmt.Sprintf("%08x-0000-4000-8000-000000000000", i)}
			if i%2 == 0 {
				id = throttle.Ticket{Queue: "q", ID: fmt.Sprint("!é/", i)}
			}
			requests = append(requests, throttle.Request{Tenant: "acme", Ticket: id})
			waiting[id] = true
		}
		if _, err := line.Join(t.Context(), requests); err != nil {
			t.Fatal(err)
		}
		if err := line.Leave(t.Context(), requests[0].Ticket); err != nil {
			t.Fatal(err)
		}
		delete(waiting, requests[0].Ticket)
		listed := map[throttle.Ticket]bool{}
		if err := line.Tickets(t.Context(), func(page []throttle.Ticket) error {
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
		if err := line.Tickets(t.Context(), func([]throttle.Ticket) error { return enough }); err != enough {
			t.Errorf("error %v", err)
		}
		if err := l.Line("other").Tickets(t.Context(), nil); !errors.Is(err, throttle.ErrUnknownPolicy) {
			t.Errorf("error %v of a policy that is none", err)
		}
	})
}
