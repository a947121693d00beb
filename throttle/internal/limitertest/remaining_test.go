package limitertest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Ten calls are under way when the first of them is answered: 12 are left, and nine will be used. So
// three more are granted. That holds for the first answer ever, and after a reset.
func TestWhatIsUnderWayIsNoPartOfWhatIsLeft(t *testing.T) {
	for name, apart := range map[string]time.Duration{"at once": 0, "one by one": ms} {
		t.Run(name, func(t *testing.T) {
			throttletest.Each(t, func(t *testing.T, client *redis.Client) {
				l, c := NewWithClock(t, client, Policy(throttle.Window{Name: "w", Limit: 100, Period: 10 * s}))
				report := func(r throttle.Reservation, units int64) {
					t.Helper()
					Must(t, r.ReportRemaining(t.Context(), throttle.Remaining{Units: units, Reset: m}))
				}
				for period := range 2 {
					var calls []throttle.Reservation
					begun := time.Duration(period) * (m + 10*s)
					for i := range 10 {
						c.Set(begun + time.Duration(i)*apart)
						calls = append(calls, Reserve(t, l, Acme(1)).Reservation)
					}
					c.Set(begun + s)
					report(calls[0], 12)
					report(calls[1], 11)
					for i := range 4 {
						Equal(t, Reserve(t, l, Acme(1)).Granted, i < 3, "period", period, "call after ten", i+1)
					}
				}
			})
		})
	}
}

// A lease that has run out is renewed while nobody waits for the slot, and then no more.
func TestALeaseThatRanOutGoesToWhoeverWaits(t *testing.T) {
	client := Redis(t)
	l, c := NewWithClock(t, client, Policy(throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Lease: 30 * s}))
	holder := Reserve(t, l, Acme(1)).Reservation
	renewed := func(want bool) {
		t.Helper()
		held, err := holder.Renew(t.Context())
		That(t, held == want && err == nil, "renewed", held, err)
	}
	c.Set(31 * s)
	renewed(true)
	r := Acme(1)
	r.Ticket = Ticket("waits")
	Join(t, l, r)
	c.Set(40 * s)
	renewed(true)
	c.Set(71 * s)
	renewed(false)
	taken, err := l.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{r.Ticket.Queue: 1}, Max: 1})
	That(t, err == nil && len(taken.Tickets) == 1, "took", taken.Tickets, err)
}
