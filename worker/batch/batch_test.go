package batch_test

import (
	"context"
	"errors"
	"iter"
	"maps"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Three schedulers run a batch that fires every minute. At random one is killed, twenty times, and
// another one comes. No tick is left out, none fires twice, and every task runs once.
func TestATickFiresOnce(t *testing.T) {
	inBubble(t, many(), func(t *testing.T, s *batchSite) {
		b := batch.Batch{Name: "minutely", Schedule: "* * * * *", Tasks: calls(4), Tenants: batch.List("acme", "zeta")}
		s.serve(succeed)
		random := rand.New(rand.NewPCG(1, 2))
		schedulers := []*schedulerProcess{s.scheduler(b), s.scheduler(b), s.scheduler(b)}
		time.Sleep(time.Second) // they know the batch
		begun := time.Now()
		for range 10 {
			time.Sleep(time.Duration(random.Int64N(int64(20 * time.Second))))
			if random.IntN(2) == 0 { // at a tick, while its tasks are enqueued
				tick := time.Now().Truncate(time.Minute).Add(time.Minute)
				time.Sleep(time.Until(tick) + time.Duration(random.IntN(3000))*time.Microsecond)
			}
			i := random.IntN(3)
			schedulers[i].kill()
			schedulers[i] = s.scheduler(b)
		}
		time.Sleep(2*time.Minute - time.Duration(time.Now().Second())*time.Second + 30*time.Second)
		ticks := 0
		for tick := begun.Truncate(time.Minute).Add(time.Minute); !tick.After(time.Now()); tick = tick.Add(time.Minute) {
			ticks++
		}
		firings, err := schedulers[0].Firings(context.Background(), "minutely", 100)
		expect.That(t, err == nil && len(firings) == ticks, len(firings), "firings of", ticks, "ticks:", firings, err)
		s.WantOnceEach(s, 8*ticks)
		for _, f := range firings {
			status, err := schedulers[0].Status(context.Background(), f)
			expect.That(t, err == nil && status.State == batch.StateDone && status.Done == 8 && status.Total == 8, status, err)
		}
	})
}

// A batch is killed five times while it is enqueued, and has every task once, also those that have run by then.
func TestABatchThatIsKilledWhileItIsEnqueuedGoesOn(t *testing.T) {
	s := &batchSite{Site: sitetest.OnRedis(t, api(many()...)), slots: 50} // a miniredis takes seconds for so many tasks
	b := batch.Batch{Name: "large", Tasks: calls(500), Tenants: batch.List("a", "b", "c", "d")}
	s.serve(succeed)
	watch := s.idle(b)
	defer watch.Close()
	f := s.fire(watch, "large")
	for range 5 {
		p := s.mortal(300*time.Millisecond, b)
		time.Sleep(350*time.Millisecond + rand.N(100*time.Millisecond))
		p.kill()
	}
	s.scheduler(b)
	status := s.wait(watch, f, "it is done", func(st batch.Status) bool { return st.State == batch.StateDone })
	expect.That(s, status.Done == 2000 && status.Total == 2000, status)
	s.WantOnceEach(s, 2000)
}

// A batch's tasks let live ones go first, unless their identity has a class.
func TestATaskOfABatchMayBeLive(t *testing.T) {
	inBubble(t, many(), func(t *testing.T, s *batchSite) {
		live := func(_ context.Context, _ batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
			task := worker.NewTask(worker.Identity{Class: throttle.ClassLive, Tenant: tenant}, "call", nil)
			return maps.All(map[*asynq.Task]error{task: nil})
		}
		ran := make(chan throttle.Class, 1)
		s.serve(func(ctx context.Context, _ *asynq.Task) error {
			d, _ := worker.FromContext(ctx).Decision()
			ran <- d.Reservation.Class
			return nil
		})
		s.fire(s.scheduler(batch.Batch{Name: "b", Tasks: live, Tenants: batch.List("acme")}), "b")
		expect.Equal(t, <-ran, "") // live
	})
}

// Failed, retried, refused, deleted and repeated tasks are each counted once.
func TestStatusCountsEachTaskOnce(t *testing.T) {
	inBubble(t, many(), func(t *testing.T, s *batchSite) {
		tasks := batch.Template{Type: "call", Count: 10, Payload: `{{if eq (slice .Tick 4 5) "-"}}{{.Number}}{{end}}`}
		template := expect.Got(tasks.Tasks())(s)
		b := batch.Batch{
			Name: "b", Ended: "batch:ended", Options: []asynq.Option{asynq.MaxRetry(1)},
			Tasks: template, Tenants: batch.List("acme", ""),
		}
		failed := map[string]int{}
		var told []string
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			if task.Type() == "batch:ended" {
				told = append(told, string(task.Payload()))
				return errors.New("told, and fails: it is retried")
			}
			id, err := worker.IdentityOf(task)
			expect.That(t, err == nil && id.Class == throttle.ClassBatch, "a task of class", id.Class, err)
			s.Mu.Lock()
			defer s.Mu.Unlock()
			failed[string(task.Payload())]++
			switch n := failed[string(task.Payload())]; string(task.Payload()) {
			case "3": // fails once
				if n == 1 {
					return errors.New("once")
				}
			case "4": // fails for good
				return errors.New("always")
			case "5": // runs for long
				s.Mu.Unlock()
				time.Sleep(time.Minute)
				s.Mu.Lock()
			}
			return nil
		})
		p := s.scheduler(b)
		f := s.fire(p, "b")
		time.Sleep(30 * time.Second)
		status := s.status(p, f)
		want := batch.Status{
			Batch: "b", Queue: "default", State: batch.StateRunning, Tick: f.Tick,
			Total: 20, Running: 1, Done: 8, Failed: 1, Rejected: 10,
			BegunAt: status.BegunAt, Planned: status.Planned, Finish: status.Finish,
			Reason: `worker: task type "call": no tenant, and policy "api" matches it: ` +
				`make the task with worker.NewTask, or set Config.Identify`,
		}
		expect.That(t, status == want, "got", status, "want", want)
		p.kill() // as if it had not yet written how far it is
		expect.Must(s, s.Redis.HSet(t.Context(), "asynq:{default}:sluice:batch:b:"+f.Tick.Format("20060102T150405Z"),
			"phase", "enqueue", "index", 0, "tenant", 0, "offset", 0).Err())
		want.State, p = batch.StateEnqueuing, s.scheduler(b)
		expect.Equal(t, s.status(p, f), want)
		time.Sleep(time.Minute)
		status = s.status(p, f)
		expect.That(t, status.State == batch.StateDone && status.Done == 9 && !status.EndedAt.IsZero(), status)
		if len(told) < 1 || len(told) > 1+25 || told[0] == "" { // asynq's default is 25 retries
			t.Errorf("told %v", told)
		}
		archived := expect.Got(s.Inspector.ListArchivedTasks("default"))(s)
		for _, task := range archived {
			expect.Must(s, s.Inspector.RunTask("default", task.ID)) // it fails again, and is counted already
		}
		time.Sleep(10 * time.Second)
		status = s.status(p, f)
		expect.That(t, status.Failed == 1 && status.Done == 9, status)
	})
}

