package linetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// The keys of a line are the same after every step if each call is repeated: no unit is charged twice.
func TestLineWithEveryCallRepeated(t *testing.T) {
	windows := []throttle.Window{{Name: "own", Limit: 3, Period: 7 * s}, {Name: "all", Limit: 4, Period: 5 * s, Shared: true}}
	client := limitertest.RedisClient(t)
	repeating := redis.NewClient(&redis.Options{Addr: client.Options().Addr, DB: 1})
	t.Cleanup(func() { repeating.Close() })
	other := redis.NewClient(&redis.Options{Addr: client.Options().Addr, DB: 1})
	defer other.Close()
	var repeated atomic.Int64 // also calls in the background
	repeating.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if hooktest.IsScript(cmd) {
			repeated.Add(1)
		}
		return hooktest.Twice(ctx, cmd, next)
	}))
	once, again := newStory(t, client, limitertest.Policy(windows...)), newStory(t, repeating, limitertest.Policy(windows...))

	random := rand.New(rand.NewPCG(4, 2))
	var now time.Duration
	var reserved [2][]throttle.Reservation
	var taken [2][]throttle.TakenTicket
	steps := map[string]int{}
	tickets := 0
	for step := range 150 {
		ticket := fmt.Sprint(string("abc"[random.IntN(3)]), random.IntN(6))
		what := []string{"reserve", "reserve", "reserve", "join", "leave", "take", "take", "put back", "cancel", "pass", "pass"}[random.IntN(11)]
		steps[what]++
		cost, number, max := 1+random.Int64N(2), random.IntN(1<<30), random.IntN(3)
		if what == "pass" {
			now += time.Duration(random.IntN(4000)) * ms
			if random.IntN(20) == 0 {
				now -= 8 * s // the clock is set back
			}
		}
		var ds [2]string
		for i, st := range []*story{once, again} {
			st.at(now).cost = cost
			switch what {
			case "reserve":
				r := st.request(ticket)
				if number%3 == 0 {
					r.Ticket = throttle.Ticket{}
				}
				d := limitertest.Reserve(t, st.l, r)
				if ds[i] = fmt.Sprint(d.Granted, d.Queued, d.AlreadyQueued); d.Granted {
					reserved[i] = append(reserved[i], d.Reservation)
				}
			case "join":
				p := st.joins(ticket)
				ds[i] = fmt.Sprint(p.AlreadyQueued) // when it starts may be known better of one that waits
			case "leave":
				st.leave(ticket)
			case "take":
				got := expect.Got(st.line().Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: max}))(t)
				for _, ticket := range got.Tickets {
					ds[i] += fmt.Sprint(ticket.ID, ticket.Rank, ticket.Decision.At, " ") // what windows count is not kept
					tickets++
				}
				taken[i] = append(taken[i], got.Tickets...)
			case "put back":
				if n := len(taken[i]); n > 0 {
					expect.Must(t, st.line().PutBack(t.Context(), taken[i][n-1:]))
					taken[i] = taken[i][:n-1]
				}
			case "cancel":
				if n := len(taken[i]); n > 0 && number%2 == 0 {
					expect.Must(t, st.line().Refund(t.Context(), taken[i][number/2%n:][:1]))
				} else if n := len(reserved[i]); n > 0 {
					limitertest.Cancel(t, st.l, reserved[i][number%n])
				}
			}
		}
		expect.Require(t, ds[0] == ds[1], "step", step, what, ticket, ds)
		expect.Equal(t, lineText(t, other), lineText(t, client), "after repeated calls, step", step, what, ticket)
	}
	expect.That(t, len(steps) == 7 && len(reserved[0]) != 0 && tickets >= 10 && repeated.Load() >= 75,
		"steps", steps, len(reserved[0]), "grants,", tickets, "tickets taken,", repeated.Load(), "calls repeated")
}
