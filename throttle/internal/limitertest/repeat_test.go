package limitertest

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// go-redis repeats a call whose connection broke.
func TestLostReplyIsChargedOnce(t *testing.T) {
	p := NewLossyProxy(t, RedisClient(t).Options().Addr)
	l := New(t, throttletest.Client(t, p.Addr), Policy(throttle.Window{Name: "w", Limit: 10, Period: 24 * h}))
	Peek(t, l, Acme(1)) // loads the script

	p.Lose.Store(2)
	d := Reserve(t, l, Acme(3))
	expect.Equal(t, p.Lost.Load(), 2, "replies are lost")
	WantGranted(t, d, 3)
	other := Reserve(t, l, Acme(2))
	again := other.Reservation
	expect.Equal(t, other.Windows[0].Used, 5)

	p.Lose.Store(2)
	expect.Equal(t, Used(Cancel(t, l, again)), []int64{3})
	expect.Equal(t, p.Lost.Load(), 4, "replies are lost")
	expect.Equal(t, Cancel(t, l, d.Reservation).Windows[0].Used, 0)
}

// repeatAt sends every script call at each of the times: all replies but the last are lost.
func repeatAt(times ...time.Duration) hooktest.Hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) (err error) {
		if !hooktest.IsScript(cmd) {
			return next(ctx, cmd)
		}
		for _, time := range times {
			cmd.Args()[4] = Midnight + time.Microseconds()
			if err = next(ctx, cmd); err != nil {
				return err
			}
		}
		return nil
	}
}

// A batch whose reply was lost may be decided differently when it is repeated: a denied request may
// fit by then. Repeated once more, it is not charged again.
func TestWhatARepeatedBatchGrantsIsChargedOnce(t *testing.T) {
	p := Policy(throttle.Window{Name: "w", Limit: 2, Period: 10 * s})
	client := RedisClient(t)
	l, c := NewWithClock(t, client, p)
	Reserve(t, l, Acme(1))
	repeating := throttletest.Client(t, client.Options().Addr)
	repeating.AddHook(repeatAt(1*s, 10*s+500*ms, 10*s+600*ms))
	other := NewEdited(t, repeating, NewClock(), []func(string) string{WithoutExpiry}, p)
	decisions := other.Together(t, Call{Request: Acme(1)}, Call{Request: Acme(1)})
	expect.Require(t, decisions[0].Granted && decisions[0].At.Equal(At(1*s)) && decisions[1].Granted &&
		decisions[1].At.Equal(At(10*s+500*ms)), decisions)
	c.Set(10*s + 700*ms)
	WantUsed(t, l, Acme(1), 2)
	Cancel(t, l, decisions[1].Reservation)
	WantUsed(t, l, Acme(1), 1)
}

// A call whose reply is lost for good may have been granted: its caller gets an error, and the next call of the
// process gives back what it took. One that never arrived takes nothing, also if a copy of it arrives late.
func TestWhatAnErrorHidesIsGivenBack(t *testing.T) {
	direct := RedisClient(t)
	proxy := NewLossyProxy(t, direct.Options().Addr)
	client := redis.NewClient(&redis.Options{Addr: proxy.Addr, MaxRetries: -1})
	defer client.Close()
	p := Policy(
		throttle.Window{Name: "w", Limit: 100, Period: h},
		throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 10},
	)
	l := New(t, client, p)
	Reserve(t, l, Acme(1)) // the script is known by now
	for range 3 {
		proxy.Lose.Store(1)
		expect.Err(t, expect.ErrOf(l.Reserve(t.Context(), Acme(2))), throttle.ErrUnavailable)
	}
	expect.Equal(t, Reserve(t, New(t, direct, p), Acme(1)).Windows[0].Used, 4)
	expect.Equal(t, Used(Reserve(t, l, Acme(1))), []int64{3, 3})
}
