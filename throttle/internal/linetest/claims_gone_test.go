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
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestAClaimWhoseOwnerIsGoneHoldsNobodyUp(t *testing.T) {
	client := limitertest.Redis(t)
	p := limitertest.Policy(limitertest.SharedWindow(10, s))
	var gone atomic.Bool
	own := redis.NewClient(client.Options())
	defer own.Close()
	own.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if gone.Load() {
			cmd.SetErr(&net.OpError{Op: "write", Err: errors.New("cut off")})
			return cmd.Err()
		}
		return next(ctx, cmd)
	}))
	l, other := limitertest.New(t, client, p), limitertest.New(t, own, p)
	limitertest.Reserve(t, l, limitertest.Acme(10))
	ended := waits(t.Context(), t, client, other, throttle.Request{Policy: "p", Tenant: "gone", Cost: map[string]int64{throttle.Requests: 10}})
	gone.Store(true)
	limitertest.Equal(t, limitertest.Reserve(t, l, limitertest.Acme(1)).Granted, false)
	limitertest.WantErr(t, <-ended, throttle.ErrUnavailable)
	limitertest.Until(t, "a newcomer is let in", func() bool { return limitertest.Reserve(t, l, limitertest.Acme(1)).Granted })
	limitertest.Reserve(t, l, limitertest.Acme(0))
	limitertest.IsGone(t, client)
}

// A process does not acknowledge the take of its last claim. The claim has got what it waited for,
// and does not come back as what a lost take had got does.
func TestAClaimThatWasTakenDoesNotComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := throttletest.InMemory(t).Client(t)
		l := limitertest.New(t, client, limitertest.Policy(limitertest.SharedWindow(1, s)))
		limitertest.Reserve(t, l, limitertest.Acme(1))
		limitertest.Must(t, limitertest.Err(l.Wait(t.Context(), limitertest.Acme(1))))
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
		left := inLine()
		limitertest.That(t, left != 0 && left != n, left, n, "are left")
		close(goOn)
		time.Sleep(s)
		limitertest.Equal(t, inLine(), n)
		limitertest.Cancel(t, l, full.Reservation)
		group.Wait()
	})
}
