package linetest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func tokens(limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: "tokens", Limit: limit, Period: period, Unit: "tokens", Shared: true}
}

// A settle whose reply was lost is repeated by go-redis: it counts once, for all algorithms.
func TestSettleWhoseReplyWasLost(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for _, w := range []throttle.Window{
			tokens(4000, 60*s),
			{Name: "tokens", Algorithm: throttle.AlgorithmFixed, Limit: 4000, Period: m, Unit: "tokens"},
			{Name: "tokens", Algorithm: throttle.AlgorithmGCRA, Limit: 1, Burst: 4000, Period: h, Unit: "tokens"},
			{Name: "tokens", Algorithm: throttle.AlgorithmCalendar, Limit: 4000, Resets: "@yearly", Unit: "tokens"},
		} {
			expect.Must(t, client.FlushAll(t.Context()).Err())
			l, _ := limitertest.NewWithClock(t, client, limitertest.Policy(w))
			repeating := throttletest.Client(t, client.Options().Addr)
			repeating.AddHook(hooktest.Hook(hooktest.Twice))
			l2 := limitertest.NewByClock(t, repeating, limitertest.NewClock(), limitertest.Policy(w))
			r := limitertest.Acme(0)
			r.Cost = map[string]int64{"tokens": 1000}
			d := limitertest.Reserve(t, l, r)
			for _, actual := range []int64{1500, 700, 3000} {
				settled := limitertest.Settle(t, l2, d.Reservation, actual)
				limitertest.WantUsed(t, l, r, actual)
				d.Reservation = settled
			}
		}
	})
}

// What a settle adds is given back by a later one and by a cancel, as far as it still counts, even
// if it fell into a later bucket than the grant. What several add is given back as if the first did.
func TestWhatWasAddedIsGivenBack(t *testing.T) {
	t.Parallel()
	window := func(w throttle.Window) throttle.Window {
		w.Name, w.Unit = "tokens", "tokens"
		return w
	}
	limitertest.EachCase(t, map[string]throttle.Window{
		"sliding":  window(throttle.Window{Limit: 1000, Period: m}),
		"merged":   window(throttle.Window{Limit: 1000, Period: 10 * h}),
		"fixed":    window(throttle.Window{Limit: 1000, Period: m, Algorithm: throttle.AlgorithmFixed}),
		"gcra":     window(throttle.Window{Limit: 1, Burst: 1000, Period: h, Algorithm: throttle.AlgorithmGCRA}),
		"calendar": window(throttle.Window{Limit: 1000, Resets: "* * * * *", Algorithm: throttle.AlgorithmCalendar}),
	}, func(t *testing.T, client *redis.Client, w throttle.Window) {
		st := newStory(t, client, limitertest.Policy(w))
		tokens := throttle.Request{Policy: "p", Tenant: "a", Cost: map[string]int64{"tokens": 10}}
		others := tokens
		others.Tenant, others.Cost = "a", map[string]int64{"tokens": 7}
		used := func(want int64) {
			t.Helper()
			// Of a bucket some parts of a unit have drained, which somebody else may have got.
			used := limitertest.Peek(t, st.l, tokens).Windows[0].Used
			expect.That(t, used == want || w.Algorithm == throttle.AlgorithmGCRA && used == want+1,
				used, "are counted, want", want)
		}
		r := limitertest.Reserve(t, st.at(30*s).l, tokens).Reservation
		r = st.at(50*s).settle(r, 300)
		limitertest.Reserve(t, st.l, others)
		used(307)
		r = st.at(55*s).settle(r, 90)
		used(97)
		r = st.settle(r, 10)
		used(17)
		r = st.settle(r, 5) // of the grant itself
		used(12)
		limitertest.Cancel(t, st.l, r)
		used(7)
		// The next minute: what was granted in this one may count no longer, what is added then does.
		r = limitertest.Reserve(t, st.at(30*m+57*s).l, tokens).Reservation
		counted := limitertest.Peek(t, st.l, tokens).Windows[0].Used - 10
		r = st.at(31*m+2*s).settle(r, 100)
		r = st.settle(r, 20)
		limitertest.Cancel(t, st.l, r)
		now := limitertest.Peek(t, st.l, tokens).Windows[0].Used
		expect.That(t, now <= counted, now, "are counted, want", counted)
	})
}

