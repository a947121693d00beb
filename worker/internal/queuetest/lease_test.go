package queuetest

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

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Minutes of work a task, longer than its lease, and four times as many tasks as slots, by a made-up
// clock.
func TestLongHandlersWakeTwice(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const slots, tasks = 20, 80
		p := sitetest.AtOnce(slots)
		p.Windows[0].Lease = 75 * time.Second
		p.Windows = append(p.Windows, throttle.Window{Name: "rate", Limit: slots - 4, Period: 15 * time.Second})
		s := sitetest.NewInBubble(t, p)
		g, l := &sitetest.Gauge{}, sitetest.NewLedger()
		for i := range tasks {
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(fmt.Sprint("t", i)), asynq.MaxRetry(0))
		}
		s.Serve(g.Handler(func(ctx context.Context, task *asynq.Task) error {
			time.Sleep(100 * time.Second)
			return s.Ok(ctx, task)
		}), l.Watch, func(c *asynq.Config, _ *worker.Config) {
			c.Concurrency, c.DelayedTaskCheckInterval, c.TaskCheckInterval = slots+6, 5*time.Second, time.Second
		})
		time.Sleep(10 * time.Minute)
		if got := len(s.Runs()); got != tasks {
			t.Errorf("%d of %d have run", got, tasks)
		}
		if most := g.Most.Load(); most != slots {
			t.Errorf("%d ran at once, the limit is %d", most, slots)
		}
		s.WantWakes(l, sitetest.DeniedAndRun)
	})
}

// However an attempt ends, what it held is given back, once.
func TestLeasesEndWithTheAttempt(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{sitetest.AtOnce(1)}, func(t *testing.T, s *sitetest.Site) {
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
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			id, _ := asynq.GetTaskID(ctx)
			if h := handlers[id]; h != nil {
				return h(ctx, task)
			}
			return s.Ok(ctx, task)
		})
		for id := range handlers {
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(id), asynq.MaxRetry(0), asynq.Timeout(time.Second))
			s.WaitState(asynq.TaskStateArchived, id)
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("after "+id))
			s.WaitGone("after " + id)
		}
		slow.Wait()
	})
}

// A lease that is made shorter is renewed as often as it has to be.
func TestAShorterLeaseIsRenewedMoreOften(t *testing.T) {
	sitetest.Bubble(t, sitetest.AtOnce(1), func(t *testing.T, s *sitetest.Site) {
		var g sitetest.Gauge
		s.Serve(g.Handler(func(ctx context.Context, task *asynq.Task) error {
			time.Sleep(40 * time.Second)
			return s.Ok(ctx, task)
		}), sitetest.Calm)
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.Timeout(time.Hour))
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("b"), asynq.Timeout(time.Hour))
		time.Sleep(5 * time.Second)
		p := sitetest.AtOnce(1)
		p.Windows[0].Lease = 2 * time.Second
		sitetest.Must(t, s.Limiter.SetPolicies([]throttle.Policy{p}))
		time.Sleep(2 * time.Minute)
		if most := g.Most.Load(); most != 1 {
			t.Errorf("%d ran at once", most)
		}
		if got := s.Runs(); !slices.Equal(got, []string{"a", "b"}) {
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

// A handler whose lease cannot be renewed is stopped before its slot can be granted to another: when
// the connection is cut, and when renewals hang.
func TestAHandlerIsStoppedBeforeItsLeaseIsLost(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		lease time.Duration
		hangs bool
	}{{throttle.DefaultLease, false}, {time.Second, true}, {5 * time.Second, true}, {30 * time.Second, true}} {
		synctest.Test(t, func(t *testing.T) {
			p := sitetest.AtOnce(1)
			p.Windows[0].Lease = row.lease
			s := sitetest.NewInBubble(t, p)
			var c sitetest.Cable
			var st stall
			s.Limiter = s.LimiterThrough(&c, hooktest.Hook(st.see))
			var told atomic.Bool
			s.Serve(func(ctx context.Context, task *asynq.Task) error {
				if told.Load() {
					return s.Ok(ctx, task)
				}
				if st.stalled.Store(row.hangs); !row.hangs {
					c.Cut()
				}
				begun := time.Now()
				<-ctx.Done()
				if cause := context.Cause(ctx); cause != throttle.ErrLeaseLost {
					t.Errorf("the handler's context ended by %v", cause)
				}
				if after := time.Since(begun); after != sitetest.StoppedAfter(row.lease) {
					t.Errorf("told after %v, with a lease of %v", after, row.lease)
				}
				told.Store(true)
				st.stalled.Store(false)
				c.Mend()
				return ctx.Err()
			}, sitetest.Calm)
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0), asynq.Timeout(time.Hour))
			time.Sleep(3 * time.Minute)
			if got := s.Runs(); !slices.Equal(got, []string{"t"}) {
				t.Errorf("ran: %q", got)
			}
			s.WantCounters(sitetest.Counters{Processed: 1})
		})
	}
}