// What waits does not start while a firing is paused, also what comes back. Then it goes on.
func TestAFiringIsPausedResumedAndCancelled(t *testing.T) {
	windows := []throttle.Window{{Name: "pace", Limit: 10, Period: 10 * time.Second, Shared: true}}
	inBubble(t, windows, func(t *testing.T, s *batchSite) {
		b := batch.Batch{Name: "b", Tasks: calls(50), Tenants: batch.List("acme", "zeta")}
		s.serve(func(context.Context, *asynq.Task) error {
			if rand.IntN(4) == 0 {
				time.Sleep(3 * time.Second)
				return errors.New("is retried, or archived")
			}
			return nil
		})
		p := s.scheduler(b)
		f := s.fire(p, "b")
		ran := func() int { return len(s.Starts()) }
		status := func() batch.Status { return s.status(p, f) }
		time.Sleep(22500 * time.Millisecond)
		expect.Must(s, p.Pause(t.Context(), f))
		expect.Must(s, p.Resume(t.Context(), f))
		tenants := expect.Got(p.Tenants(t.Context(), f))(t)
		expect.That(t, status().Finish.IsZero() && tenants[0].Finish.IsZero(), "an end that was expected before a pause:", status(), tenants)
		time.Sleep(2500 * time.Millisecond)
		expect.That(t, !status().Finish.IsZero(), "nobody looks again", status())
		expect.Must(s, p.Pause(t.Context(), f))
		time.Sleep(10 * time.Second)
		ranByPause := ran() // ten in each of three windows, of which the last may be cut off
		time.Sleep(40 * time.Second)
		expect.That(t, ranByPause >= 2*10 && ranByPause <= 3*10, ranByPause, "ran in 25 s")
		st := status()
		expect.That(t, ran() == ranByPause && st.State == batch.StatePaused && st.Waiting == 100-st.Done-st.Failed && st.Running == 0 &&
			st.Finish.IsZero(), st, ran(), ranByPause)
		scheduled, err := s.Inspector.ListScheduledTasks("default", asynq.PageSize(1000))
		expect.That(t, err == nil && len(scheduled) == status().Waiting, len(scheduled), "tasks are scheduled", err)
		why := expect.Got(s.Client(s.Limiter).Explain(t.Context(), "default", scheduled[0].ID))(t).Why
		expect.That(t, why == "its batch has set it aside: the firing is paused, stopped or outside its hours", why)
		expect.Must(s, p.Resume(t.Context(), f))
		time.Sleep(30 * time.Second)
		expect.That(t, ran() >= ranByPause+2*10 && status().State == batch.StateRunning, "resumed", ran(), ranByPause)
		expect.Must(s, p.Cancel(t.Context(), f))
		ranByCancel := ran()
		time.Sleep(20 * time.Second)
		st = status()
		expect.That(t, st.State == batch.StateCancelled && st.Finish.IsZero() && st.Total == 100 && st.Cancelled > 0 && st.Done+st.Failed+st.Cancelled == 100, st)
		time.Sleep(40 * time.Second)
		expect.That(t, ran() == ranByCancel, ran()-ranByCancel, "tasks ran after the cancel")
		expect.Err(t, p.Resume(t.Context(), f), batch.ErrNoFiring)
		newcomer, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		expect.That(t, err == nil && newcomer.RetryIn == 0, "after the cancel a newcomer waits:", newcomer, err)
	})
}

