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
func TestLimiterHangsAndPlainTasksRun(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(false, true), func(t *testing.T, failOpen bool) {
		const guarded, plain, waiting = 100, 50, 50
		p := sitetest.Shared(10, time.Second)
		p.Match, p.FailOpen = []string{"x"}, failOpen
		s := sitetest.NewInBubble(t, append(idle(30), p)...)
		var proxy sitetest.BreakableProxy
		s.Limiter = s.LimiterThrough(&proxy)
		var mu sync.Mutex
		started := map[string]time.Time{}
		s.Serve(func(_ context.Context, task *asynq.Task) error {
			mu.Lock()
			defer mu.Unlock()
			started[string(task.Payload())] = time.Now()
			return nil
		})
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
		n := s.Counters().Processed
		expect.That(t, !failOpen || n >= 2*plain+guarded, n, "of", 2*plain+guarded, "that need not wait have run")
		t.Logf("the slowest plain task started after %v before, %v while the limiter hung", before, during)
		// The first guarded tasks wait for the limiter for 2 s in their slots. Meanwhile it is asked
		// four times for 250 ms, as the pauses between double from 100 ms.
		expect.That(t, during <= before+2*time.Second+4*250*time.Millisecond,
			"the slowest plain task started after", before, "before, after", during, "while the limiter hung")
		<-goesOn
		for range 100 { // forward looks at waiting tasks within two minutes
			if time.Sleep(2 * time.Second); s.Counters().Processed == waiting+2*plain+guarded {
				break
			}
		}
		s.WantCounters(sitetest.Counters{Processed: waiting + 2*plain + guarded})
	})
}

// wantNoStrays fails if a task ran more than that many places from where it belongs, by the order of names.
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

// The limiter dies while 100 tasks wait whose policy fails open. They run within two minutes, each once, in order.
func TestFailOpenFreesThoseWhoWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := sitetest.Shared(10, time.Minute)
		p.FailOpen = true
		s := sitetest.NewInBubble(t, p)
		var proxy sitetest.BreakableProxy
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
