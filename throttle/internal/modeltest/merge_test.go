package modeltest

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// Hundreds of grants take little more than 1 kB. Those that are merged are later than they were, by a 96th
// of the period at most: never over, and never denied for longer than that.
func TestHundredsOfGrantsAreMerged(t *testing.T) {
	w := limitertest.Policy(throttle.Window{Name: "w", Limit: 600, Period: 1024 * s}).WithDefaults().Windows[0]
	client := limitertest.RedisClient(t)
	l, c := limitertest.NewWithClock(t, client, limitertest.Policy(w))
	random := rand.New(rand.NewPCG(1, 2))
	var log []*grantEvent
	var made []throttle.Decision
	var whole []limitertest.LoggedGrant
	at, denials := time.Duration(0), 0
	for i := range 700 {
		c.Set(at)
		now := c.US.Load()
		log = slices.DeleteFunc(log, func(e *grantEvent) bool { return e.at <= now-w.Period.Microseconds() })
		cost := 1 + random.Int64N(3)
		exactly, used := fitsFrom(w, log, now, cost), ceil(level(w, log, now))
		d := limitertest.Reserve(t, l, limitertest.Acme(cost))
		counted := d.Windows[0].Used
		if d.Granted {
			counted -= cost
			e := &grantEvent{at: now, units: cost, window: w, id: d.Reservation.ID}
			log, made = append(log, e), append(made, d)
		} else {
			denials++
		}
		fits := now + d.RetryIn.Microseconds()
		expect.Require(t, counted >= used && (!d.Granted || exactly <= now) && fits >= exactly && fits <= exactly+w.Period.Microseconds()/96,
			"call", i, "at", at, "granted", d.Granted, counted, "counted, fits at", fits-limitertest.Midnight, "exactly", used, exactly-limitertest.Midnight)
		switch {
		case !d.Granted:
			at += d.RetryIn
		case random.IntN(8) == 0:
			j := random.IntN(len(made))
			limitertest.Cancel(t, l, made[j].Reservation)
			for _, e := range log {
				e.cancelled = e.cancelled || e.id == made[j].Reservation.ID
			}
			made = slices.Delete(made, j, j+1)
		default:
			at += time.Duration(random.Int64N(int64(s))) / us * us
		}
	}
	for _, d := range made {
		whole = append(whole, limitertest.LoggedGrant{At: d.At.UnixMicro(), Units: d.Reservation.Cost["requests"]})
	}
	over := limitertest.MostOver(w, whole)
	expect.That(t, over <= 0 && denials != 0, over, "units over", denials, "denials")
	bytes := client.StrLen(t.Context(), "sluice:{p}:w:tenant:acme").Val()
	if bytes < 96*14 || bytes > 110*14 { // about a hundred entries of 14 bytes
		t.Errorf("600 grants take %d bytes", bytes)
	}
	// Costs that need wide entries.
	c.Set(2048 * s)
	w.Limit = 1e9
	limitertest.SetPolicy(t, l, w)
	limitertest.Reserve(t, l, limitertest.Acme(1e8))
	d := limitertest.Reserve(t, l, limitertest.Acme(8e8))
	expect.That(t, d.Granted && d.Windows[0].Used >= 9e8, d)
}