// Nothing starts after Pause has returned, even without a scheduler, nor outside of the hours. A brief pause ends at
// once.
func TestNothingStartsAfterAPauseOrTheHours(t *testing.T) {
	windows := []throttle.Window{{Name: "pace", Limit: 3, Period: time.Second, Shared: true}}
	inBubble(t, windows, func(t *testing.T, s *batchSite) {
		hours := batch.Hours{From: "00:01", To: "00:02"}
		b := batch.Batch{Name: "b", Hours: hours, Tasks: calls(100), Tenants: batch.List("acme", "zeta")}
		var start atomic.Int64
		var asked atomic.Int64 // how often, plus 1, servers asked a slow limiter; 0: it is quick
		s.Redis.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			switch n := asked.Load(); {
			case n > 0 && sitetest.WithArg("reserve")(cmd.Args()): // just in time
				time.Sleep(1900 * time.Millisecond)
			case n > 0: // the first take is so late that its tasks reserve again, the others are in vain
				asked.Add(1)
				time.Sleep(time.Duration(min(n, 2)) * 150 * time.Millisecond)
			}
			return next(ctx, cmd)
		}))
		time.Sleep(58 * time.Second)
		s.serve(func(ctx context.Context, _ *asynq.Task) error {
			start.Store(time.Now().UnixNano())
			return work(ctx, 150*time.Millisecond)
		})
		p := s.scheduler(b)
		time.Sleep(1900 * time.Millisecond)
		f := s.fire(p, "b")
		expect.Must(s, p.Pause(t.Context(), f))
		expect.Must(s, p.Resume(t.Context(), f))
		expect.Equal(t, s.status(p, f).State, batch.StateWaiting, "before the hours")
		last := func() time.Time { return time.Unix(0, start.Load()) } // when the last task started
		until := func(after time.Duration) time.Time {
			at := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).Add(after)
			time.Sleep(time.Until(at))
			return at
		}
		until(64 * time.Second)
		expect.Must(s, p.Pause(t.Context(), f))
		expect.Must(s, p.Resume(t.Context(), f))
		until(68 * time.Second)
		expect.That(t, time.Since(last()) <= time.Second, "after a pause for a moment the last task started", last())
		asked.Store(1)
		until(68*time.Second + 500*time.Millisecond)
		expect.Must(s, p.Pause(t.Context(), f))
		paused := time.Now()
		until(80 * time.Second)
		expect.That(t, !last().After(paused), last().Sub(paused), "after the pause a task started")
		expect.That(t, last().After(paused.Add(-2*time.Second)), last().Sub(paused), "after the pause the last task started")
		asked.Store(0)
		expect.Must(s, p.Resume(t.Context(), f))
		until(90 * time.Second)
		expect.That(t, time.Since(last()) <= time.Second, "after the pause the last task started", last())
		until(110 * time.Second)
		p.kill() // the hours bind all the same
		ends := until(2 * time.Minute)
		expect.That(t, ends.Sub(last()) <= 4*time.Second, ends.Sub(last()), "before the hours end the last task started")
		until(135 * time.Second)
		expect.That(t, !last().After(ends), last().Sub(ends), "after the hours a task started")
	})
}

