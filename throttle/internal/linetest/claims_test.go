package linetest

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// waiters are goroutines that each wait and reserve over and over.
func waiters(ctx context.Context, group *sync.WaitGroup, l *throttle.Limiter, tenant string, n int, granted *atomic.Int64) {
	for range n {
		group.Go(func() {
			for {
				_, err := l.Wait(ctx, throttle.Request{Policy: "p", Tenant: tenant})
				if err != nil {
					return
				}
				granted.Add(1)
			}
		})
	}
}

// serve takes from the queue what fits, whenever Taken.Next says so.
func serve(ctx context.Context, l *throttle.Limiter, queue string, taken *atomic.Int64) {
	for ctx.Err() == nil {
		got, err := l.Line("p").Take(ctx, throttle.TakeOptions{Queues: map[string]int{queue: 1}, Max: 16})
		if err != nil {
			return
		}
		taken.Add(int64(len(got.Tickets)))
		select {
		case <-time.After(max(got.Next, time.Millisecond)):
		case <-ctx.Done():
		}
	}
}

// Calls that wait in place get their tenant's share, by its weight, beside tickets of a queue.
func TestWaitersGetTheirShareBesideABacklog(t *testing.T) {
	const weight = 3
	p := limitertest.Policy(throttle.Window{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: 100, Burst: 1, Period: s, Shared: true})
	p.Tenants = map[string]throttle.Tenant{"b": {Weight: weight}}
	synctest.Test(t, func(t *testing.T) {
		client := throttletest.InMemory(t).Client(t)
		waiter, taker := limitertest.New(t, client, p), limitertest.New(t, client, p)
		(&story{T: t, client: client, l: taker, cost: 1}).joinMany("q", "a", 300)
		ctx, stop := context.WithCancel(t.Context())
		var waited, taken atomic.Int64
		var group sync.WaitGroup
		waiters(ctx, &group, waiter, "b", 8, &waited)
		group.Go(func() { serve(ctx, taker, "q", &taken) })
		count := func(after time.Duration) (int64, int64) {
			time.Sleep(after)
			synctest.Wait() // all that was granted is counted
			return waited.Load(), taken.Load()
		}
		// The first tickets may be taken before anybody waits. From then on, one ticket of each, as in inShares.
		w0, k0 := count(110 * ms)
		w, k := count(s)
		stop()
		group.Wait()
		w, k = w-w0, k-k0
		expect.That(t, w > 0 && max(w-weight*k, weight*k-w) <= 1+weight+weight, "waiters got", w, "the queue", k)
	})
}

// waits begins to wait, and returns when the claim is in line.
func waits(ctx context.Context, t *testing.T, client *redis.Client, l *throttle.Limiter, r throttle.Request) <-chan error {
	t.Helper()
	before := len(limitertest.ReadLine(t, client).Hashes["t"])
	ended := make(chan error, 1)
	go func() {
		_, err := l.Wait(ctx, r)
		ended <- err
	}()
	limitertest.Until(t, "the claim joins", func() bool { return len(limitertest.ReadLine(t, client).Hashes["t"]) > before })
	return ended
}

// One take a second asks for all claims of a process, so that many cost no more than one.
func TestClaimsOfAProcessShareTheirTakes(t *testing.T) {
	commands := map[int]int{}
	for _, n := range []int{1, 50} {
		limitertest.Bubble(t, limitertest.Policy(limitertest.SharedWindow(1, time.Hour)), func(t *testing.T, l *throttle.Limiter, server throttletest.Memory) {
			limitertest.Reserve(t, l, limitertest.Acme(1))
			ctx, cancel := context.WithCancel(t.Context())
			var group sync.WaitGroup
			for range n {
				group.Go(func() { _, _ = l.Wait(ctx, limitertest.Acme(1)) })
			}
			time.Sleep(1500 * ms) // all have joined
			before := server.CommandCount()
			time.Sleep(10 * s)
			commands[n] = server.CommandCount() - before
			cancel()
			group.Wait()
		})
	}
	expect.That(t, commands[1] != 0 && commands[50] == commands[1],
		"commands in 10 s by the number of claims", commands)
}

