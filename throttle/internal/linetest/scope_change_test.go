package linetest

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A ticket that joined when the policy had other scopes is granted nothing in line, though its
// attributes may be the same: a window that was added since would not count it.
func TestTicketsThatJoinedByOtherScopes(t *testing.T) {
	t.Parallel()
	all := limitertest.SharedWindow(4, h)
	own := throttle.Window{Name: "own", Limit: 2, Period: h}
	region := throttle.Window{Name: "region", Limit: 2, Period: h, Scope: throttle.Per("region")}
	both := throttle.Window{Name: "both", Limit: 2, Period: h, Scope: throttle.Per("tenant", "region")}
	for name, change := range map[string]struct{ before, after []throttle.Window }{
		"a tenant's own window comes":   {[]throttle.Window{all}, []throttle.Window{own, all}},
		"a window is counted otherwise": {[]throttle.Window{both, all}, []throttle.Window{own, region, all}},
		"a narrower window comes":       {[]throttle.Window{both}, []throttle.Window{own, both}},
	} {
		t.Run(name, func(t *testing.T) {
			throttletest.Each(t, func(t *testing.T, client *redis.Client) {
				l, _ := limitertest.NewHanded(t, client, limitertest.Policy(change.before...))
				r := limitertest.Acme(1)
				r.Attributes = map[string]string{"region": "north"}
				full := r
				full.Cost = map[string]int64{throttle.Requests: change.before[0].Limit}
				taken := limitertest.Reserve(t, l, full).Reservation
				var requests []throttle.Request
				for i := range 4 {
					r.Ticket = limitertest.Ticket(fmt.Sprint("t", i))
					requests = append(requests, r)
				}
				if _, err := l.Line("p").Join(t.Context(), requests); err != nil {
					t.Fatal(err)
				}
				limitertest.Cancel(t, l, taken)
				limitertest.SetPolicy(t, l, change.after...)
				granted := 0
				for _, ticket := range limitertest.Take(t, l, 64, "q").Tickets {
					r.Ticket = ticket.Ticket
					if l.Line("p").Matches(ticket, r) {
						granted++
						continue
					}
					d, err := l.Line("p").ReserveAgain(t.Context(), ticket, r)
					if err != nil {
						t.Fatal(err)
					}
					if d.Granted {
						granted++
					}
				}
				if granted != 2 {
					t.Errorf("%d are granted of 2", granted)
				}
				r.Ticket = throttle.Ticket{}
				for _, w := range limitertest.Peek(t, l, r).Windows {
					if w.Used != 2 {
						t.Errorf("%s: %d are used of 2", w.Name, w.Used)
					}
				}
				limitertest.Agrees(t, client)
			})
		})
	}
}
