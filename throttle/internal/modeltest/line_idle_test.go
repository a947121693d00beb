package modeltest

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// Each ticket that fits is taken, even where scopes cross. After every take the model checks the
// first ticket of each flow.
func TestNothingIdlesWhereScopesCross(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		l, c := limitertest.NewHanded(t, client, limitertest.Policy(
			throttle.Window{Name: "user", Limit: 1, Period: s, Scope: throttle.Per("tenant", "user")},
			throttle.Window{Name: "own", Limit: 5, Period: s},
			throttle.Window{Name: "region", Limit: 12, Period: s, Scope: throttle.Per("region")},
			limitertest.SharedWindow(20, s),
		))
		m := newModel("exempt", l.Policies()[0].Windows)
		waiting := map[string][]throttle.Request{} // by flow
		for i := range 520 {
			flow := max(0, i-40) / 2
			r := throttle.Request{Policy: "p", Tenant: fmt.Sprint("t", flow%8), Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}, Attributes: map[string]string{
				"user": fmt.Sprint("u", flow/8%10), "region": fmt.Sprint("r", flow/80),
			}}
			if i < 40 {
				r.Attributes["user"] = "greedy"
			}
			c.US.Add(300)
			if _, err := l.Line("p").Join(t.Context(), []throttle.Request{r}); err != nil {
				t.Fatal(err)
			}
			waiting[r.Tenant+fmt.Sprint(r.Attributes)] = append(waiting[r.Tenant+fmt.Sprint(r.Attributes)], r)
		}
		for n := 0; len(waiting) > 0; n++ {
			taken := limitertest.Take(t, l, throttle.MaxTake, "q")
			for _, ticket := range taken.Tickets {
				r := ticket.Decision.Reservation.Request
				flow := r.Tenant + fmt.Sprint(r.Attributes)
				if waiting[flow][0].Ticket != ticket.Ticket {
					t.Fatalf("%v is taken before %v", ticket.ID, waiting[flow][0].Ticket.ID)
				}
				if waiting[flow] = waiting[flow][1:]; len(waiting[flow]) == 0 {
					delete(waiting, flow)
				}
				r.IdempotencyKey = ticket.ID
				if d := m.reserve(r, c.US.Load()); !d.Granted {
					t.Fatalf("%v is taken too early", ticket.ID)
				}
			}
			if taken.Next == 0 {
				continue
			}
			for _, list := range waiting {
				if d := m.peek(list[0], c.US.Load()); d.Granted || d.RetryIn < taken.Next {
					t.Fatalf("%v fits in %v, the line is asked in %v", list[0].Ticket, d.RetryIn, taken.Next)
				}
			}
			c.US.Add(taken.Next.Microseconds())
			if n > 3000 {
				t.Fatalf("%d flows wait for ever", len(waiting))
			}
		}
		limitertest.IsGone(t, client)
	})
}
