package worker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

func atOnce(limit int64) throttle.Policy {
	return throttle.Policy{
		Name: "api", Match: []string{"*"},
		Windows: []throttle.Window{{Name: "slots", Algorithm: throttle.Concurrency, Limit: limit}},
	}
}

// atOnceOf is such a policy of another name, by which no task type is matched.
func atOnceOf(name string, limit int64) throttle.Policy {
	p := atOnce(limit)
	p.Name, p.Match = name, nil
	return p
}

// A gauge knows how many run at once.
type gauge struct{ now, most atomic.Int64 }

func (g *gauge) handler(work func(context.Context, *asynq.Task) error) asynq.HandlerFunc {
	return func(ctx context.Context, t *asynq.Task) error {
		n := g.now.Add(1)
		defer g.now.Add(-1)
		for {
			most := g.most.Load()
			if n <= most || g.most.CompareAndSwap(most, n) {
				break
			}
		}
		return work(ctx, t)
	}
}

func TestAConcurrencyWindowBoundsHowManyRunAtOnce(t *testing.T) {
	each(t, []throttle.Policy{atOnce(3)}, func(t *testing.T, s *site) {
		var ids []string
		for i := range 40 {
			ids = append(ids, fmt.Sprint("t", i))
			s.enqueue(task("acme"), asynq.TaskID(ids[i]), asynq.MaxRetry(0))
		}
		g, l := &gauge{}, newLedger()
		work := g.handler(func(ctx context.Context, task *asynq.Task) error {
			time.Sleep(20 * time.Millisecond)
			return s.ok(ctx, task)
		})
		s.serve(work, l.watch)
		s.serve(work, l.watch)
		s.waitGone(ids...)
		if most := g.most.Load(); most > 3 {
			t.Errorf("%d ran at once, the limit is 3", most)
		}
		if mean, most := l.wakesPerTask(); mean > 2.2 || most > 4 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		s.wantCounters(counters{Processed: 40})
		s.wait("nothing is held", func() bool {
			d, err := s.limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
			return err == nil && d.Windows[0].Used == 0
		})
	})
}

// Minutes of work a task, longer than its lease, and four times as many tasks as slots, by a made-up
// clock.
func TestLongHandlersWakeTwice(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const slots, tasks = 20, 80
		p := atOnce(slots)
		p.Windows[0].Lease = 75 * time.Second
		p.Windows = append(p.Windows, throttle.Window{Name: "rate", Limit: slots - 4, Period: 15 * time.Second})
		s := synctestSite(t, p)
		g, l := &gauge{}, newLedger()
		for i := range tasks {
			s.enqueue(task("acme"), asynq.TaskID(fmt.Sprint("t", i)), asynq.MaxRetry(0))
		}
		s.serve(g.handler(func(ctx context.Context, task *asynq.Task) error {
			time.Sleep(150 * time.Second)
			return s.ok(ctx, task)
		}), l.watch, func(c *asynq.Config, _ *worker.Config) {
			c.Concurrency, c.DelayedTaskCheckInterval, c.TaskCheckInterval = slots+6, 5*time.Second, time.Second
		})
		time.Sleep(15 * time.Minute)
		if got := len(s.runs()); got != tasks {
			t.Errorf("%d of %d have run", got, tasks)
		}
		if most := g.most.Load(); most != slots {
			t.Errorf("%d ran at once, the limit is %d", most, slots)
		}
		if mean, most := l.wakesPerTask(); mean > 2.2 || most > 4 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
	})
}

// However an attempt ends, what it held is given back, once.
func TestLeasesEndWithTheAttempt(t *testing.T) {
	each(t, []throttle.Policy{atOnce(1)}, func(t *testing.T, s *site) {
		var slow sync.WaitGroup
		handlers := map[string]asynq.HandlerFunc{
			"panics": func(context.Context, *asynq.Task) error { panic("on purpose") },
			"fails":  func(context.Context, *asynq.Task) error { return errors.New("on purpose") },
			"outlives its time": func(ctx context.Context, _ *asynq.Task) error {
				slow.Add(1)
				defer slow.Done()
				<-ctx.Done()
				time.Sleep(200 * time.Millisecond) // asynq does not wait for it, but its slot is taken
				return nil
			},
		}
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			id, _ := asynq.GetTaskID(ctx)
			if h := handlers[id]; h != nil {
				return h(ctx, task)
			}
			return s.ok(ctx, task)
		})
		for id := range handlers {
			s.enqueue(task("acme"), asynq.TaskID(id), asynq.MaxRetry(0), asynq.Timeout(time.Second))
			s.waitState(asynq.TaskStateArchived, id)
			s.enqueue(task("acme"), asynq.TaskID("after "+id))
			s.waitGone("after " + id)
		}
		slow.Wait()
	})
}

