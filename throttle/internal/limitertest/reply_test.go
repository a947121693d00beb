package limitertest

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// damaged returns a reply with a value that is another, missing or too many.
func damaged(random *rand.Rand, reply []any) []any {
	i, now := random.IntN(len(reply)+1), time.Now().UnixMicro()
	others := []any{
		nil, math.NaN(), errors.New("ERR of one value"), []any{}, "", "SLUICE_STATE key", "SLUICE_CLOCK window",
		int64(math.MinInt64), int64(-1), random.Int64N(32), now - 9, now + 7, int64(math.MaxInt64),
	}
	other := others[random.IntN(len(others))]
	switch {
	case i == len(reply):
		return append(reply, other)
	case random.IntN(4) == 0:
		return slices.Delete(reply, i, i+1)
	}
	if text, ok := reply[i].(string); ok && len(text) > 0 && random.IntN(4) > 0 {
		at := random.IntN(len(text))
		other = text[:at] + []string{"", " ", "-", "%zz", "99999999999999999999"}[random.IntN(5)] + text[at+1:]
	}
	reply[i] = other
	return reply
}

// Any reply of a script is a decision that makes sense, or a known error.
func TestDamagedReplies(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 8))
	client := RedisClient(t)
	var mu sync.Mutex // tickets are refreshed in the background
	var last atomic.Value
	client.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		err := next(ctx, cmd)
		if script, ok := cmd.(*redis.Cmd); ok && err == nil {
			reply, _ := script.Slice()
			mu.Lock()
			for range 1 + random.IntN(2) {
				reply = damaged(random, slices.Clone(reply))
			}
			mu.Unlock()
			script.SetVal(reply)
			last.Store(reply)
		}
		return err
	}))
	p := Policy(
		throttle.Window{Name: "own", Limit: 5, Period: m},
		throttle.Window{Name: "all", Limit: 9, Period: m, Shared: true, Algorithm: throttle.AlgorithmGCRA, Burst: 3},
	)
	p.Tenants = map[string]throttle.Tenant{"exempt": {Exempt: true}}
	l, ctx := New(t, client, p), t.Context()
	made := 0
	known := func(verb string, err error) bool {
		t.Helper()
		refused := errors.As(err, new(*throttle.DeniedError)) || errors.As(err, new(*throttle.RequestError))
		expect.That(t, err == nil || refused || errors.Is(err, throttle.ErrReply) || errors.Is(err, throttle.ErrState) ||
			errors.Is(err, throttle.ErrClock), verb, "of", last.Load(), err)
		return err == nil
	}
	decision := func(verb string, d throttle.Decision, err error) {
		t.Helper()
		if !known(verb, err) {
			expect.That(t, !d.Granted && d.Windows == nil, verb, "of", last.Load(), err, "with", d)
			return
		}
		made++
		expect.That(t, len(d.Windows) == 2 && d.ClockBehind >= 0 && d.RetryIn >= 0 && d.Latest >= d.RetryIn &&
			(!d.Granted || d.Latest == 0) && (d.Granted || d.RetryIn != 0 || d.Queued || verb == "Cancel"), verb, "of", last.Load(), d)
		for _, w := range d.Windows {
			expect.That(t, w.Used >= 0 && w.Remaining >= 0 && w.Remaining <= w.Burst && w.RetryIn >= 0 &&
				(!d.Granted || !w.Denied), verb, "of", last.Load(), w)
		}
		expect.That(t, d.Granted == (d.Reason() == "") && d.EarliestReset() <= d.RetryIn, verb, "of", last.Load(), d)
	}
	held := Elsewhere(t, p, Acme(1))
	for range 500 {
		r := Acme(1 + random.Int64N(3))
		r.Ticket, r.Backlog, r.MaxWait = Ticket(string(rune('a'+random.IntN(4)))), 5, h
		d, err := l.Reserve(ctx, r)
		decision("Reserve", d, err)
		expect.That(t, err != nil || !d.Granted || len(d.Reservation.ID) == 16, "Reserve of", last.Load(), "without an ID")
		cancelled, err := TryCancel(ctx, l, held)
		decision("Cancel", cancelled, err)
		d, err = l.Peek(ctx, r)
		decision("Peek", d, err)
		exempt := r
		exempt.Tenant = "exempt"
		d, err = l.Reserve(ctx, exempt)
		decision("Reserve", d, err)
		expect.That(t, err != nil || d.Granted, "an exempt tenant's Reserve of", last.Load(), d)
		joined, err := l.Line("p").Join(ctx, []throttle.Request{r})
		known("Join", err)
		for _, d := range joined {
			expect.That(t, !known("Join", d.Err) || d.RetryIn >= 0 && d.Latest >= d.RetryIn, "Join of", last.Load(), d)
		}
		known("Leave", l.Line("p").Leave(ctx, r.Ticket))
		got, err := l.Line("p").Take(ctx, throttle.TakeOptions{Queues: Queues("q"), Max: 5})
		known("Take", err)
		for _, ticket := range got.Tickets {
			d := ticket.Decision
			expect.That(t, d.Granted != ticket.NeverFits && (len(d.Windows) == 2 || d.Windows == nil), "Take of", last.Load(), ticket)
		}
		known("Acknowledge", l.Line("p").Acknowledge(ctx))
	}
	expect.That(t, made > 100, made, "decisions were made of damaged replies")
}
