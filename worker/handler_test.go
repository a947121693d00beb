package worker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/hooktest"
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

func task(tenant string, cost ...map[string]int64) *asynq.Task {
	id := worker.Identity{Tenant: tenant}
	if len(cost) > 0 {
		id.Cost = cost[0]
	}
	return worker.NewTask(id, "x", nil)
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
			t.Errorf("%.2f wakes a task, %d at the most", mean, most)
		}
		s.wantCounters(counters{Processed: 40})
		s.wait("nothing is held", func() bool {
			d, err := s.limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
			return err == nil && d.Windows[0].Used == 0
		})
	})
}

// Ten minutes of work a task and 500 that wait: hours, by a made-up clock.
func TestLongHandlersWakeTwice(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := atOnce(50)
		p.Windows[0].Lease = 5 * time.Minute
		p.Windows = append(p.Windows, throttle.Window{Name: "rate", Limit: 40, Period: time.Minute})
		s := synctestSite(t, p)
		g, l := &gauge{}, newLedger()
		for i := range 500 {
			s.enqueue(task("acme"), asynq.TaskID(fmt.Sprint("t", i)), asynq.MaxRetry(0))
		}
		s.serve(g.handler(func(ctx context.Context, task *asynq.Task) error {
			time.Sleep(10 * time.Minute)
			return s.ok(ctx, task)
		}), l.watch, func(c *asynq.Config, _ *worker.Config) {
			c.Concurrency, c.DelayedTaskCheckInterval, c.TaskCheckInterval = 64, 5*time.Second, time.Second
		})
		time.Sleep(2*time.Hour + 30*time.Minute)
		if got := len(s.runs()); got != 500 {
			t.Errorf("%d of 500 have run", got)
		}
		if most := g.most.Load(); most != 50 {
			t.Errorf("%d ran at once, the limit is 50", most)
		}
		if mean, most := l.wakesPerTask(); mean > 2.2 || most > 4 {
			t.Errorf("%.2f wakes a task, %d at the most", mean, most)
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

// A handler whose lease cannot be renewed is told, before somebody else can get its room.
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

// A refusal by the far side pauses the policy everywhere, costs no retry, and nobody's place.
func TestRetryAfterPausesThePolicyAndCostsNothing(t *testing.T) {
	each(t, []throttle.Policy{policy(1000, time.Minute)}, func(t *testing.T, s *site) {
		var refuse atomic.Bool
		refuse.Store(true)
		handler := func(ctx context.Context, task *asynq.Task) error {
			if refuse.CompareAndSwap(true, false) {
				return fmt.Errorf("calling: %w", worker.RetryAfter(1500*time.Millisecond))
			}
			return s.ok(ctx, task)
		}
		one := func(c *asynq.Config, _ *worker.Config) { c.Concurrency = 1 }
		s.serve(handler, one)
		s.enqueue(task("acme"), asynq.TaskID("first"), asynq.MaxRetry(0))
		s.waitState(asynq.TaskStateScheduled, "first")
		if text := s.task("first").LastErr; !strings.Contains(text, "throttled: api") || !strings.Contains(text, "the upstream refuses calls for 1.5s") {
			t.Errorf("the task's last error is %q", text)
		}
		s.enqueue(task("acme"), asynq.TaskID("second"), asynq.MaxRetry(0))
		s.enqueue(task("other"), asynq.TaskID("third"), asynq.MaxRetry(0)) // its limit is its own
		s.waitGone("third", "first", "second")
		s.mu.Lock()
		ran := slices.Clone(s.ran)
		s.mu.Unlock()
		if !slices.Equal(ran, []string{"third", "first", "second"}) {
			t.Errorf("ran in the order %q", ran)
		}
		s.wantCounters(counters{Processed: 3})
		s.wantTold(nil, nil)
	})
}

// Who wants a refusal to burn a retry says so.
func TestAJobMayPauseItsPolicyAndFail(t *testing.T) {
	each(t, []throttle.Policy{policy(1000, time.Minute)}, func(t *testing.T, s *site) {
		s.serve(func(ctx context.Context, _ *asynq.Task) error {
			job := worker.FromContext(ctx)
			if err := errors.Join(job.Pause(ctx, time.Minute), job.Pause(ctx, time.Minute)); err != nil {
				t.Error(err)
			}
			return errors.New("429")
		})
		s.enqueue(task("acme"), asynq.TaskID("t"), asynq.MaxRetry(0))
		s.waitState(asynq.TaskStateArchived, "t")
		d, err := s.limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		if err != nil || d.Granted || d.RetryIn < 30*time.Second {
			t.Errorf("granted %v, denied for %v, %v", d.Granted, d.RetryIn, err)
		}
		if s.log.count(`msg="worker: the upstream refused a call: its policy pauses" policy=api tenant=acme for=1m0s`) != 1 {
			t.Errorf("want the pause logged once:\n%s", s.log)
		}
	})
}

func TestAJobSettlesAndCancels(t *testing.T) {
	p := policy(1500, time.Hour)
	p.Windows[0].Unit = "tokens"
	each(t, []throttle.Policy{p}, func(t *testing.T, s *site) {
		tokens := map[string]int64{"tokens": 1500}
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			id, _ := asynq.GetTaskID(ctx)
			var err error
			if strings.HasPrefix(id, "settle") {
				err = errors.Join(worker.FromContext(ctx).Settle(ctx, "tokens", 1200), worker.FromContext(ctx).Settle(ctx, "tokens", 0))
			} else {
				err = worker.FromContext(ctx).Cancel(ctx)
			}
			if err != nil {
				t.Error(err)
			}
			return s.ok(ctx, task)
		})
		ids := []string{"settle1", "cancel1", "settle2", "cancel2"} // one at a time in an hour's window
		for _, id := range ids {
			s.enqueue(task("acme", tokens), asynq.TaskID(id), asynq.MaxRetry(0))
		}
		s.waitGone(ids...)
	})
}