// A handler whose lease cannot be renewed is stopped before its slot can be granted to another.
func TestAHandlerIsStoppedBeforeItsLeaseIsLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t)
		var line cable
		limits := miniredis.NewMiniRedis()
		limits.ClockTTL(true)
		t.Cleanup(limits.Close)
		client := redis.NewClient(line.options(pipe(limits)))
		t.Cleanup(func() { client.Close() })
		var err error
		if s.limiter, err = throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{atOnce(1)}}); err != nil {
			t.Fatal(err)
		}
		var told atomic.Int64
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			if told.Load() > 0 {
				return s.ok(ctx, task)
			}
			line.cut()
			begun := time.Now()
			<-ctx.Done()
			if cause := context.Cause(ctx); cause != throttle.ErrLeaseLost {
				t.Errorf("the handler's context ended by %v", cause)
			}
			if after := time.Since(begun); after < 20*time.Second || after >= 30*time.Second {
				t.Errorf("told after %v, with a lease of 30s", after)
			}
			told.Add(1)
			line.mend()
			return ctx.Err()
		}, calm)
		s.enqueue(task("acme"), asynq.TaskID("t"), asynq.MaxRetry(0), asynq.Timeout(time.Hour))
		time.Sleep(3 * time.Minute)
		if got := s.runs(); !slices.Equal(got, []string{"t"}) {
			t.Errorf("ran: %q", got)
		}
		s.wantCounters(counters{Processed: 1})
	})
}

// What was given back is not renewed, and its handler goes on.
func TestCancelEndsTheLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, atOnce(1))
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			if err := worker.FromContext(ctx).Cancel(ctx); err != nil {
				t.Error(err)
			}
			time.Sleep(2 * time.Minute)
			if ctx.Err() != nil {
				t.Errorf("the handler's context ended by %v", context.Cause(ctx))
			}
			return s.ok(ctx, task)
		}, calm)
		s.enqueue(task("acme"), asynq.TaskID("t"), asynq.Timeout(time.Hour))
		time.Sleep(3 * time.Minute)
		if got := s.runs(); len(got) != 1 {
			t.Errorf("ran: %q", got)
		}
	})
}

// A lease that is made shorter is renewed as often as it has to be.
func TestAShorterLeaseIsRenewedMoreOften(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, atOnce(1))
		var g gauge
		s.serve(g.handler(func(ctx context.Context, task *asynq.Task) error {
			time.Sleep(2 * time.Minute)
			return s.ok(ctx, task)
		}), calm)
		s.enqueue(task("acme"), asynq.TaskID("a"), asynq.Timeout(time.Hour))
		s.enqueue(task("acme"), asynq.TaskID("b"), asynq.Timeout(time.Hour))
		time.Sleep(5 * time.Second)
		p := atOnce(1)
		p.Windows[0].Lease = 2 * time.Second
		if err := s.limiter.SetPolicies([]throttle.Policy{p}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(6 * time.Minute)
		if most := g.most.Load(); most != 1 {
			t.Errorf("%d ran at once", most)
		}
		if got := s.runs(); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("ran: %q", got)
		}
	})
}

// A stall holds up the renewals of leases: calls do not end, even if their contexts do.
type stall struct{ stalled atomic.Bool }

func (st *stall) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if st.stalled.Load() && slices.Contains(cmd.Args(), any("renew")) {
		time.Sleep(12 * time.Second) // four attempts of three seconds
		cmd.SetErr(context.DeadlineExceeded)
		return cmd.Err()
	}
	return next(ctx, cmd)
}

func TestAHandlerIsStoppedThoughRenewalsHang(t *testing.T) {
	t.Parallel()
	for _, lease := range []time.Duration{time.Second, 5 * time.Second, 30 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			s := synctestSite(t)
			limits := miniredis.NewMiniRedis()
			limits.ClockTTL(true)
			t.Cleanup(limits.Close)
			client := redis.NewClient(pipe(limits))
			t.Cleanup(func() { client.Close() })
			st := &stall{}
			client.AddHook(hooktest.Hook(st.see))
			p := atOnce(1)
			p.Windows[0].Lease = lease
			var err error
			if s.limiter, err = throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}}); err != nil {
				t.Fatal(err)
			}
			var told atomic.Bool
			s.serve(func(ctx context.Context, task *asynq.Task) error {
				if told.Load() {
					return s.ok(ctx, task)
				}
				st.stalled.Store(true)
				begun := time.Now()
				<-ctx.Done()
				if cause := context.Cause(ctx); cause != throttle.ErrLeaseLost {
					t.Errorf("the handler's context ended by %v", cause)
				}
				if after := time.Since(begun); after < lease*6/10 || after >= lease {
					t.Errorf("told after %v, with a lease of %v", after, lease)
				}
				told.Store(true)
				st.stalled.Store(false)
				return ctx.Err()
			}, calm)
			s.enqueue(task("acme"), asynq.TaskID("t"), asynq.MaxRetry(0), asynq.Timeout(time.Hour))
			time.Sleep(5 * time.Minute)
			if got := s.runs(); !slices.Equal(got, []string{"t"}) {
				t.Errorf("ran: %q", got)
			}
		})
	}
}
