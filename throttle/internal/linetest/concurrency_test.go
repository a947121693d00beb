package linetest

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestSlotsOfALine(t *testing.T) {
	tell(t, map[string]lineCase{
		"all windows must have room": {limitertest.Policy(limitertest.Slots(2), limitertest.SharedWindow(2, 10*s)), func(st *story) {
			first := st.granted("a1")
			st.granted("a2")
			st.waits("a3")
			limitertest.Release(st, first)
			st.at(10*s - us).takes() // the other window has none
			st.at(10 * s).takes("a3")
			st.waits("a4") // a slot is missing
			st.at(15 * s)
			limitertest.Release(st, first)
			st.takes()
		}},
		"per tenant and shared": {limitertest.Policy(limitertest.Slots(3), throttle.Window{Name: "own", Algorithm: throttle.AlgorithmConcurrency, Limit: 1}), func(st *story) {
			a1, b1 := st.granted("a1"), st.granted("b1")
			st.waits("a2", "b2")
			limitertest.Release(st, st.granted("c1"))
			st.takes() // neither's own slot is free
			limitertest.Release(st, b1)
			st.takes("b2")
			limitertest.Release(st, a1)
			st.takes("a2")
		}},
		"a queue without servers ends no lease": {limitertest.Policy(limitertest.Slots(1)), func(st *story) {
			holder := st.granted("a1").Reservation
			st.joinIn("dead", "b1")
			st.at(106 * s) // the lease has ended, and the slot is free
			expect.That(st, expect.Got(holder.Renew(st.Context()))(st), "it is not held")
		}},
		"what is expected is an upper bound": {limitertest.Policy(limitertest.Slots(2)), func(st *story) {
			longHold := func(ticket string) throttle.Request {
				r := st.request(ticket)
				r.MaxHold = 10 * m
				return r
			}
			limitertest.Reserve(st, st.l, longHold("a1"))
			a2 := limitertest.Reserve(st, st.l, longHold("a2"))
			for i, want := range []time.Duration{10 * m, 10 * m, 20 * m, 20 * m, 30 * m} {
				d := limitertest.Reserve(st, st.l, longHold(fmt.Sprint("b", i)))
				expect.That(st, d.Latest == want+us && d.RetryIn <= want, "number", i, d, "want at most", want)
			}
			st.at(2 * m)
			limitertest.Release(st, a2) // nothing held so long as was said: a1's lease has run out too
			expect.That(st, limitertest.Reserve(st, st.l, longHold("c1")).Latest < 30*m, "after a hold of 2m")
		}},
		"a slot that no whole ticket fits is of no use": {limitertest.Policy(limitertest.Slots(3)), func(st *story) {
			st.costs(2)
			for i, want := range []time.Duration{-us, 10 * m, 20 * m, 30 * m} {
				r := st.request(fmt.Sprint("a", i))
				r.MaxHold = 10 * m
				expect.Equal(st, limitertest.Reserve(st, st.l, r).Latest, want+us, i)
			}
		}},
		"nobody knows how long slots are held": {limitertest.Policy(limitertest.Slots(1)), func(st *story) {
			first := st.granted("a1")
			r := st.request("a2")
			r.MaxWait, r.Deadline = s, time.Now().Add(m)
			decisions := expect.Got(st.line().Join(st.Context(), []throttle.Request{r, st.request("a3")}))(st)
			for _, d := range decisions {
				expect.That(st, d.Err == nil && d.Binds == "slots" && d.Latest == 0, d, "want a decision without a bound")
			}
			d := limitertest.Reserve(st, st.l, st.without("b"))
			expect.That(st, !d.Granted && d.Latest == 0, d.RetryIn, "to", d.Latest, "want no bound")
			r = st.request("a4")
			r.MaxWait = -1
			decision := st.joining(r)
			expect.That(st, decision.Err != nil, decision, "it does not fit at once")
			e := st.explain("a3")
			expect.That(st, e.Binds == "slots" && e.Latest.IsZero() && e.Expected.Equal(limitertest.At(m)), e)
			st.at(2 * s)
			limitertest.Release(st, first)
			st.takes("a2") // a hold of 2 s is known from now on
			e = st.explain("a3")
			expect.That(st, e.Binds == "slots" && !e.Latest.IsZero(), e)
		}},
	})
}