// Two policies in one task: the second is waited for in the handler, or in line.
func TestAJobReservesByASecondPolicy(t *testing.T) {
	github, slack := policy(1000, time.Minute), policy(1, 2*time.Second)
	slack.Name, slack.Match = "slack", nil
	each(t, []throttle.Policy{github, slack}, func(t *testing.T, s *site) {
		var inLine atomic.Int64
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			id, _ := asynq.GetTaskID(ctx)
			wait := 10 * time.Second
			if strings.HasPrefix(id, "line") {
				wait = 0
			}
			r, err := worker.FromContext(ctx).Reserve(ctx, worker.ReserveOptions{Request: throttle.Request{Policy: "slack"}, MaxWait: wait})
			var denied *throttle.DeniedError
			if errors.As(err, &denied) {
				inLine.Add(1)
				return errors.Join(err, worker.FromContext(ctx).Cancel(ctx))
			}
			if err != nil || r.Tenant != "acme" {
				t.Errorf("tenant %q, %v", r.Tenant, err)
			}
			return s.ok(ctx, task)
		})
		ids := []string{"wait1", "wait2", "line1", "line2"}
		for _, id := range ids {
			s.enqueue(task("acme"), asynq.TaskID(id), asynq.MaxRetry(0))
		}
		s.waitGone(ids...)
		if got := s.runs(); !slices.Equal(got, slices.Sorted(slices.Values(ids))) {
			t.Errorf("ran: %q", got)
		}
		if inLine.Load() == 0 {
			t.Error("nobody was requeued")
		}
		s.wantCounters(counters{Processed: 4})
		s.wantTold(nil, nil)
		d, err := s.limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		if err != nil || d.Windows[0].Used != 4 {
			t.Errorf("%d of the task's own policy are counted, %v", d.Windows[0].Used, err)
		}
	})
}

