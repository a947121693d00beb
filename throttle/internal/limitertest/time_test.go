package limitertest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestClockThatStepsBackReopensNothing(t *testing.T) {
	l, c := NewWithClock(t, RedisClient(t), three())
	c.Set(100 * s)
	Reserve(t, l, Acme(7))

	c.Set(0)
	d := Reserve(t, l, Acme(3))
	WantGranted(t, d, 10, 10, 10)
	expect.That(t, d.At.Equal(At(100*s)) && d.ClockBehind == 100*s, "time went backwards", d)
	// RetryIn counts from the clock as it is now. The clock gets there when the windows do.
	d = Reserve(t, l, Acme(1))
	WantDenied(t, d, 110*s)
	expect.That(t, d.At.Equal(At(0)) && d.EarliestReset() == 101*s, d)
	for _, back := range []time.Duration{1 * s, 99 * s, 100 * s, 101 * s, 110*s - us} {
		c.Set(back)
		d := Reserve(t, l, Acme(1))
		WantDenied(t, d, 110*s-back, "at", back)
		expect.Equal(t, d.ClockBehind, max(0, 100*s-back), "at", back)
	}
	c.Set(40 * s)
	waiting := Acme(1)
	waiting.Ticket = Ticket("a1")
	decisions, err := l.Line("p").Join(t.Context(), []throttle.Request{waiting})
	expect.That(t, err == nil && decisions[0].RetryIn == 70*s, "join", decisions, err)
	expect.Must(t, l.Line("p").Leave(t.Context(), waiting.Ticket))
	c.Set(110 * s)
	d = Reserve(t, l, Acme(10))
	expect.Require(t, d.Granted, "denied")
	c.Set(50 * s)
	d = Cancel(t, l, d.Reservation)
	expect.That(t, d.At.Equal(At(110*s)) && d.ClockBehind == 60*s, d)
	expect.Equal(t, Used(d), []int64{0, 0, 0})
}

// Redis forgets a key in the first millisecond after the one that EXPIRETIME names.
func TestKeysExpireNotBeforeTheyMayAndSoonAfter(t *testing.T) {
	cases := map[string]throttle.Window{}
	for _, period := range []time.Duration{5 * ms, 100 * ms, 900 * ms, 1900 * ms, 24 * h} {
		for name, w := range map[string]throttle.Window{
			"sliding": {Algorithm: throttle.AlgorithmSliding, Margin: period / 5},
			"fixed":   {Algorithm: throttle.AlgorithmFixed},
			"gcra":    {Algorithm: throttle.AlgorithmGCRA},
		} {
			w.Name, w.Limit, w.Period = "w", 3, period
			cases[fmt.Sprint(period, " ", name)] = w
		}
	}
	EachCase(t, cases, func(t *testing.T, client *redis.Client, w throttle.Window) {
		l := New(t, client, Policy(w))
		Reserve(t, l, Acme(1)) // loads the script
		for range 1000 {       // the shortest may have gone before we look
			before := client.Time(t.Context()).Val()
			d := Reserve(t, l, Acme(2))
			after := client.Time(t.Context()).Val()
			expires, err := client.PExpireTime(t.Context(), "sluice:{p}:w:tenant:acme").Result()
			if redis.HasErrorPrefix(err, "unknown command") {
				t.Skip("PEXPIRETIME needs Redis 7.0")
			}
			expect.Must(t, err)
			if !d.Granted || expires < 0 {
				time.Sleep(time.Millisecond)
				continue
			}
			needed := d.Windows[0].ResetsAt
			gone := time.UnixMilli(0).Add(expires + ms)
			expect.That(t, !gone.Before(needed), "is forgotten at", gone, "needed until", needed)
			// Rounded up, one more in the script, and the one above.
			slack := after.Sub(before) + 3*ms
			expect.That(t, !gone.After(needed.Add(slack)), "is forgotten at", gone, "needed only until", needed)
			return
		}
		expect.That(t, w.Period < time.Second, "the key had always gone")
	})
}

// The longest-lived window of a scope decides when its key expires, even if the last writer does
// not know that window, and while the clock is behind the windows.
func TestKeysLiveAsLongAsTheLongestWindow(t *testing.T) {
	short := throttle.Window{Name: "short", Limit: 10, Period: m}
	long := throttle.Window{Name: "long", Limit: 10, Period: 10 * h}
	client := RedisClient(t)
	c := NewClock()
	l := NewEdited(t, client, c, nil, Policy(short, long)).Limiter
	c.Set(5 * h)
	Reserve(t, l, Acme(1))
	SetPolicy(t, l, short)
	c.Set(0)
	begun := time.Now()
	Reserve(t, l, Acme(1))
	ttl := client.PTTL(t.Context(), "sluice:{p}:w:tenant:acme").Val()
	if ttl > 15*h+ms || ttl < 15*h-time.Since(begun)-ms { // it is in milliseconds
		t.Errorf("the key lives for %v, want 15h", ttl)
	}
}

func TestIdleTenantsLeaveNothing(t *testing.T) {
	p := Policy(
		throttle.Window{Name: "s", Limit: 9, Period: 100 * ms},
		throttle.Window{Name: "f", Algorithm: throttle.AlgorithmFixed, Limit: 9, Period: 300 * ms, Shared: true},
		throttle.Window{Name: "g", Algorithm: throttle.AlgorithmGCRA, Limit: 9, Period: 500 * ms, Per: []string{"user"}},
	)
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l := New(t, client, p)
		for i := range 20 {
			r := Acme(1)
			r.Tenant = fmt.Sprint("tenant", i)
			r.Attributes = map[string]string{"user": fmt.Sprint(i % 7)}
			expect.Must(t, expect.ErrOf(l.Wait(t.Context(), r)))
		}
		var left []string
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(50 * ms) {
			keys := expect.Got(client.Keys(t.Context(), "*").Result())(t)
			// What a repeated call is recognised by is kept for a minute, by its own expiry.
			left = slices.DeleteFunc(keys, func(key string) bool { return !strings.HasPrefix(key, "sluice:{p}:w:") })
			if len(left) == 0 {
				break
			}
		}
		expect.That(t, len(left) == 0, "still there", left)
		for _, key := range client.Keys(t.Context(), "*").Val() {
			ttl := client.PTTL(t.Context(), key).Val()
			expect.That(t, ttl <= m && ttl != -1, key, "lives for", ttl)
		}
	})
}

// A cancelled reservation that was the last thing counted takes its key away.
func TestCancelTakesTheEmptyKeyAway(t *testing.T) {
	client := RedisClient(t)
	l, _ := NewWithClock(t, client, three())
	Cancel(t, l, Reserve(t, l, Acme(1)).Reservation)
	expect.Equal(t, len(client.Keys(t.Context(), "*:w:*").Val()), 0)
}
