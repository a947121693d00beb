package limitertest

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

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

func TestCancelGivesUnitsBackOnce(t *testing.T) {
	type op struct {
		at   time.Duration
		do   string // "+NAME" reserves, "-NAME" cancels
		cost int64
		used []int64 // sliding, fixed, gcra
	}
	EachOf(t, map[string][]op{
		"at once": {
			{0, "+a", 4, []int64{4, 4, 4}},
			{0, "-a", 0, []int64{0, 0, 0}},
			{0, "-a", 0, []int64{0, 0, 0}},
		},
		"once, though others have taken since": {
			{1 * s, "+a", 4, []int64{4, 4, 4}},
			{1 * s, "+b", 3, []int64{7, 7, 7}},
			{2 * s, "-a", 0, []int64{3, 3, 3}}, // 7 - 1 drained - 3 that still count
			{2 * s, "+c", 2, []int64{5, 5, 5}},
			{2 * s, "-a", 0, []int64{5, 5, 5}},
			{3 * s, "-a", 0, []int64{5, 5, 4}},
			{3 * s, "-b", 0, []int64{2, 2, 3}}, // 1 of the 3 was still there
			{3 * s, "-c", 0, []int64{0, 0, 2}},
			{3 * s, "-b", 0, []int64{0, 0, 2}},
		},
		"what has aged is not given back": {
			{9 * s, "+a", 5, []int64{5, 5, 5}},
			{10 * s, "+b", 2, []int64{7, 2, 6}},
			{14 * s, "-a", 0, []int64{2, 2, 2}}, // gcra: 5 drained before
			{14 * s, "-b", 0, []int64{0, 0, 2}},
			{14 * s, "+c", 3, []int64{3, 3, 5}},
			{19*s - us, "+d", 1, []int64{4, 4, 2}},
			{30 * s, "-c", 0, []int64{0, 0, 0}},
			{30 * s, "-d", 0, []int64{0, 0, 0}},
		},
		"in the microsecond in which it leaves": {
			{0, "+a", 5, []int64{5, 5, 5}},
			{10*s - us, "+b", 1, []int64{6, 6, 1}},
			{10 * s, "-a", 0, []int64{1, 0, 1}},
			{10 * s, "+c", 9, []int64{10, 9, 10}},
			{10 * s, "-a", 0, []int64{10, 9, 10}},
		},
		"in one microsecond": {
			{0, "+a", 1, []int64{1, 1, 1}},
			{0, "+b", 2, []int64{3, 3, 3}},
			{0, "+c", 3, []int64{6, 6, 6}},
			{0, "-b", 0, []int64{4, 4, 4}},
			{0, "-b", 0, []int64{4, 4, 4}},
			{0, "-a", 0, []int64{3, 3, 3}},
			{0, "-c", 0, []int64{0, 0, 0}},
		},
		"what cost nothing gives nothing back": {
			{0, "+a", 3, []int64{3, 3, 3}},
			{0, "+b", 0, []int64{3, 3, 3}},
			{0, "-b", 0, []int64{3, 3, 3}},
		},
	}, func(t *testing.T, client *redis.Client, ops []op) {
		l, c := NewHanded(t, client, three())
		made := map[string]throttle.Reservation{}
		for i, op := range ops {
			c.Set(op.at)
			var d throttle.Decision
			if op.do[0] == '+' {
				d = Reserve(t, l, Acme(op.cost))
				made[op.do[1:]] = d.Reservation
				if !d.Granted {
					t.Fatalf("op %d: denied", i)
				}
			} else {
				d = Cancel(t, l, made[op.do[1:]])
			}
			if !slices.Equal(Used(d), op.used) {
				t.Errorf("op %d, %s at %v: used %v, want %v", i, op.do, op.at, Used(d), op.used)
			}
		}
	})
}

// Only this reservation is given back by it, however late the call is repeated.
func TestCancelRepeatedAfterTheKeyWasReserved(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := NewHanded(t, client, three())
		r := Acme(4)
		r.IdempotencyKey = "n"
		first := Reserve(t, l, r).Reservation
		Cancel(t, l, first)
		c.Set(1 * s)
		second := Reserve(t, l, r)
		if !slices.Equal(Used(second), []int64{4, 4, 4}) {
			t.Errorf("a reserve after Cancel is not charged: %v", Used(second))
		}
		if d := Cancel(t, l, first); !slices.Equal(Used(d), []int64{4, 4, 4}) {
			t.Errorf("the first reservation gave the second back: %v", Used(d))
		}
		if d := Cancel(t, l, second.Reservation); !slices.Equal(Used(d), []int64{0, 0, 0}) {
			t.Errorf("used %v", Used(d))
		}
	})
}

// A cancelled reservation is remembered as long as its units would have counted, and by real
// time at least as long as an idempotency key.
func TestCancelledIsRememberedAsLongAsItCounts(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for period, want := range map[time.Duration]time.Duration{s: m, 24 * h: 24 * h} {
			w := throttle.Window{Name: "w", Limit: 10, Period: period}
			l := New(t, client, Policy(w))
			r := Acme(1)
			r.IdempotencyKey = period.String()
			begun := time.Now()
			made := Reserve(t, l, r).Reservation
			Cancel(t, l, made)
			ttl, err := client.PTTL(t.Context(), "sluice:{p}:n:"+made.ID).Result()
			if err != nil || ttl > want+ms || ttl < want-time.Since(begun)-ms { // it is in milliseconds
				t.Errorf("period %v: kept for %v (%v), want %v", period, ttl, err, want)
			}
		}
	})
}