// What a call of the handler learnt and the handler did not mend requeues the task.
func TestARefusedCallRequeuesTheTask(t *testing.T) {
	each(t, []throttle.Policy{policy(1000, time.Minute)}, func(t *testing.T, s *site) {
		var calls atomic.Int64
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			job := throttle.JobFrom(ctx)
			if calls.Add(1) == 1 {
				job.Refused("api", time.Second)
				return errors.New("429")
			}
			job.Refused("api", time.Hour)
			job.Answered() // and tried again, with success
			return s.ok(ctx, task)
		})
		s.enqueue(task("acme"), asynq.TaskID("t"), asynq.MaxRetry(0))
		s.waitGone("t")
		s.wantCounters(counters{Processed: 1})
		s.wantTold(nil, nil)
	})
}

// A handler whose own reserve finds no Redis is requeued like a task that the middleware could not
// decide.
func TestAJobThatFindsNoRedisIsRequeued(t *testing.T) {
	each(t, []throttle.Policy{policy(1000, time.Minute)}, func(t *testing.T, s *site) {
		var calls atomic.Int64
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			if calls.Add(1) == 1 {
				return fmt.Errorf("calling: %w", throttle.ErrUnavailable)
			}
			return s.ok(ctx, task)
		})
		s.enqueue(task("acme"), asynq.TaskID("t"), asynq.MaxRetry(0))
		s.waitGone("t")
		s.wantCounters(counters{Processed: 1})
		s.wantTold(nil, nil)
	})
}

// The user's own last word stands.
func TestSkipRetryIsTheLastWord(t *testing.T) {
	each(t, []throttle.Policy{policy(1000, time.Minute)}, func(t *testing.T, s *site) {
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			return errors.Join(worker.RetryAfter(time.Minute), asynq.SkipRetry)
		})
		s.enqueue(task("acme"), asynq.TaskID("t"), asynq.MaxRetry(5))
		s.waitState(asynq.TaskStateArchived, "t")
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

// A stall holds up the renewals of leases: calls do not end, whatever their contexts say.
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

// A lateAnswer keeps the answers of reserves back.
type lateAnswer struct {
	on   atomic.Bool
	till chan struct{}
}

func (la *lateAnswer) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	if la.on.Load() && slices.Contains(cmd.Args(), any("reserve")) {
		<-la.till
	}
	return err
}

// What a goroutine that a handler has left behind reserves is given back too.
func TestAReservationAfterTheHandlerIsReleased(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t)
		limits := miniredis.NewMiniRedis()
		limits.ClockTTL(true)
		t.Cleanup(limits.Close)
		client := redis.NewClient(pipe(limits))
		t.Cleanup(func() { client.Close() })
		la := &lateAnswer{till: make(chan struct{})}
		client.AddHook(hooktest.Hook(la.see))
		second := atOnce(1)
		second.Name, second.Match = "second", nil
		var err error
		if s.limiter, err = throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{policy(100, time.Minute), second}}); err != nil {
			t.Fatal(err)
		}
		warm, err := s.limiter.Reserve(t.Context(), throttle.Request{Policy: "second", Tenant: "acme"})
		if err != nil {
			t.Fatal(err)
		}
		if err := warm.Reservation.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		left := make(chan error, 1)
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			la.on.Store(true)
			go func() {
				_, err := worker.FromContext(ctx).Reserve(ctx, worker.ReserveOptions{Request: throttle.Request{Policy: "second"}})
				left <- err
			}()
			time.Sleep(time.Second)
			return s.ok(ctx, task)
		}, calm)
		s.enqueue(task("acme"), asynq.TaskID("t"))
		time.Sleep(10 * time.Second)
		la.on.Store(false)
		close(la.till)
		if err := <-left; err == nil {
			t.Error("reserved after the handler had returned")
		}
		time.Sleep(5 * time.Minute)
		d, err := s.limiter.Peek(t.Context(), throttle.Request{Policy: "second", Tenant: "acme"})
		if err != nil || d.Windows[0].Used != 0 {
			t.Errorf("%d are held, %v", d.Windows[0].Used, err)
		}
	})
}