// A firing that is cancelled while a chunk of it is on its way ends, too.
func TestACancelEndsAChunkOnItsWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := fake(t, many()...)
		b := batch.Batch{Name: "b", Tasks: slow(calls(300)), Tenants: batch.List("acme")}
		watch := s.idle(b)
		defer watch.Close()
		f := s.fire(watch, "b")
		p := s.scheduler(b)
		time.Sleep(450 * time.Millisecond) // it has planned for 300 ms
		expect.Must(s, p.Cancel(t.Context(), f))
		time.Sleep(10 * time.Second)
		status := s.status(p, f)
		expect.That(t, status.State == batch.StateCancelled && status.Total == 300 && status.Cancelled == 300, status)
	})
}

// Outside of its hours no task of a batch starts. What is left goes on the next day.
func TestABatchKeepsItsHours(t *testing.T) {
	windows := []throttle.Window{{Name: "pace", Limit: 10, Period: 2 * time.Minute}}
	inBubble(t, windows, func(t *testing.T, s *batchSite) {
		hours := batch.Hours{From: "00:02", To: "00:05"} // ten tasks start at 00:02, and ten at 00:04
		days := batch.Batch{Name: "days", Schedule: "1 0 1 * *", Hours: hours, Tasks: calls(30), Tenants: batch.List("acme")}
		p := s.scheduler(days)
		at := func(after time.Duration, name string) batch.Status {
			time.Sleep(time.Until(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).Add(after)))
			f := expect.Got(p.Firings(t.Context(), name, 1))(s)
			return s.status(p, f[0])
		}
		st := at(90*time.Second, "days")
		expect.That(t, st.State == batch.StateWaiting && st.Total == 0, "before its hours:", st)
		server := s.serve(succeed)
		st = at(270*time.Second, "days")
		expect.That(t, st.State == batch.StateRunning && st.Done == 20, "in its hours:", st)
		st = at(330*time.Second, "days")
		expect.That(t, st.State == batch.StatePaused && st.Done == 20 && st.Waiting == 10, "after them:", st)
		p.kill() // a day of idling takes a test minutes
		server.Shutdown()
		time.Sleep(23*time.Hour + 55*time.Minute)
		p = s.scheduler(days)
		s.serve(succeed)
		st = at(24*time.Hour+90*time.Second, "days")
		expect.That(t, st.State == batch.StatePaused && st.Done == 20, "on the next day, before its hours:", st)
		st = at(24*time.Hour+150*time.Second, "days")
		expect.That(t, st.State == batch.StateDone && st.Done == 30, "on the next day:", st)
	})
}

