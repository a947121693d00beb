package limitertest

import (
	"slices"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/sluice-go/sluice/throttle"
)

func threeHours() throttle.Policy {
	p := three()
	for i := range p.Windows {
		p.Windows[i].Period = time.Hour
	}
	return p
}

// A caller may drop what Settle returns, and go on with the reservation as it was.
func TestSettleAndCancelGoByTheLastCorrection(t *testing.T) {
	run := func(t *testing.T, l *throttle.Limiter, later func()) {
		Reserve(t, l, Acme(4)) // of others
		r := Reserve(t, l, Acme(4)).Reservation
		for _, step := range []struct{ actual, used int64 }{{1, 5}, {2, 6}, {2, 6}, {5, 9}, {4, 8}, {0, 4}, {-1, 4}, {3, 4}} {
			if step.actual < 0 {
				later() // when nothing of it counts
				Cancel(t, l, r)
			} else if _, err := r.Settle(t.Context(), map[string]int64{throttle.Requests: step.actual}); err != nil {
				t.Fatal(err)
			}
			got := Used(Peek(t, l, Acme(1)))
			That(t, slices.Min(got) == step.used && slices.Max(got) == step.used, step, "used", got)
		}
	}
	client := Redis(t)
	l, c := NewWithClock(t, client, threeHours())
	run(t, l, func() { c.Set(2 * time.Minute) })
	t.Run("keys expire", func(t *testing.T) {
		Bubble(t, threeHours(), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
			run(t, l, func() { time.Sleep(2 * time.Minute) })
		})
	})
}