// A refusal is passed on also if the task's time has run out.
func TestRetryAfterPausesThoughTheTasksTimeIsOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(1000, time.Minute))
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			<-ctx.Done()
			return worker.RetryAfter(time.Hour)
		}, calm)
		s.enqueue(task("acme"), asynq.TaskID("t"), asynq.Timeout(5*time.Second), asynq.MaxRetry(0))
		time.Sleep(time.Minute)
		d, err := s.limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		if err != nil || d.Granted {
			t.Errorf("granted %v, %v", d.Granted, err)
		}
	})
}

// A handler that waits in line comes when it is called, before the time that it was promised.
func TestAWaitingJobReservesAsSoonAsItFits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slack := policy(1, time.Minute)
		slack.Name, slack.Match = "slack", nil
		s := synctestSite(t, policy(1000, time.Minute), slack)
		var waited time.Duration
		taken, err := s.limiter.Reserve(t.Context(), throttle.Request{Policy: "slack", Tenant: "acme"})
		if err != nil {
			t.Fatal(err)
		}
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			begun := time.Now()
			if _, err := worker.FromContext(ctx).Reserve(ctx, worker.ReserveOptions{Request: throttle.Request{Policy: "slack"}, MaxWait: 5 * time.Minute}); err != nil {
				t.Error(err)
			}
			waited = time.Since(begun)
			return s.ok(ctx, task)
		}, calm)
		s.enqueue(task("acme"), asynq.TaskID("t"))
		time.Sleep(10 * time.Second)
		if _, err := taken.Reservation.Cancel(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		if waited > 12*time.Second || waited == 0 {
			t.Errorf("waited %v", waited)
		}
	})
}

// A handler whose own reserve is denied stands in no other policy's line: its task waits for as
// long as the denial told, and then in the line of its own policy, at the front.
func TestADeniedJobWaitsInItsOwnLineOnly(t *testing.T) {
	for name, change := range map[string]func(*throttle.Policy){
		"when it fits":   func(*throttle.Policy) {},
		"earliest reset": func(p *throttle.Policy) { p.Requeue = throttle.RequeueEarliestReset },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				own := policy(1, 15*time.Minute)
				change(&own)
				slack := policy(4, 10*time.Minute)
				slack.Name, slack.Match = "slack", nil
				s := synctestSite(t, own, slack)
				bot := throttle.Request{Policy: "slack", Tenant: "bot", Cost: map[string]int64{"requests": 3}}
				if _, err := s.limiter.Reserve(t.Context(), bot); err != nil {
					t.Fatal(err)
				}
				s.serve(func(ctx context.Context, task *asynq.Task) error {
					if id, _ := asynq.GetTaskID(ctx); id == "t" {
						if _, err := worker.FromContext(ctx).Reserve(ctx, worker.ReserveOptions{Request: bot}); err != nil {
							return err
						}
					}
					return s.ok(ctx, task)
				}, calm)
				s.enqueue(task("acme"), asynq.TaskID("t"), asynq.MaxRetry(0))
				time.Sleep(time.Minute)
				s.wantNobodyInLine()
				if info := s.task("t"); info.State != asynq.TaskStateScheduled || (time.Until(info.NextProcessAt)-9*time.Minute).Abs() > 2*time.Second {
					t.Errorf("it is %v, next in %v", info.State, time.Until(info.NextProcessAt))
				}
				s.enqueue(task("acme"), asynq.TaskID("later"))
				time.Sleep(10 * time.Minute)
				if got := s.inLine(); name == "when it fits" && !slices.Equal(got, []string{"default/later", "default/t"}) {
					t.Errorf("in line: %q", got)
				}
				time.Sleep(5 * time.Minute)
				if got := s.runs(); name == "when it fits" && !slices.Equal(got, []string{"t"}) {
					t.Errorf("ran: %q", got)
				}
				time.Sleep(16 * time.Minute)
				if got := s.runs(); !slices.Equal(got, []string{"later", "t"}) {
					t.Errorf("ran: %q", got)
				}
				s.wantCounters(counters{Processed: 2})
			})
		})
	}
}
