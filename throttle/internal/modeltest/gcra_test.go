package modeltest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Every limit per every period is kept exactly: grants, levels and times are the model's, which counts in fractions.
func TestGCRAIsExactWhateverItsNumbers(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(5, 6))
	upTo := func(most int64) int64 { // of all sizes
		return 1 + random.Int64N(1+int64(float64(most-1)*math.Pow10(-random.IntN(12))))
	}
	windows := []throttle.Window{
		{Limit: 1009, Period: 45 * 24 * h},
		{Limit: 1e12, Period: ms},
		{Limit: 1e12, Period: throttle.MaxPeriod - us, Margin: throttle.MaxPeriod - us},
		{Limit: 999_999_999_989, Burst: 1, Period: throttle.MaxPeriod - us},
		{Limit: 1, Burst: 4, Period: throttle.MaxPeriod - us, Margin: throttle.MaxPeriod - 3*us},
	}
	for days := time.Duration(1); days <= 300; days += 23 {
		windows = append(windows, throttle.Window{Limit: 4999, Period: days * 24 * h})
	}
	for range 30 {
		w := throttle.Window{Limit: upTo(throttle.MaxLimit), Period: time.Duration(1000+upTo(int64(throttle.MaxPeriod/us)-1000)) * us}
		w.Burst = min(throttle.MaxLimit, max(1, w.Limit/upTo(1000)))
		windows = append(windows, w)
	}
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		random, denials := rand.New(rand.NewPCG(7, 8)), 0
		for _, w := range windows {
			w.Name, w.Algorithm = "w", throttle.AlgorithmGCRA
			expect.Must(t, client.FlushDB(t.Context()).Err())
			l, c := limitertest.NewWithClock(t, client, limitertest.Policy(w))
			m := newModel("", []throttle.Window{w})
			w = m.windows[0]
			drains := int64(float64(w.Period.Microseconds()) / float64(w.Limit) * float64(w.Burst))
			for i := range 12 {
				r := limitertest.Acme(max(1, w.Burst/(1+random.Int64N(3))))
				now := c.US.Load()
				got, want := limitertest.Reserve(t, l, r), m.reserve(r, fmt.Sprint(i), now)
				g, x := got.Windows[0], want.Windows[0]
				expect.Require(t, got.Granted == want.Granted && got.RetryIn == want.RetryIn &&
					g.Used == x.Used && g.ResetsAt.Equal(x.ResetsAt),
					w.Limit, "per", w.Period, "burst", w.Burst, "call", i, "granted", got.Granted, "retry in", got.RetryIn, "used", g.Used, "resets", g.ResetsAt, "want", want.Granted, want.RetryIn, x.Used, x.ResetsAt)
				if !got.Granted && i%2 == 0 {
					denials++
					c.US.Add(got.RetryIn.Microseconds())
				} else {
					c.US.Add(random.Int64N(drains/4 + 1))
				}
			}
		}
		expect.That(t, denials >= len(windows), denials, "denials")
	})
}

// Debts far above any limit are known to the unit, by whichever algorithm.
func TestDebtsAreKept(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for _, w := range []throttle.Window{
			{Limit: throttle.MaxLimit, Period: 24 * h},
			{Limit: throttle.MaxLimit, Period: 24 * h, Algorithm: throttle.AlgorithmFixed},
			{Limit: 1, Burst: throttle.MaxLimit, Period: 24 * h, Algorithm: throttle.AlgorithmGCRA},
			{Limit: throttle.MaxLimit, Resets: "@yearly", Algorithm: throttle.AlgorithmCalendar},
		} {
			expect.Must(t, client.FlushDB(t.Context()).Err())
			w.Name, w.Unit = "tokens", "tokens"
			l, _ := limitertest.NewWithClock(t, client, limitertest.Policy(w))
			tokens := throttle.Request{Policy: "p", Tenant: "acme", Cost: map[string]int64{"tokens": 1}}
			a, b := limitertest.Reserve(t, l, tokens).Reservation, limitertest.Reserve(t, l, tokens).Reservation
			a, b = limitertest.Settle(t, l, a, 1e12), limitertest.Settle(t, l, b, 1e12)
			b = limitertest.Settle(t, l, b, 1)
			limitertest.WantUsed(t, l, tokens, 1e12+1)
			limitertest.Cancel(t, l, a)
			limitertest.Cancel(t, l, b)
			limitertest.WantUsed(t, l, tokens, 0)
		}
	})
}
