package linetest

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Tenants that are held up by windows of their own make others expect to wait. But a deadline is
// not missed by that: the others may start at once.
func TestDeadlineOfTicketsBehindThoseHeldUpNarrower(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := limitertest.NewHanded(t, client, limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: time.Hour}, limitertest.SharedWindow(10, s)))
		join := func(tenant, id string, deadline time.Duration) throttle.Place {
			t.Helper()
			r := throttle.Request{Tenant: tenant, Ticket: limitertest.Ticket(id)}
			if deadline > 0 {
				r.Deadline = time.Now().Add(deadline)
			}
			places, err := l.Line("p").Join(t.Context(), []throttle.Request{r})
			if err != nil {
				t.Fatal(err)
			}
			return places[0]
		}
		now := time.Duration(0)
		for i := range 40 {
			tenant := fmt.Sprint("t", i)
			join(tenant, tenant+" first", 0)
			join(tenant, tenant+" second", 0)
		}
		for n := 0; n < 40; now += s {
			c.Set(now)
			n += len(limitertest.Take(t, l, 64, "q").Tickets)
		}
		c.Set(now)
		for i := range 10 {
			join(fmt.Sprint("full", i), fmt.Sprint("full", i), 0)
		}
		if n := len(limitertest.Take(t, l, 64, "q").Tickets); n != 10 {
			t.Fatalf("took %d, want the 10 that fill the shared window", n)
		}
		if place := join("new", "too late", 500*ms); place.Err == nil {
			t.Error("it joined, and the shared window is full for longer than it has time")
		}
		place := join("new", "in time", 1900*ms)
		if place.Err != nil {
			t.Fatalf("refused, and it starts in a second: %v", place.Err)
		}
		c.Set(now + s)
		if got := ids(limitertest.Take(t, l, 64, "q")); got != "in time" {
			t.Errorf("took %q a second later", got)
		}
	})
}
