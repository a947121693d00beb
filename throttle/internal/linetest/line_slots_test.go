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

// Where slots hold tickets up, and not limits, they are expected at the rate of the takes.
func TestExpectedStartsWhereSlotsBind(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(1_000_000, s)))
		requests := make([]throttle.Request, 200)
		for i := range requests {
			requests[i] = throttle.Request{Tenant: "a", Ticket: limitertest.Ticket(fmt.Sprint("a", i))}
		}
		if _, err := sc.l.Line("p").Join(t.Context(), requests); err != nil {
			t.Fatal(err)
		}
		for now := time.Duration(0); now <= 2*s; now += 100 * ms {
			if n := len(limitertest.Take(t, sc.at(now).l, 5, "q").Tickets); n != 5 {
				t.Fatalf("took %d at %v", n, now)
			}
		}
		// 95 wait, and 50 go a second.
		if p := sc.joins("a900"); !p.SlotsBind || p.StartsIn != 1900*ms || p.StartsInMost != 0 || p.StartsInLeast != 0 {
			t.Errorf("behind 95: %+v, want 1.9s, as slots bind", p)
		}
		if p := sc.joins("a900"); !p.AlreadyQueued || !p.SlotsBind || p.StartsIn != 1900*ms {
			t.Errorf("again: %+v, want 1.9s, as slots bind", p)
		}
		if p := sc.joins("b900"); p.SlotsBind || p.StartsIn != 0 {
			t.Errorf("first of another tenant: %+v, want 0", p)
		}
		// Half of what goes is the other tenant's.
		sc.joins("b901", "b902", "b903", "b904", "b905", "b906", "b907", "b908")
		if p := sc.joins("b909"); !p.SlotsBind || p.StartsIn != 360*ms {
			t.Errorf("behind 9 of its own: %+v, want 360ms, as slots bind", p)
		}
		for range 2 {
			limitertest.Take(t, sc.l, throttle.MaxTake, "q")
		}
		if p := sc.joins("a901"); p.SlotsBind || p.StartsIn != 0 {
			t.Errorf("while slots are free: %+v, want 0", p)
		}
	})
}
