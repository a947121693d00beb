package linetest

import (
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// What is corrected, paused or released beside a line counts once.
func TestCorrectionsBesideALine(t *testing.T) {
	plays(t, map[string]play{
		"a refusal during a pause": {limitertest.Policy(limitertest.SharedWindow(10, 10*s)), func(sc *scene) {
			sc.pauseOf("a", h)
			sc.at(1 * s)
			r := sc.of("x")
			r.Exempt = true
			d := limitertest.Reserve(sc.t, sc.l, r)
			sc.at(2*s).pause(d.Reservation, 1*s)
			sc.denied("a1", h-2*s)
		}},
		"settled to nothing": {limitertest.Policy(throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Scope: throttle.ScopeShared}, limitertest.SharedWindow(10, 10*s)), func(sc *scene) {
			first := sc.granted("a1")
			r, err := first.Reservation.Settle(sc.t.Context(), map[string]int64{"requests": 0})
			limitertest.Must(sc.t, err)
			limitertest.Must(sc.t, r.Release(sc.t.Context()))
			b := sc.granted("a2")
			r, err = b.Reservation.Settle(sc.t.Context(), map[string]int64{"requests": 0})
			limitertest.Must(sc.t, err)
			limitertest.Cancel(sc.t, sc.l, r)
			sc.granted("a3")
		}},
		"settled for more and renewed": {limitertest.Policy(limitertest.Slots(2), limitertest.SharedWindow(10, 10*s)), func(sc *scene) {
			first := sc.granted("a1")
			sc.granted("a2")
			r, err := first.Reservation.Settle(sc.t.Context(), map[string]int64{"requests": 2})
			limitertest.Must(sc.t, err)
			if _, err := r.Renew(sc.t.Context()); err != nil {
				sc.t.Fatal(err)
			}
			if d := limitertest.Peek(sc.t, sc.l, sc.of("x")); d.Windows[0].Used != 2 {
				sc.t.Errorf("%d are held of 2", d.Windows[0].Used)
			}
		}},
		"a hold below 0": {limitertest.Policy(limitertest.Slots(1)), func(sc *scene) {
			r := sc.of("a1")
			r.MaxHold = -time.Second
			var invalid *throttle.RequestError
			if _, err := sc.l.Reserve(sc.t.Context(), r); !errors.As(err, &invalid) || invalid.Field != "max hold" {
				sc.t.Error(err)
			}
		}},
		"two calendars side by side": {limitertest.Policy(limitertest.Quota(3, "0 0 * * *", "")), func(sc *scene) {
			sc.at(5 * 24 * h)
			n := 0
			for i := range 10 {
				resets := "0 0 * * *"
				if i%2 == 1 {
					resets = "0 0 1 1 *"
				}
				limitertest.SetPolicy(sc.t, sc.l, limitertest.Quota(3, resets, ""))
				if limitertest.Reserve(sc.t, sc.l, limitertest.Acme(1)).Granted {
					n++
				}
			}
			if n > 3 {
				sc.t.Errorf("%d are granted of 3", n)
			}
		}},
		"a pause holds for what costs nothing there": {limitertest.Policy(throttle.Window{Name: "own", Limit: 10, Period: s}, tokens(100, s)), func(sc *scene) {
			d := sc.granted("a1")
			sc.pause(d.Reservation, 10*s)
			sc.denied("a2", 10*s)
		}},
	})
}

// A late renewal does not take again what was released, with any lease.
func TestReleasedIsRememberedForALease(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		w := limitertest.Slots(1)
		w.Lease = h
		l := limitertest.New(t, client, limitertest.Policy(w))
		d := limitertest.Reserve(t, l, limitertest.Acme(1))
		limitertest.Release(t, d)
		keys, err := client.Keys(t.Context(), "sluice:{p}:n:*").Result()
		if err != nil || len(keys) != 1 {
			t.Fatalf("%q, %v", keys, err)
		}
		for _, k := range keys {
			if ttl := client.TTL(t.Context(), k).Val(); ttl < h/2 {
				t.Errorf("%s is kept for %v", k, ttl)
			}
		}
	})
}