// Units that only a correction has charged are given back once, too, by whichever reservation.
func TestCancelOfWhatACorrectionAddedIsRemembered(t *testing.T) {
	Bubble(t, Policy(
		throttle.Window{Name: "requests", Limit: 10, Period: s},
		throttle.Window{Name: "tokens", Unit: "tokens", Algorithm: throttle.AlgorithmFixed, Limit: 100, Period: h},
	), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		first := Reserve(t, l, Acme(1)).Reservation
		settled := Settle(t, l, first, 40)
		Settle(t, l, Reserve(t, l, Acme(1)).Reservation, 40) // of others
		Cancel(t, l, first)
		time.Sleep(2 * time.Minute)
		Cancel(t, l, settled)
		if used := Used(Peek(t, l, Acme(1))); used[1] != 40 {
			t.Errorf("%d tokens are counted, want 40", used[1])
		}
	})
}

// The server that granted is gone, its state too, and the clock of the next one is behind.
func TestCancelOfWhatIsLostGivesNothingBack(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := NewHanded(t, client, three())
		c.Set(5 * s)
		lost := Reserve(t, l, Acme(1)).Reservation
		client.FlushDB(t.Context())
		c.Set(0)
		Reserve(t, l, Acme(8))
		if d := Cancel(t, l, lost); !slices.Equal(Used(d), []int64{8, 8, 8}) {
			t.Errorf("used %v", Used(d))
		}
	})
}

// Reservations are plain data: another process cancels them.
func TestReservationsTravel(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, _ := NewHanded(t, client, three())
		text, err := json.Marshal(Reserve(t, l, Acme(4)).Reservation)
		if err != nil {
			t.Fatal(err)
		}
		var r throttle.Reservation
		if err := json.Unmarshal(text, &r); err != nil {
			t.Fatal(err)
		}
		other, _ := NewHanded(t, client, three())
		if d := Cancel(t, other, r); !slices.Equal(Used(d), []int64{0, 0, 0}) {
			t.Errorf("used %v", Used(d))
		}
	})
}

func TestCancelOfNothing(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, _ := NewHanded(t, client, three())
		Reserve(t, l, Acme(5))
		before := Dump(t, client)
		Cancel(t, l, Made(Acme(5), "")) // of a reservation that failed open
		if after := Dump(t, client); !maps.Equal(before, after) {
			t.Errorf("Redis was changed:\n%q\n%q", before, after)
		}
		if d := Cancel(t, l, Made(Acme(1), "0123456789abcdef")); !slices.Equal(Used(d), []int64{5, 5, 5}) {
			t.Errorf("granted never, and given back: used %v", Used(d))
		}
	})
}

// Above a limit of 192 and 96 entries, what is granted within a 96th of the period, here 80 ms, is
// merged.
func TestCancelOfMergedGrants(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := NewHanded(t, client, Policy(throttle.Window{Name: "w", Limit: 2000, Period: 7680 * ms}))
		const alone, grants = 96, 12
		for i := range alone {
			c.Set(time.Duration(i) * ms)
			Reserve(t, l, Acme(1))
		}
		var made []throttle.Reservation
		for i := range int64(grants) {
			c.Set(s + time.Duration(i)*30*ms) // kept as 3 x 60, 3 x 150, 3 x 240 and 3 x 330 ms
			made = append(made, Reserve(t, l, Acme(100+i)).Reservation)
		}
		want := int64(alone + grants*100 + grants*(grants-1)/2)
		for i := range grants {
			i = i * 5 % grants // each once, in no order
			want -= 100 + int64(i)
			for range 2 {
				if d := Cancel(t, l, made[i]); d.Windows[0].Used != want {
					t.Fatalf("after the cancel of reservation %d: used %d, want %d", i, d.Windows[0].Used, want)
				}
			}
		}
	})
}

// A grant that was merged counts as long as its entry: a cancel gives it back after a period too. One
// whose own entry has gone gives back nothing. A second cancel, when nothing is remembered any more,
// says that it cancelled nothing.
func TestCancelOfMergedGrantsThatAreOlderThanAPeriod(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		const period = 7680 * ms // a tick is 80 ms
		l, c := NewHanded(t, client, Policy(throttle.Window{Name: "w", Limit: 2000, Period: period}))
		var alone, merged throttle.Reservation
		for i := range 96 {
			c.Set(time.Duration(i) * ms)
			alone = Reserve(t, l, Acme(3)).Reservation
		}
		for _, at := range []time.Duration{100 * ms, 130 * ms, 170 * ms, 250 * ms} {
			c.Set(at)
			r := Reserve(t, l, Acme(50)).Reservation
			if at == 130*ms {
				merged = r // kept at 170 ms, as is that of 100 ms
			}
		}
		c.Set(period + 140*ms)
		if used := Used(Peek(t, l, Acme(1))); used[0] != 200 {
			t.Fatalf("%d are counted, want 200", used[0])
		}
		for _, row := range []struct {
			r         throttle.Reservation
			cancelled bool
			used      int64
		}{{alone, false, 200}, {merged, true, 150}, {merged, false, 150}} {
			if d := Cancel(t, l, row.r); d.Granted != row.cancelled || d.Windows[0].Used != row.used {
				t.Errorf("cancelled %v, %d are counted, want %v and %d", d.Granted, d.Windows[0].Used, row.cancelled, row.used)
			}
		}
		c.Set(period + 2*m)
		if d := Cancel(t, l, merged); d.Granted {
			t.Error("cancelled again, a minute later")
		}
	})
}