// Without an answer by the limiter's Redis a chunk waits: its tasks, if pending, would take slots in vain.
func TestABatchWaitsForTheLimiter(t *testing.T) {
	windows := []throttle.Window{{Name: "own", Limit: 10, Period: time.Second}}
	inBubble(t, windows, func(t *testing.T, s *batchSite) {
		b := batch.Batch{Name: "b", Tasks: slow(calls(600)), Tenants: batch.List("acme")}
		watch := s.idle(b)
		defer watch.Close()
		f := s.fire(watch, "b")
		p := s.scheduler(b)
		time.Sleep(900 * time.Millisecond) // it has planned for 600 ms
		stopped := time.Now().Truncate(time.Second)
		p.deaf.Store(true)
		time.Sleep(5 * time.Second)
		info := expect.Got(s.Inspector.GetQueueInfo("default"))(s)
		status, err := p.Status(t.Context(), f)
		if err != nil || info.Pending != 0 || info.Scheduled != 500 || status.State != batch.StateEnqueuing || status.DelayedBy == "" ||
			status.DelayedSince.Before(stopped) || status.DelayedSince.After(stopped.Add(2*time.Second)) {
			t.Errorf("%d are pending, %d scheduled, %+v, %v", info.Pending, info.Scheduled, status, err)
		}
		p.deaf.Store(false)
		time.Sleep(time.Minute)
		status = s.status(p, f)
		expect.That(t, status.State == batch.StateRunning && status.Total == 600 && status.Rejected == 0 &&
			status.DelayedBy == "" && status.DelayedSince.IsZero(), status)
	})
}

// A Redis that stalls now and then costs no more than its stalls. Errors between good chunks do not add up either.
func TestStallsHoldNothingUpForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		took := func(name string, disturb func(p *schedulerProcess)) time.Duration {
			s := fake(t, many()...)
			b := batch.Batch{Name: name, Tasks: calls(250), Tenants: batch.List(tenants(10)...)}
			p := s.scheduler(b)
			p.latency.Store(int64(200 * time.Millisecond))
			f := s.fire(p, name)
			status := batch.Status{}
			begun := time.Now()
			for ; status.State != batch.StateRunning; time.Sleep(100 * time.Millisecond) {
				if disturb != nil {
					disturb(p)
				}
				var err error // Redis stalls
				status, err = p.Status(t.Context(), f)
				expect.Require(t, time.Since(begun) <= time.Hour, name, status, err)
			}
			defer p.kill()
			expect.That(t, status.Total == 2_500 && status.DelayedBy == "", name, status)
			return time.Since(begun)
		}
		calm := took("calm", nil)
		stalls := took("stalls", func(p *schedulerProcess) { p.stalls.Store(true) })
		expect.That(t, stalls <= calm*3/2, "with stalls it took", stalls, ", without", calm)
		errors := took("errors", func(p *schedulerProcess) {
			p.deaf.Store(time.Since(time.Now().Truncate(3*time.Second)) < 350*time.Millisecond)
		})
		expect.That(t, errors <= calm*2, "with errors it took", errors, ", without", calm)
		time.Sleep(time.Minute) // until calls in the background have ended
	})
}

// All that is kept of a firing has the slot of its queue, and no call reaches across.
func TestABatchRunsOnARedisCluster(t *testing.T) {
	t.Parallel()
	pace := throttle.Window{Name: "pace", Limit: 20, Period: 500 * time.Millisecond, Shared: true}
	s := &batchSite{Site: sitetest.New(t, throttletest.Client(t, sitetest.Cluster(t)), api(pace))}
	b := batch.Batch{Name: "b", FinishBy: "1h", Tasks: calls(60), Tenants: batch.List("acme", "zeta")}
	s.serve(succeed)
	p := s.scheduler(b)
	f := s.fire(p, "b")
	s.wait(p, f, "some are done", func(st batch.Status) bool { return st.Done > 10 })
	expect.Must(s, p.Pause(t.Context(), f))
	s.wait(p, f, "it is paused", func(st batch.Status) bool { return st.State == batch.StatePaused && st.Running == 0 })
	expect.Must(s, p.Resume(t.Context(), f))
	status := s.wait(p, f, "it is done", func(st batch.Status) bool { return st.State == batch.StateDone })
	expect.That(t, status.Done == 120 && !status.Planned.IsZero(), status)
	tenants, err := p.Tenants(t.Context(), f)
	expect.That(t, err == nil && len(tenants) == 2 && tenants[0].Done+tenants[1].Done == status.Done, tenants, err)
	s.WantOnceEach(s, 120)
	f = s.fire(p, "b")
	s.wait(p, f, "it is planned", func(st batch.Status) bool { return st.State != batch.StateWaiting })
	expect.Must(s, p.Cancel(t.Context(), f))
	s.wait(p, f, "it is cancelled", func(st batch.Status) bool { return st.State == batch.StateCancelled })
	firings, err := p.Firings(t.Context(), "b", 9)
	expect.That(t, err == nil && len(firings) == 2, firings, err)
}
