package queuetest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// The limiter's Redis takes commands for 30 s and answers none. Tasks that no policy guards run as
// before. Beside them guarded tasks wait in line, and are pending.
func TestSceneLimiterHangsAndPlainTasksRun(t *testing.T) {
	t.Parallel()
	for _, fail := range []throttle.FailMode{throttle.FailClosed, throttle.FailOpen} {
		t.Run(fmt.Sprintf("fail: %s", fail), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const guarded, plain, waiting = 100, 50, 50
				p := sitetest.Shared(10, time.Second)
				p.Match, p.Fail = []string{"x"}, fail
				s := sitetest.NewInBubble(t, append(idle(30), p)...)
				var proxy sitetest.Proxy
				s.Limiter = s.LimiterThrough(&proxy)
				var mu sync.Mutex
				started := map[string]time.Time{}
				s.Serve(func(_ context.Context, task *asynq.Task) error {
					mu.Lock()
					defer mu.Unlock()
					started[string(task.Payload())] = time.Now()
					return nil
				}, sitetest.Calm)
				s.JoinMany(s.Client(s.AnotherLimiter()), "acme", 0, waiting)
				// run is the slowest of the plain tasks, ten a second.
				run := func(name string) (slowest time.Duration) {
					enqueued := map[string]time.Time{}
					for i := range plain {
						enqueued[fmt.Sprint(name, i)] = time.Now()
						s.Enqueue(asynq.NewTask("plain", fmt.Append(nil, name, i)))
						time.Sleep(100 * time.Millisecond)
					}
					time.Sleep(10 * time.Second)
					mu.Lock()
					defer mu.Unlock()
					for name, at := range enqueued {
						expect.Require(t, !started[name].IsZero(), name, "has not run")
						slowest = max(slowest, started[name].Sub(at))
					}
					return slowest
				}
				before := run("before")
				goesOn := proxy.Hang(30 * time.Second)
				s.EnqueueMany("beta", 0, guarded)
				during := run("during")
				synctest.Wait() // a task counts only after its handler has returned
				if n := s.Counters().Processed; fail == throttle.FailOpen && n < 2*plain+guarded {
					t.Errorf("%d of %d that need not wait have run", n, 2*plain+guarded)
				}
				t.Logf("the slowest plain task started after %v before, %v while the limiter hung", before, during)
				// The first guarded tasks wait for the limiter for 2 s in their slots. Meanwhile it is asked
				// four times for 250 ms, as the pauses between double from 100 ms.
				if during > before+2*time.Second+4*250*time.Millisecond {
					t.Errorf("the slowest plain task started after %v before, %v while the limiter hung", before, during)
				}
				<-goesOn
				for range 100 { // forward looks at waiting tasks within two minutes
					if time.Sleep(2 * time.Second); s.Counters().Processed == waiting+2*plain+guarded {
						break
					}
				}
				s.WantCounters(sitetest.Counters{Processed: waiting + 2*plain + guarded})
			})
		})
	}
}

// A queue is paused for 20 s while 150 tasks wait, or asynq's Redis is away. They go on in order,
// wake twice at most, and none strays by more than a batch.
func TestSceneBacklogOutlastsAPause(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		late  time.Duration // when it goes on
		pause func(s *sitetest.Site, proxy *sitetest.Proxy)
	}{
		// A paused queue is looked at once a second. What was taken is put back after 5 s.
		{"paused", time.Second, func(s *sitetest.Site, _ *sitetest.Proxy) {
			sitetest.Must(s, s.Inspector.PauseQueue("default"))
			time.Sleep(20 * time.Second)
			sitetest.Must(s, s.Inspector.UnpauseQueue("default"))
		}},
		{"asynq's Redis away", 5 * time.Second, func(_ *sitetest.Site, proxy *sitetest.Proxy) {
			proxy.Cut()
			time.Sleep(20 * time.Second)
			proxy.Mend()
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const limit, tasks = 50, 100 + 150 // the first hundred run before the pause
				s := sitetest.NewInBubble(t, sitetest.Shared(limit, time.Second))
				var proxy sitetest.Proxy
				s.JoinMany(s.Client(s.AnotherLimiter()), "acme", 0, tasks)
				whole := s.Asynq
				s.Asynq = sitetest.Dialed{Options: proxy.Options(sitetest.SameRedis(s.Redis))}
				s.Serve(s.Ok, sitetest.Brisk, s.Apart)
				s.Serve(s.Ok, sitetest.Brisk, s.Apart)
				s.Asynq = whole
				time.Sleep(1500 * time.Millisecond)
				row.pause(s, &proxy)
				begun := time.Now()
				waiting := tasks - s.Granted()
				s.SleepUntil(tasks, 90*time.Second)
				ideal := time.Duration(waiting) * time.Second / limit
				if took := s.Grants()[tasks-1].At.Sub(begun); took > ideal+row.late {
					t.Errorf("%d tasks took %v afterwards, want %v", waiting, took, ideal)
				} else {
					t.Logf("%d tasks took %v afterwards, ideally %v", waiting, took, ideal)
				}
				s.WantWakes(sitetest.DeniedAndRun)
				sitetest.WantNeverOver(t, s.Grants(), limit, time.Second)
				// Each of the two servers may have taken what fits at once, and could not pick it.
				wantNoStrays(s, s.Order(), 2*limit)
				s.WantNobodyInLine()
				s.WantCounters(sitetest.Counters{Processed: tasks})
			})
		})
	}
}

// wantNoStrays fails if a task ran more than that many places from where it belongs. The order of
// the names is the right one.
func wantNoStrays(s *sitetest.Site, got []string, most int) {
	s.Helper()
	want := slices.Sorted(slices.Values(got))
	worst := 0
	for i, id := range got {
		at, _ := slices.BinarySearch(want, id)
		worst = max(worst, i-at, at-i)
	}
	if worst > most {
		s.Errorf("a task strayed by %d places", worst)
	} else {
		s.Logf("a task strayed by %d places", worst)
	}
}

// The limiter dies while 100 tasks wait whose policy fails open. They run within two minutes, each
// once, in order.
func TestSceneFailOpenFreesThoseWhoWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := sitetest.Shared(10, time.Minute)
		p.Fail = throttle.FailOpen
		s := sitetest.NewInBubble(t, p)
		var proxy sitetest.Proxy
		s.Serve(s.Ok, sitetest.By(s.LimiterThrough(&proxy)), func(c *asynq.Config, _ *worker.Config) {
			c.DelayedTaskCheckInterval, c.TaskCheckInterval = 0, time.Second
		})
		s.JoinMany(s.Client(s.AnotherLimiter()), "acme", 0, 110) // ten run at once
		time.Sleep(150 * time.Second)                            // after two minutes forward has looked at them once
		proxy.Cut()
		time.Sleep(2*time.Minute + 15*time.Second) // asynq looks every 5 s, for 100 at once
		proxy.Mend()
		s.WantOnceEach(t, 110)
		s.WantWakes(sitetest.DeniedAndRun)
		wantNoStrays(s, s.Starts(), throttle.MaxTake)
		time.Sleep(5 * time.Minute) // their tickets are taken, and dropped
		s.WantNobodyInLine()
		s.WantCounters(sitetest.Counters{Processed: 110})
	})
}
