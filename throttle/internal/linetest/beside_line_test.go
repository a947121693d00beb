package linetest

import (
	"errors"
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// What is corrected, paused or released beside a line counts once.
func TestCorrectionsBesideALine(t *testing.T) {
	tell(t, map[string]scenario{
		"a refusal during a pause": {limitertest.Policy(limitertest.SharedWindow(10, 10*s)), func(st *story) {
			st.pauseOf("a", h)
			st.at(1 * s)
			r := st.of("x")
			r.Exempt = true
			d := limitertest.Reserve(st, st.l, r)
			st.at(2*s).pause(d.Reservation, 1*s)
			st.denied("a1", h-2*s)
		}},
		"settled to nothing": {limitertest.Policy(throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Scope: throttle.ScopeShared}, limitertest.SharedWindow(10, 10*s)), func(st *story) {
			first := st.granted("a1")
			r, err := first.Reservation.Settle(st.Context(), map[string]int64{"requests": 0})
			limitertest.Must(st, err)
			limitertest.Must(st, r.Release(st.Context()))
			b := st.granted("a2")
			r, err = b.Reservation.Settle(st.Context(), map[string]int64{"requests": 0})
			limitertest.Must(st, err)
			limitertest.Cancel(st, st.l, r)
			st.granted("a3")
		}},
		"settled for more and renewed": {limitertest.Policy(limitertest.Slots(2), limitertest.SharedWindow(10, 10*s)), func(st *story) {
			first := st.granted("a1")
			st.granted("a2")
			r, err := first.Reservation.Settle(st.Context(), map[string]int64{"requests": 2})
			limitertest.Must(st, err)
			limitertest.Must(st, limitertest.Err(r.Renew(st.Context())))
			limitertest.WantUsed(st, st.l, st.of("x"), 2)
		}},
		"a hold below 0": {limitertest.Policy(limitertest.Slots(1)), func(st *story) {
			r := st.of("a1")
			r.MaxHold = -time.Second
			var invalid *throttle.RequestError
			if _, err := st.l.Reserve(st.Context(), r); !errors.As(err, &invalid) || invalid.Field != "max hold" {
				st.Error(err)
			}
		}},
		"two calendars side by side": {limitertest.Policy(limitertest.Quota(3, "0 0 * * *", "")), func(st *story) {
			st.at(5 * 24 * h)
			n := 0
			for i := range 10 {
				resets := "0 0 * * *"
				if i%2 == 1 {
					resets = "0 0 1 1 *"
				}
				limitertest.SetPolicy(st, st.l, limitertest.Quota(3, resets, ""))
				if limitertest.Reserve(st, st.l, limitertest.Acme(1)).Granted {
					n++
				}
			}
			limitertest.That(st, n <= 3, n, "are granted of 3")
		}},
		"a pause holds for what costs nothing there": {limitertest.Policy(throttle.Window{Name: "own", Limit: 10, Period: s}, tokens(100, s)), func(st *story) {
			d := st.granted("a1")
			st.pause(d.Reservation, 10*s)
			st.denied("a2", 10*s)
		}},
	})
}

// A late renewal does not take again what was released, with any lease.
func TestReleasedIsRememberedForALease(t *testing.T) {
	client := limitertest.Redis(t)
	w := limitertest.Slots(1)
	w.Lease = h
	l := limitertest.New(t, client, limitertest.Policy(w))
	d := limitertest.Reserve(t, l, limitertest.Acme(1))
	limitertest.Release(t, d)
	keys, err := client.Keys(t.Context(), "sluice:{p}:n:*").Result()
	limitertest.Require(t, err == nil && len(keys) == 1, keys, err)
	for _, k := range keys {
		ttl := client.TTL(t.Context(), k).Val()
		limitertest.That(t, ttl >= h/2, k, "is kept for", ttl)
	}
}