// Servers of a line ask it apart from each other. A claim is asked for by its process alone: it starts once it fits.
func TestClaimsStartTheMomentTheyFit(t *testing.T) {
	const apart = 2 * ms
	p := limitertest.Policy(throttle.Window{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: int64(s / apart), Burst: 1, Period: s, Shared: true})
	limitertest.Bubble(t, p, func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		limitertest.Reserve(t, l, limitertest.Acme(1))
		begun := time.Now()
		starts := make(chan time.Duration, 10)
		for range cap(starts) {
			go func() {
				expect.Equal(t, expect.ErrOf(l.Wait(t.Context(), limitertest.Acme(1))), nil)
				starts <- time.Since(begun)
			}()
		}
		for i := range cap(starts) {
			expect.Equal(t, <-starts, steps(i+1)*apart, "number", i)
		}
	})
}

// A slot that is given back is a claim's at once if its own process held it, else within 100 ms, after any wait.
func TestAClaimTakesASlotThatIsGivenBack(t *testing.T) {
	for _, row := range []struct {
		name         string
		sameProcess  bool
		waits, takes time.Duration
	}{
		{"its own process held it", true, 5050 * ms, 0},
		{"another one held it", false, 50 * ms, 100 * ms},
		{"another one held it for long", false, 5050 * ms, 100 * ms},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := throttletest.InMemory(t).Client(t)
				here := limitertest.New(t, client, limitertest.Policy(limitertest.Slots(1)))
				holder := limitertest.New(t, client, here.Policies()...)
				if row.sameProcess {
					holder = here
				}
				held := limitertest.Reserve(t, holder, limitertest.Acme(1)).Reservation
				granted := make(chan time.Time, 1)
				go func() {
					expect.Equal(t, expect.ErrOf(here.Wait(t.Context(), limitertest.Acme(1))), nil)
					granted <- time.Now()
				}()
				time.Sleep(row.waits)
				released := time.Now()
				expect.Must(t, held.Release(t.Context()))
				took := (<-granted).Sub(released)
				expect.That(t, took <= row.takes, "it took", took, "want at most", row.takes)
			})
		})
	}
}

// A call waits for all windows, and learns at once that one of them has no room in time.
func TestWaitGoesByItsPlaceInLine(t *testing.T) {
	slots := throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Lease: m, Shared: true}
	p := limitertest.Policy(limitertest.SharedWindow(10, m), slots)
	limitertest.Bubble(t, p, func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		first := limitertest.Reserve(t, l, limitertest.Acme(1))
		waited := func(most, timeout time.Duration) error {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			r := limitertest.Acme(1)
			r.MaxWait = most
			d, err := l.Wait(ctx, r)
			if err == nil {
				err = d.Reservation.Release(t.Context())
			}
			return err
		}
		var denied *throttle.DeniedError
		for _, err := range []error{waited(100*ms, h), waited(h, 100*ms)} { // no slot is free in time
			expect.That(t, errors.As(err, &denied) && denied.Cause == context.DeadlineExceeded, err)
		}
		time.AfterFunc(50*ms, func() { _ = first.Reservation.Release(t.Context()) })
		expect.Must(t, waited(30*s, h))
		for range 8 {
			expect.Must(t, waited(s, h))
		}
		err := waited(30*s, h)
		expect.That(t, errors.As(err, &denied) && denied.Decision.RetryIn >= 40*s, "a slot is free, and the minute is used up", err)
	})
}

// A job that holds a slot could wait for itself, or for a job that waits for it. So it gives that back first.
func TestAJobThatHoldsASlotWaitsForNone(t *testing.T) {
	t.Parallel()
	ways := map[string]func(context.Context, throttle.Reservation) error{
		"Release": func(ctx context.Context, r throttle.Reservation) error { return r.Release(ctx) },
		"Cancel":  func(ctx context.Context, r throttle.Reservation) error { return expect.ErrOf(r.Cancel(ctx)) },
	}
	limitertest.EachCase(t, ways, func(t *testing.T, client *redis.Client, giveBack func(context.Context, throttle.Reservation) error) {
		slots := throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Lease: h, Shared: true}
		l := limitertest.New(t, client, limitertest.Policy(slots))
		ctx, cancel := context.WithTimeout(throttle.WithCaller(t.Context(), &throttle.Caller{}), 10*s)
		defer cancel()
		held := limitertest.Reserve(t, l, limitertest.Acme(1)).Reservation
		held.Hold(ctx)
		var denied *throttle.DeniedError
		r := limitertest.Acme(1)
		r.Ticket = throttle.Ticket{Queue: "q", ID: "t"}
		err := expect.ErrOf(l.Wait(ctx, r))
		expect.Require(t, errors.As(err, &denied) && denied.Cause == nil && !denied.Decision.Queued, "it holds a slot", err)
		expect.Must(t, giveBack(ctx, held))
		others := limitertest.Reserve(t, l, limitertest.Acme(1)).Reservation
		ended := waits(ctx, t, client, l, limitertest.Acme(1))
		expect.Must(t, errors.Join(others.Release(t.Context()), <-ended))
	})
}

