package linetest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestAClaimWhoseOwnerIsGoneHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(limitertest.SharedWindow(10, s))
		own, cut := newCaller(t, client)
		l, other := limitertest.New(t, client, p), limitertest.New(t, own, p)
		limitertest.Reserve(t, l, limitertest.Acme(10))
		ended := waits(t.Context(), t, client, other, throttle.Request{Policy: "p", Tenant: "gone", Cost: map[string]int64{throttle.Requests: 10}})
		cut.gone.Store(true)
		if d := limitertest.Reserve(t, l, limitertest.Acme(1)); d.Granted {
			t.Error("granted before one that waits")
		}
		if err := <-ended; !errors.Is(err, throttle.ErrUnavailable) {
			t.Error(err)
		}
		limitertest.Until(t, "a newcomer is let in", func() bool { return limitertest.Reserve(t, l, limitertest.Acme(1)).Granted })
		limitertest.Reserve(t, l, limitertest.Acme(0))
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
		if _, err := l.Wait(t.Context(), limitertest.Acme(1)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(6 * s)
		other := limitertest.New(t, client, l.Policies()...)
		r := limitertest.Acme(1)
		r.Ticket = limitertest.Ticket("a")
		if _, err := other.Line("p").Join(t.Context(), []throttle.Request{r}); err != nil {
			t.Fatal(err)
		}
		if got := ids(limitertest.Take(t, other, 64, "q")); got != "a" {
			t.Errorf("took %q", got)
		}
		limitertest.IsGone(t, client)
	})
}

func TestAWaitThatGivesUpLeavesNothing(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l := limitertest.New(t, client, limitertest.Policy(throttle.Window{Name: "own", Limit: 5, Period: time.Hour}, limitertest.SharedWindow(1, time.Hour)))
		limitertest.Reserve(t, l, limitertest.Acme(1))
		ctx, cancel := context.WithCancel(t.Context())
		var all []<-chan error
		for _, tenant := range []string{"a", "b", "c"} {
			all = append(all, waits(ctx, t, client, l, throttle.Request{Policy: "p", Tenant: tenant}))
		}
		limitertest.Agrees(t, client)
		cancel()
		for _, ended := range all {
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		limitertest.IsGone(t, client)
		if d := limitertest.Peek(t, l, limitertest.Acme(1)); d.Windows[1].Used != 1 {
			t.Errorf("used %d", d.Windows[1].Used)
		}
	})
}

// Others remove the claims of a process that was stopped for seconds. They join again.
func TestClaimsOfAProcessThatWasStopped(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(limitertest.SharedWindow(1, time.Hour))
		own, stopped := newCaller(t, client)
		l, other := limitertest.New(t, client, p), limitertest.New(t, own, p)
		full := limitertest.Reserve(t, l, limitertest.Acme(1))
		first := waits(t.Context(), t, client, other, limitertest.Acme(1))
		second := waits(t.Context(), t, client, other, throttle.Request{Policy: "p", Tenant: "b"})
		stopped.stop.Lock()
		limitertest.Until(t, "the claims are removed", func() bool {
			limitertest.Reserve(t, l, limitertest.Acme(0))
			return len(limitertest.ReadLine(t, client).Hashes["t"]) == 0
		})
		limitertest.IsGone(t, client)
		stopped.stop.Unlock()
		limitertest.Until(t, "they join again", func() bool { return len(limitertest.ReadLine(t, client).Hashes["t"]) == 2 })
		limitertest.Agrees(t, client)
		limitertest.Cancel(t, l, full.Reservation)
		var left <-chan error
		select {
		case err := <-first:
			left = second
			if err != nil {
				t.Error(err)
			}
		case err := <-second:
			left = first
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Fatal("nobody is let in")
		}
		p.Windows[0].Limit = 2
		if err := errors.Join(other.SetPolicies([]throttle.Policy{p}), <-left); err != nil {
			t.Error(err)
		}
		limitertest.IsGone(t, client)
	})
}

// Others remove as many claims of a process that was stopped as one call does. Those join again.
func TestClaimsOfWhichSomeWereRemovedJoinAgain(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(100, time.Hour))
	synctest.Test(t, func(t *testing.T) {
		server := throttletest.InMemory(t)
		client, own := server.Client(t), server.Client(t)
		var stopped atomic.Bool
		goOn := make(chan struct{})
		own.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if stopped.Load() {
				<-goOn
			}
			return next(ctx, cmd)
		}))
		l, other := limitertest.New(t, client, p), limitertest.New(t, own, p)
		const n = 100
		full := limitertest.Reserve(t, l, limitertest.Acme(n))
		var group sync.WaitGroup
		for range n {
			group.Go(func() {
				if _, err := other.Wait(t.Context(), limitertest.Acme(1)); err != nil {
					t.Error(err)
				}
			})
		}
		inLine := func() int { return len(limitertest.ReadLine(t, client).Hashes["t"]) }
		time.Sleep(500 * ms)
		stopped.Store(true)
		time.Sleep(3 * s)
		limitertest.Reserve(t, l, limitertest.Acme(0))
		if left := inLine(); left == 0 || left == n {
			t.Errorf("%d of %d are left", left, n)
		}
		close(goOn)
		time.Sleep(s)
		if back := inLine(); back != n {
			t.Errorf("%d of %d are in line again", back, n)
		}
		limitertest.Cancel(t, l, full.Reservation)
		group.Wait()
	})
}