// What several settles added is given back as if the first had added all: nothing of others, granted later, is.
func TestOthersKeepWhatIsCounted(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(tokens(1000, m)))
	ofTokens := func(units int64) throttle.Request {
		return throttle.Request{Policy: "p", Tenant: "a", Cost: map[string]int64{"tokens": units}}
	}
	r := limitertest.Reserve(t, st.l, ofTokens(10)).Reservation
	r = st.at(10*s).settle(r, 15)
	r = st.at(20*s).settle(r, 20)
	limitertest.Reserve(t, st.l, ofTokens(5))
	st.settle(r, 10)
	limitertest.WantUsed(t, st.at(75*s).l, ofTokens(1), 10)
}

// What is corrected, paused or released beside a line counts once.
func TestCorrectionsBesideALine(t *testing.T) {
	tell(t, map[string]lineCase{
		"settled to nothing": {limitertest.Policy(throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Shared: true}, limitertest.SharedWindow(10, 10*s)), func(st *story) {
			first := st.granted("a1")
			r := expect.Got(first.Reservation.Settle(st.Context(), map[string]int64{"requests": 0}))(st)
			expect.Must(st, r.Release(st.Context()))
			b := st.granted("a2")
			r = expect.Got(b.Reservation.Settle(st.Context(), map[string]int64{"requests": 0}))(st)
			limitertest.Cancel(st, st.l, r)
			st.granted("a3")
		}},
		"settled for more and renewed": {limitertest.Policy(limitertest.Slots(2), limitertest.SharedWindow(10, 10*s)), func(st *story) {
			first := st.granted("a1")
			st.granted("a2")
			r := expect.Got(first.Reservation.Settle(st.Context(), map[string]int64{"requests": 2}))(st)
			expect.Must(st, expect.ErrOf(r.Renew(st.Context())))
			limitertest.WantUsed(st, st.l, st.request("x"), 2)
		}},
		"settled for more once policies were published": {throttle.Policy{
			Name: "p", Tenants: map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"tokens": {Limit: 50}}}},
			Windows: []throttle.Window{{Name: "tokens", Algorithm: throttle.AlgorithmGCRA, Limit: 100, Period: h, Unit: "tokens"}},
		}, func(st *story) {
			st.cost, st.tokens = 0, 10
			r, p := st.granted("a1").Reservation, st.l.Policies()[0]
			expect.Must(st, st.l.SetPolicies([]throttle.Policy{p, {Name: "other", Windows: p.Windows}}))
			r = st.settle(r, 40)
			limitertest.WantUsed(st, st.l, st.request("a"), 40)
			p.Windows[0].Period = 2 * h
			st.set(p)
			st.settle(st.settle(r, 45), 10)
			limitertest.WantUsed(st, st.l, st.request("a"), 45)
		}},
		"a pause holds for what costs nothing there": {limitertest.Policy(throttle.Window{Name: "own", Limit: 10, Period: s}, tokens(100, s)), func(st *story) {
			st.pause(st.granted("a1").Reservation, 10*s)
			st.denied("a2", 10*s)
		}},
	})
}

// A late renewal does not take again what was released, with any lease.
func TestReleasedIsRememberedForALease(t *testing.T) {
	client := limitertest.RedisClient(t)
	w := limitertest.Slots(1)
	w.Lease = h
	d := limitertest.Reserve(t, limitertest.New(t, client, limitertest.Policy(w)), limitertest.Acme(1))
	limitertest.Release(t, d)
	keys, err := client.Keys(t.Context(), "sluice:{p}:n:*").Result()
	expect.Require(t, err == nil && len(keys) == 1, keys, err)
	for _, k := range keys {
		ttl := client.TTL(t.Context(), k).Val()
		expect.That(t, ttl >= h/2, k, "is kept for", ttl)
	}
}
