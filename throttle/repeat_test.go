package throttle_test

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

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// twice runs every script twice and hands on the second reply, as go-redis does when the first
// was lost.
type twice struct{ repeated atomic.Int64 }

func isScript(cmd redis.Cmder) bool { return strings.HasPrefix(strings.ToLower(cmd.Name()), "eval") }

func (*twice) DialHook(next redis.DialHook) redis.DialHook { return next }

func (tw *twice) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if err == nil && isScript(cmd) {
			tw.repeated.Add(1)
			err = next(ctx, cmd)
		}
		return err
	}
}

func (tw *twice) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := next(ctx, cmds); err != nil || !isScript(cmds[0]) {
			return err
		}
		tw.repeated.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

// Whatever a line goes through, whole or with every call repeated: its keys are the same after
// every step. No ticket is there twice, no units are charged twice or lost.
func TestLineWithEveryCallRepeated(t *testing.T) {
	windows := []throttle.Window{{Name: "own", Limit: 3, Period: 7 * s}, {Name: "all", Limit: 4, Period: 5 * s, Per: []string{}}}
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		repeating := redis.NewClient(&redis.Options{Addr: client.Options().Addr, DB: 1})
		defer repeating.Close()
		other := redis.NewClient(&redis.Options{Addr: client.Options().Addr, DB: 1})
		defer other.Close()
		tw := &twice{}
		repeating.AddHook(tw)
		once, again := newScene(t, client, policy(windows...)), newScene(t, repeating, policy(windows...))

		random := rand.New(rand.NewPCG(4, 2))
		var now time.Duration
		var reserved [2][]throttle.Reservation
		steps := map[string]int{}
		for step := range 300 {
			ticket := fmt.Sprint(string("abc"[random.IntN(3)]), random.IntN(6))
			what := []string{"reserve", "reserve", "reserve", "plan", "leave", "skip", "cancel", "pump", "pass", "pass"}[random.IntN(10)]
			steps[what]++
			if n := len(once.calls); n > 0 && what == "reserve" && random.IntN(2) == 0 {
				ticket = once.calls[n-1] // comes, as it was called
			}
			cost, number := 1+random.Int64N(2), random.IntN(1<<30)
			if what == "pass" {
				now += time.Duration(random.IntN(4000)) * ms
				if random.IntN(20) == 0 {
					now -= 8 * s // the clock is set back
				}
			}
			var ds [2]throttle.Decision
			for i, sc := range []*scene{once, again} {
				sc.at(now).cost = cost
				switch what {
				case "reserve":
					if ds[i] = reserve(t, sc.l, nonce(sc.of(ticket), fmt.Sprint(step))); ds[i].Granted {
						reserved[i] = append(reserved[i], ds[i].Reservation)
					}
				case "plan":
					d, err := sc.l.Plan(t.Context(), sc.of(ticket), 0, 0)
					if err != nil {
						t.Fatal(err)
					}
					ds[i] = d
				case "leave":
					sc.leave(ticket)
				case "skip":
					if err := sc.l.Skip(t.Context(), "p", ticket[:1], ticket); err != nil {
						t.Fatal(err)
					}
				case "cancel":
					if n := len(reserved[i]); n > 0 {
						cancel(t, sc.l, reserved[i][number%n])
					}
				case "pump":
					sc.pump()
				}
			}
			if ds[0].Granted != ds[1].Granted || ds[0].RetryIn != ds[1].RetryIn {
				t.Fatalf("step %d, %s %s: granted %v in %v, repeated %v in %v", step, what, ticket, ds[0].Granted, ds[0].RetryIn, ds[1].Granted, ds[1].RetryIn)
			}
			first, second := readLineState(t, client, "sluice:{p}:"), readLineState(t, other, "sluice:{p}:")
			first.due, second.due = nil, nil // when nodes are looked at again: a repeated call has looked already
			if a, b := fmt.Sprintf("%q", fmt.Sprint(first)), fmt.Sprintf("%q", fmt.Sprint(second)); a != b {
				t.Fatalf("step %d, %s %s: the line is\n%s\nand after repeated calls\n%s", step, what, ticket, a, b)
			}
			if faults := readLineState(t, other, "sluice:{p}:").faults(0, nil); len(faults) > 0 {
				t.Fatalf("step %d, %s %s: %q", step, what, ticket, faults)
			}
		}
		if len(steps) != 7 || len(reserved[0]) < 20 || tw.repeated.Load() < 200 {
			t.Errorf("steps %v, %d grants, %d calls repeated", steps, len(reserved[0]), tw.repeated.Load())
		}
	})
}

// A batch of go-redis's AutoPipeline is repeated as a whole, after its replies were lost or
// after it went through: each of its decisions is charged once.
func TestRepeatedBatchIsChargedOnce(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := newProxy(t, client.Options().Addr)
		through := throttletest.Client(t, p.addr)
		tw := &twice{}
		through.AddHook(tw)
		batches, err := through.AutoPipeline()
		if err != nil {
			t.Fatal(err)
		}
		l := newLimiter(t, batches, policy(throttle.Window{Name: "w", Limit: 60, Period: 24 * h}, throttle.Window{Name: "all", Limit: 1000, Period: 24 * h, Per: []string{}}))
		peek(t, l, acme(1)) // loads the script
		tw.repeated.Store(0)

		p.lose.Store(2)
		var granted atomic.Int64
		var mu sync.Mutex
		var reserved []throttle.Reservation
		var callers sync.WaitGroup
		for range 100 {
			callers.Go(func() {
				d, err := l.Reserve(t.Context(), acme(1))
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
		if p.lost.Load() == 0 || tw.repeated.Load() < 100 {
			t.Fatalf("%d replies lost, %d calls repeated", p.lost.Load(), tw.repeated.Load())
		}
		plain := newLimiter(t, client, l.Policies()...)
		if d := peek(t, plain, acme(1)); granted.Load() != 60 || !slices.Equal(used(d), []int64{60, 60}) {
			t.Errorf("%d granted, used %v", granted.Load(), used(d))
		}

		cancel(t, l, throttle.Reservation{Request: nonce(acme(1), "loads the other script")})
		p.lose.Store(2)
		for _, r := range reserved[:25] {
			callers.Go(func() {
				if _, err := l.Cancel(t.Context(), r); err != nil {
					t.Error(err)
				}
			})
		}
		callers.Wait()
		if d := peek(t, plain, acme(1)); !slices.Equal(used(d), []int64{35, 35}) {
			t.Errorf("used %v", used(d))
		}
	})
}
