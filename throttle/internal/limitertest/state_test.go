package limitertest

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// The key of acme's windows in policy p.
const acmeKey = "sluice:{p}:w:tenant:acme"

// refused calls all verbs, which must fail with the kind and leave Redis as it is.
func refused(t *testing.T, l *throttle.Limiter, client *redis.Client, what string, kind error) {
	t.Helper()
	before := Dump(t, client)
	_, reserved := l.Reserve(t.Context(), Acme(1))
	_, peeked := l.Peek(t.Context(), Acme(1))
	_, cancelled := l.Attach(Elsewhere(t, l.Policies()[0], Acme(1))).Cancel(t.Context())
	for _, err := range []error{reserved, peeked, cancelled} {
		expect.Err(t, err, kind, what)
	}
	expect.Equal(t, Dump(t, client), before, what)
}

func TestStateThatCannotBeRead(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := Policy(append(three().Windows, throttle.Window{Name: "all", Limit: 5, Period: m, Shared: true})...)
		p.FailOpen = true // which this is no case of
		l, _ := NewWithClock(t, client, p)
		Reserve(t, l, Acme(1))
		key := acmeKey
		good := expect.Got(client.Get(t.Context(), key).Result())(t)
		put := func(value string) {
			t.Helper()
			expect.Must(t, client.Set(t.Context(), key, value, 0).Err())
		}
		for what, value := range map[string]string{
			"empty":            "",
			"foreign":          "hello, world",
			"a number":         "42",
			"newer format":     "\x02" + good[1:],
			"one byte too few": good[:len(good)-1],
			"garbage behind":   good + "x",
		} {
			put(value)
			refused(t, l, client, what, throttle.ErrState)
		}
		// Cut between two sections it is a state like any other.
		readable := 0
		for n := range good {
			put(good[:n])
			if _, err := l.Peek(t.Context(), Acme(1)); err == nil {
				readable++
			} else if !errors.Is(err, throttle.ErrState) {
				t.Errorf("first %d bytes: %v", n, err)
			}
		}
		expect.Equal(t, readable, 3)

		put(good)
		expect.Equal(t, Reserve(t, l, Acme(1)).Windows[0].Used, 2)
	})
}

// With any bytes damaged, an answer comes, and an error changes nothing.
func TestDamagedState(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := NewWithClock(t, client, three())
		for i := range 3 {
			c.Set(time.Duration(i) * s)
			Reserve(t, l, Acme(2))
		}
		good := client.Get(t.Context(), acmeKey).Val()
		random := rand.New(rand.NewPCG(1, 2))
		classes := map[string]int{}
		for i := range 4 * len(good) {
			damaged := []byte(good)
			damaged[i%len(good)] = []byte{0, 255, byte(random.Uint32()), good[i%len(good)] ^ 1<<random.IntN(8)}[i/len(good)]
			client.FlushDB(t.Context())
			client.Set(t.Context(), acmeKey, damaged, 0)
			before := Dump(t, client)
			_, err := l.Reserve(t.Context(), Acme(3))
			switch {
			case err == nil:
				classes["none"]++
				continue
			case errors.Is(err, throttle.ErrState):
				classes["state"]++
			case errors.Is(err, throttle.ErrReply): // counts that do not add up
				classes["reply"]++
			default:
				t.Errorf("byte %d: %v", i%len(good), err)
			}
			expect.Equal(t, Dump(t, client), before, i%len(good), err)
		}
		expect.That(t, classes["none"] != 0 && classes["state"] != 0, "no damage of some kind", classes)
	})
}
