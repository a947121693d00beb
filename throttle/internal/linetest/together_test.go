package linetest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// Concurrent callers share calls to Redis, each with a context and an error of its own.
func TestManyAskAtOnce(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		var calls atomic.Int64
		client.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if hooktest.IsScript(cmd) {
				calls.Add(1)
				time.Sleep(time.Millisecond) // others ask meanwhile
			}
			return next(ctx, cmd)
		}))
		l := limitertest.New(t, client, limitertest.Policy(limitertest.SharedWindow(300, h)))
		limitertest.Peek(t, l, limitertest.Acme(1))
		client.Set(t.Context(), "sluice:{p}:w:tenant:broken", "what is this", 0)
		p := limitertest.Policy(limitertest.SharedWindow(300, h), throttle.Window{Name: "own", Limit: 1000, Period: h})
		limitertest.Must(t, l.SetPolicies([]throttle.Policy{p}))
		calls.Store(0)
		var granted, gone, broken, never atomic.Int64
		var callers sync.WaitGroup
		for i := range 400 {
			callers.Go(func() {
				ctx, r := t.Context(), limitertest.Acme(1)
				switch i % 8 {
				case 1:
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*10*us)
					defer cancel()
				case 2:
					r.Tenant = "broken"
				case 3:
					r = limitertest.Acme(301)
				}
				d, err := l.Reserve(ctx, r)
				switch {
				case err == nil && d.Granted:
					granted.Add(1)
				case errors.Is(err, context.DeadlineExceeded) && i%8 == 1:
					gone.Add(1)
				case errors.Is(err, throttle.ErrState) && i%8 == 2:
					broken.Add(1)
				case errors.As(err, new(*throttle.NeverFitsError)) && i%8 == 3:
					never.Add(1)
				default:
					t.Errorf("caller %d: %+v, %v", i, d, err)
				}
			})
		}
		callers.Wait()
		limitertest.Reserve(t, l, limitertest.Acme(1)) // behind what was cancelled for callers that had gone
		if n := limitertest.Peek(t, l, limitertest.Acme(1)).Windows[0].Used; n != granted.Load()+1 {
			t.Errorf("%d are counted, %d were granted", n, granted.Load()+1)
		}
		if granted.Load()+gone.Load() != 300 || broken.Load() != 50 || never.Load() != 50 {
			t.Errorf("%d granted, %d gone, %d broken, %d never fit", granted.Load(), gone.Load(), broken.Load(), never.Load())
		}
		if n := calls.Load(); n > 400/2 { // they share calls: on average at least two each
			t.Errorf("400 callers took %d calls", n)
		}
	})
}
