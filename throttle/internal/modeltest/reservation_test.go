package modeltest

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A holding models a reservation: slots, and tokens in parts, one of the grant and of each settle that adds.
type holding struct {
	r      throttle.Reservation
	slots  int64
	until  time.Duration // of its lease
	ended  bool          // released or cancelled while it was held
	tokens int64
	parts  []part
}

type part struct {
	at    time.Duration
	units int64
}

// Random lives of reservations. Slots count while their lease is renewed, until it runs out, or they are
// released or cancelled. Tokens count for a period from when they were granted, or added by a settle
// that is not given back. After several settles added to a reservation more count, but never fewer.
func TestReservationsCountWhatTheyHold(t *testing.T) {
	client := limitertest.RedisClient(t)
	rapid.Check(t, func(t *rapid.T) {
		for range 6 {
			expect.Must(t, client.FlushAll(t.Context()).Err())
			const period, limit, lease = 10 * s, 120, 12 * s
			slots := limitertest.Slots(rapid.Int64Range(1, 5).Draw(t, "limit"))
			slots.Lease = lease
			policy := func() throttle.Policy {
				return limitertest.Policy(slots, throttle.Window{Name: "tokens", Limit: limit, Period: period, Unit: "tokens"})
			}
			l, c := limitertest.NewWithClock(t, client, policy())
			request := func(slots, tokens int64) throttle.Request {
				r := limitertest.Acme(slots)
				r.Cost["tokens"] = tokens
				return r
			}
			var all []*holding
			now, exact := time.Duration(0), true
			counted := func() (slots, tokens int64) {
				for _, h := range all {
					if h.until > now {
						slots += h.slots
					}
					for _, p := range h.parts {
						if p.at+period > now {
							tokens += p.units
						}
					}
				}
				return slots, tokens
			}
			some := func(t *rapid.T) *holding {
				if len(all) == 0 {
					t.Skip("nothing was granted yet")
				}
				return all[rapid.IntRange(max(0, len(all)-8), len(all)-1).Draw(t, "holding")]
			}
			t.Repeat(map[string]func(*rapid.T){
				"": func(t *rapid.T) {
					held, charged := counted()
					used := limitertest.Used(limitertest.Peek(t, l, request(1, 1)))
					expect.Require(t, used[0] == held && (used[1] == charged || used[1] > charged && !exact),
						used, "are counted, want", held, charged)
				},
				"pass": func(t *rapid.T) {
					now += rapid.SampledFrom([]time.Duration{us, s, 4 * s, period, lease - us, lease}).Draw(t, "by")
					c.Set(now)
				},
				"limit": func(t *rapid.T) {
					slots.Limit = rapid.Int64Range(1, 5).Draw(t, "limit")
					expect.Must(t, l.SetPolicies([]throttle.Policy{policy()}))
				},
				"reserve": func(t *rapid.T) {
					n, tokens := rapid.Int64Range(0, slots.Limit).Draw(t, "slots"), rapid.Int64Range(1, 20).Draw(t, "tokens")
					held, charged := counted()
					fits := (n == 0 || held+n <= slots.Limit) && charged+tokens <= limit
					d := limitertest.Reserve(t, l, request(n, tokens))
					expect.Require(t, d.Granted == fits || !d.Granted && !exact, n, tokens, "beside", held, charged, "granted", d.Granted)
					if d.Granted {
						all = append(all, &holding{r: d.Reservation, slots: n, until: now + lease, tokens: tokens, parts: []part{{now, tokens}}})
					}
				},
				"renew": func(t *rapid.T) {
					h := some(t)
					held, _ := counted()
					want := h.until > now || !h.ended && held+h.slots <= slots.Limit
					got, err := l.Attach(h.r).Renew(t.Context())
					expect.Require(t, err == nil && (got == want || h.slots == 0), "renewed", got, "want", want, err)
					if want {
						h.until = now + lease
					}
				},
				"settle": func(t *rapid.T) {
					h := some(t)
					if len(h.parts) == 0 {
						t.Skip("it was cancelled")
					}
					most := int64(40)
					if exact && len(h.parts) == 2 && rapid.IntRange(0, 9).Draw(t, "adds again") < 9 {
						most = h.tokens
					}
					actual := rapid.Int64Range(0, most).Draw(t, "actual")
					if h.r = limitertest.Settle(t, l, h.r, actual); actual > h.tokens {
						h.parts = append(h.parts, part{now, actual - h.tokens})
					}
					for i := len(h.parts) - 1; h.tokens > actual; i-- { // what was added last is given back first
						n := min(h.tokens-actual, h.parts[i].units)
						h.parts[i].units, h.tokens = h.parts[i].units-n, h.tokens-n
					}
					h.tokens, exact = actual, exact && len(h.parts) <= 2
				},
				"release": func(t *rapid.T) {
					h := some(t)
					expect.Must(t, l.Attach(h.r).Release(t.Context()))
					h.ended = h.ended || h.until > now // what ran out is not known any more
					h.until = 0
				},
				"cancel": func(t *rapid.T) {
					h := some(t)
					limitertest.Cancel(t, l, h.r)
					h.until, h.ended, h.parts = 0, true, nil
				},
			})
		}
	})
}
