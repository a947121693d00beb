package limitertest

import (
	"slices"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// three has one window of each algorithm, limit 10 per 10 s.
func three() throttle.Policy {
	return Policy(
		throttle.Window{Name: "sliding", Limit: 10, Period: 10 * s},
		throttle.Window{Name: "fixed", Algorithm: throttle.AlgorithmFixed, Limit: 10, Period: 10 * s},
		throttle.Window{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Period: 10 * s},
	)
}

// A cancelled reservation is remembered as long as its units would have counted, and for a minute at least.
func TestCancelledIsRememberedAsLongAsItCounts(t *testing.T) {
	client := RedisClient(t)
	for period, want := range map[time.Duration]time.Duration{s: m, 24 * h: 24 * h} {
		w := throttle.Window{Name: "w", Limit: 10, Period: period}
		l := New(t, client, Policy(w))
		begun := time.Now()
		made := Reserve(t, l, Acme(1)).Reservation
		Cancel(t, l, made)
		ttl, err := client.PTTL(t.Context(), "sluice:{p}:n:"+made.ID).Result()
		if err != nil || ttl > want+ms || ttl < want-time.Since(begun)-ms { // it is in milliseconds
			t.Errorf("period %v: kept for %v (%v), want %v", period, ttl, err, want)
		}
	}
}

// Units that only a correction has charged are given back once, too, by whichever reservation.
func TestCancelOfWhatACorrectionAddedIsRemembered(t *testing.T) {
	Bubble(t, Policy(
		throttle.Window{Name: "requests", Limit: 10, Period: s},
		throttle.Window{Name: "tokens", Unit: "tokens", Algorithm: throttle.AlgorithmFixed, Limit: 100, Period: h},
	), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		first := Reserve(t, l, Acme(1)).Reservation
		settled := Settle(t, l, first, 40)
		Settle(t, l, Reserve(t, l, Acme(1)).Reservation, 40) // of others
		Cancel(t, l, first)
		time.Sleep(2 * time.Minute)
		Cancel(t, l, settled)
		expect.Equal(t, Used(Peek(t, l, Acme(1)))[1], 40)
	})
}

// The server that granted is gone, its state too, and the clock of the next one is behind.
func TestCancelOfWhatIsLostGivesNothingBack(t *testing.T) {
	client := RedisClient(t)
	l, c := NewWithClock(t, client, three())
	c.Set(5 * s)
	lost := Reserve(t, l, Acme(1)).Reservation
	client.FlushDB(t.Context())
	c.Set(0)
	Reserve(t, l, Acme(8))
	expect.Equal(t, Used(Cancel(t, l, lost)), []int64{8, 8, 8})
}

func TestCancelOfNothing(t *testing.T) {
	client := RedisClient(t)
	l, _ := NewWithClock(t, client, three())
	Reserve(t, l, Acme(5))
	before := Dump(t, client)
	Cancel(t, l, throttle.Reservation{Request: Acme(5)}) // as one that failed open
	expect.Equal(t, Dump(t, client), before)
	expect.Equal(t, Used(Cancel(t, l, Elsewhere(t, three(), Acme(1)))), []int64{5, 5, 5})
}

// A grant that was merged counts as long as its entry. A cancel gives it back for a period, and then
// nothing. A second cancel, when nothing is remembered any more, says that it cancelled nothing.
func TestCancelOfMergedGrants(t *testing.T) {
	client := RedisClient(t)
	const period = 7680 * ms // a tick is 80 ms
	l, c := NewWithClock(t, client, Policy(throttle.Window{Name: "w", Limit: 2000, Period: period}))
	for i := range 96 {
		c.Set(time.Duration(i) * ms)
		Reserve(t, l, Acme(3))
	}
	merged := map[time.Duration]throttle.Reservation{} // of the second tick: they are kept at 150 ms
	for _, at := range []time.Duration{100 * ms, 130 * ms, 150 * ms, 170 * ms} {
		c.Set(at)
		merged[at] = Reserve(t, l, Acme(50)).Reservation
	}
	c.Set(period + 110*ms)
	WantUsed(t, l, Acme(1), 200)
	for _, row := range []struct {
		at        time.Duration
		cancelled bool
		used      int64
	}{{100 * ms, false, 200}, {130 * ms, true, 150}, {130 * ms, false, 150}} {
		d := Cancel(t, l, merged[row.at])
		expect.Equal(t, d.Granted, row.cancelled)
		expect.Equal(t, Used(d), []int64{row.used})
	}
	c.Set(period + 2*m)
	expect.Equal(t, Cancel(t, l, merged[130*ms]).Granted, false, "cancelled again, a minute later")
}

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
			expect.That(t, slices.Min(got) == step.used && slices.Max(got) == step.used, step, "used", got)
		}
	}
	l, c := NewWithClock(t, RedisClient(t), threeHours())
	run(t, l, func() { c.Set(2 * time.Minute) })
	t.Run("keys expire", func(t *testing.T) {
		Bubble(t, threeHours(), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
			run(t, l, func() { time.Sleep(2 * time.Minute) })
		})
	})
}
