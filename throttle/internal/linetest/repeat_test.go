package linetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A twice is hooktest.Twice that repeats pipelines too, and counts.
type twice struct {
	hooktest.Hook
	repeated atomic.Int64
}

func newTwice() *twice {
	tw := &twice{}
	tw.Hook = func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if hooktest.IsScript(cmd) {
			tw.repeated.Add(1)
		}
		return hooktest.Twice(ctx, cmd, next)
	}
	return tw
}

func (tw *twice) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := next(ctx, cmds); err != nil || !hooktest.IsScript(cmds[0]) {
			return err
		}
		tw.repeated.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

// The keys of a line are the same after every step if each call is repeated. No ticket is there
// twice, and no units are charged twice or lost.
func TestLineWithEveryCallRepeated(t *testing.T) {
	windows := []throttle.Window{{Name: "own", Limit: 3, Period: 7 * s}, {Name: "all", Limit: 4, Period: 5 * s, Scope: throttle.ScopeShared}}
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		repeating := redis.NewClient(&redis.Options{Addr: client.Options().Addr, DB: 1})
		defer repeating.Close()
		other := redis.NewClient(&redis.Options{Addr: client.Options().Addr, DB: 1})
		defer other.Close()
		tw := newTwice()
		repeating.AddHook(tw)
		once, again := newScene(t, client, limitertest.Policy(windows...)), newScene(t, repeating, limitertest.Policy(windows...))

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
			for i, sc := range []*scene{once, again} {
				sc.at(now).cost = cost
				switch what {
				case "reserve":
					r := sc.of(ticket)
					if number%3 == 0 {
						r.Ticket = throttle.Ticket{}
					}
					d := limitertest.Reserve(t, sc.l, r)
					if ds[i] = fmt.Sprint(d.Granted, d.Queued); d.Granted {
						reserved[i] = append(reserved[i], d.Reservation)
					}
				case "join":
					p := sc.joins(ticket)
					ds[i] = fmt.Sprint(p.AlreadyQueued) // when it starts may be known better of one that waits
				case "leave":
					sc.leave(ticket)
				case "take":
					got, err := sc.l.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: max})
					limitertest.Must(t, err)
					for _, ticket := range got.Tickets {
						ds[i] += fmt.Sprint(ticket.ID, ticket.Rank, ticket.Decision.At, " ") // what windows count is not kept
						tickets++
					}
					taken[i] = append(taken[i], got.Tickets...)
				case "put back":
					if n := len(taken[i]); n > 0 {
						limitertest.Must(t, sc.l.Line("p").PutBack(t.Context(), taken[i][n-1:]))
						taken[i] = taken[i][:n-1]
					}
				case "cancel":
					if n := len(taken[i]); n > 0 && number%2 == 0 {
						limitertest.Must(t, sc.l.Line("p").Refund(t.Context(), taken[i][number/2%n:][:1]))
					} else if n := len(reserved[i]); n > 0 {
						limitertest.Cancel(t, sc.l, reserved[i][number%n])
					}
				}
			}
			if ds[0] != ds[1] {
				t.Fatalf("step %d, %s %s: %s, and repeated %s", step, what, ticket, ds[0], ds[1])
			}
			if a, b := lineDump(t, client), lineDump(t, other); a != b {
				t.Fatalf("step %d, %s %s: the line is\n%s\nand after repeated calls\n%s", step, what, ticket, a, b)
			}
		}
		if len(steps) != 7 || len(reserved[0]) == 0 || tickets < 10 || tw.repeated.Load() < 75 {
			t.Errorf("steps %v, %d grants, %d tickets taken, %d calls repeated", steps, len(reserved[0]), tickets, tw.repeated.Load())
		}
	})
}

// lineDump is a text of the line and its windows, without what processes and reservations are
// remembered by.
func lineDump(t limitertest.TB, client *redis.Client) string {
	t.Helper()
	var lines []string
	for key, value := range limitertest.Dump(t, client) {
		if kind := strings.TrimPrefix(key, "sluice:{p}:"); !strings.HasPrefix(kind, "r:") && !strings.HasPrefix(kind, "k") && !strings.HasPrefix(kind, "n:") || strings.Contains(kind, "|") {
			lines = append(lines, fmt.Sprintf("%s = %q", key, value))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// A batch of go-redis's AutoPipeline is repeated as a whole, after its replies were lost or
// after it went through: each of its decisions is charged once.
func TestRepeatedBatchIsChargedOnce(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.NewProxy(t, client.Options().Addr)
		through := throttletest.Client(t, p.Addr)
		tw := newTwice()
		through.AddHook(tw)
		batches, err := through.AutoPipeline()
		limitertest.Must(t, err)
		l := limitertest.New(t, batches, limitertest.Policy(throttle.Window{Name: "w", Limit: 60, Period: 24 * h}, throttle.Window{Name: "all", Limit: 1000, Period: 24 * h, Scope: throttle.ScopeShared}))
		limitertest.Peek(t, l, limitertest.Acme(1)) // loads the script
		tw.repeated.Store(0)

		p.Lose.Store(2)
		var granted atomic.Int64
		var mu sync.Mutex
		var reserved []throttle.Reservation
		var callers sync.WaitGroup
		for range 100 {
			callers.Go(func() {
				d, err := l.Reserve(t.Context(), limitertest.Acme(1))
				if err != nil {
					t.Error(err)
				}
				if d.Granted {
					granted.Add(1)
					mu.Lock()
					reserved = append(reserved, d.Reservation)
					mu.Unlock()
				}
			})
		}
		callers.Wait()
		if p.Lost.Load() == 0 || tw.repeated.Load() < 3 {
			t.Fatalf("%d replies lost, %d calls repeated", p.Lost.Load(), tw.repeated.Load())
		}
		plain := limitertest.New(t, client, l.Policies()...)
		if d := limitertest.Peek(t, plain, limitertest.Acme(1)); granted.Load() != 60 || !slices.Equal(limitertest.Used(d), []int64{60, 60}) {
			t.Errorf("%d granted, used %v", granted.Load(), limitertest.Used(d))
		}

		p.Lose.Store(2)
		for _, r := range reserved[:25] {
			callers.Go(func() {
				if _, err := l.Attach(r).Cancel(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		callers.Wait()
		if d := limitertest.Peek(t, plain, limitertest.Acme(1)); !slices.Equal(limitertest.Used(d), []int64{35, 35}) {
			t.Errorf("used %v", limitertest.Used(d))
		}
	})
}