// A claim whose process is gone holds up no newcomer, and is removed by the next call, which may be a take.
func TestAClaimWhoseOwnerIsGoneHoldsNobodyUp(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(10, s))
	limitertest.EachCase(t, map[string]func(*testing.T, *throttle.Limiter){
		"beside newcomers": func(t *testing.T, l *throttle.Limiter) {
			limitertest.Until(t, "one is let in", func() bool { return limitertest.Reserve(t, l, limitertest.Acme(1)).Granted })
			limitertest.Reserve(t, l, limitertest.Acme(0))
		},
		"beside takes": func(t *testing.T, l *throttle.Limiter) {
			time.Sleep(2100 * ms)
			limitertest.Take(t, l, 1, "q")
		},
	}, func(t *testing.T, client *redis.Client, ask func(*testing.T, *throttle.Limiter)) {
		var gone atomic.Bool
		otherClient := redis.NewClient(&redis.Options{Addr: client.Options().Addr, DB: client.Options().DB})
		t.Cleanup(func() { otherClient.Close() })
		otherClient.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if gone.Load() {
				cmd.SetErr(&net.OpError{Op: "write", Err: errors.New("cut off")})
				return cmd.Err()
			}
			return next(ctx, cmd)
		}))
		l, other := limitertest.New(t, client, p), limitertest.New(t, otherClient, p)
		limitertest.Reserve(t, l, limitertest.Acme(10))
		ended := waits(t.Context(), t, client, other, throttle.Request{Policy: "p", Tenant: "gone", Cost: map[string]int64{throttle.Requests: 10}})
		gone.Store(true)
		expect.Equal(t, limitertest.Reserve(t, l, limitertest.Acme(1)).Granted, false)
		expect.Err(t, <-ended, throttle.ErrUnavailable)
		ask(t, l)
		limitertest.IsGone(t, client)
	})
}

// A process does not acknowledge the take of its last claim. The claim has got what it waited for,
// and does not come back as what a lost take had got does.
func TestAClaimThatWasTakenDoesNotComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := throttletest.InMemory(t).Client(t)
		l := limitertest.New(t, client, limitertest.Policy(limitertest.SharedWindow(1, s)))
		limitertest.Reserve(t, l, limitertest.Acme(1))
		expect.Must(t, expect.ErrOf(l.Wait(t.Context(), limitertest.Acme(1))))
		time.Sleep(6 * s)
		other := limitertest.New(t, client, l.Policies()...)
		r := limitertest.Acme(1)
		r.Ticket = limitertest.Ticket("a")
		limitertest.Join(t, other, r)
		wantTaken(t, other, 64, "a", "q")
		limitertest.IsGone(t, client)
	})
}

// Others remove as many claims of a process that was stopped as one call does. Those join again.
func TestClaimsOfWhichSomeWereRemovedJoinAgain(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(100, time.Hour))
	synctest.Test(t, func(t *testing.T) {
		server := throttletest.InMemory(t)
		client, otherClient := server.Client(t), server.Client(t)
		var stopped atomic.Bool
		goOn := make(chan struct{})
		otherClient.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if stopped.Load() {
				<-goOn
			}
			return next(ctx, cmd)
		}))
		l, other := limitertest.New(t, client, p), limitertest.New(t, otherClient, p)
		const n = 100
		full := limitertest.Reserve(t, l, limitertest.Acme(n))
		var group sync.WaitGroup
		for range n {
			group.Go(func() {
				expect.Equal(t, expect.ErrOf(other.Wait(t.Context(), limitertest.Acme(1))), nil)
			})
		}
		inLine := func() int { return len(limitertest.ReadLine(t, client).Hashes["t"]) }
		time.Sleep(500 * ms)
		stopped.Store(true)
		time.Sleep(3 * s)
		limitertest.Reserve(t, l, limitertest.Acme(0))
		left := inLine()
		expect.That(t, left != 0 && left != n, left, n, "are left")
		close(goOn)
		time.Sleep(s)
		expect.Equal(t, inLine(), n)
		limitertest.Cancel(t, l, full.Reservation)
		group.Wait()
	})
}
