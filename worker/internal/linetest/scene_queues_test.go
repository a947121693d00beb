package linetest

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Two queues share a window of ten a second. Tasks that wait in one without a server, or with too
// few slots, take no capacity from the other.
func TestSceneQueuesBesideASilentOne(t *testing.T) {
	t.Parallel()
	// Of the served queue run ten a second for 10 s. Of the other 50 may run before.
	const slow, tasks, others = "slow", 110, 80
	serving := func(queue string, slots int) func(*asynq.Config, *worker.Config) {
		return func(c *asynq.Config, _ *worker.Config) {
			c.Queues, c.Concurrency = map[string]int{queue: 1}, slots
		}
	}
	for _, row := range []struct {
		name string
		// silent has tasks wait in the other queue, by a client of ours or a plain one, and returns
		// how many of them may be served per second.
		silent func(s *sitetest.Site, d *diary, wait func()) int
	}{
		{"never served", func(_ *sitetest.Site, _ *diary, wait func()) int { wait(); return 0 }},
		{"redeployed", func(s *sitetest.Site, d *diary, wait func()) int {
			server := s.Serve(s.Ok, s.Apart, sitetest.Calm, serving(slow, 4))
			wait()
			time.Sleep(5 * time.Second)
			server.Shutdown()
			return 0
		}},
		{"short of slots", func(s *sitetest.Site, d *diary, wait func()) int {
			second := func(context.Context, *asynq.Task) error { time.Sleep(time.Second); return nil }
			s.Serve(second, s.Apart, sitetest.Calm, serving(slow, 1))
			wait()
			time.Sleep(5 * time.Second)
			return 1
		}},
	} {
		for _, plain := range []bool{false, true} {
			if plain && row.name == "redeployed" {
				continue // it is "never served" until its server comes back
			}
			t.Run(fmt.Sprintf("%s, plain client %v", row.name, plain), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := sitetest.NewInBubble(t, append(idle(30), sitetest.Shared(10, time.Second))...)
					d := newDiary()
					client := s.Client(s.AnotherLimiter(s.Redis))
					taken := row.silent(s, d, func() { s.JoinMany(client, "other", 0, others, asynq.Queue(slow)) })
					l := sitetest.NewLedger()
					begun := time.Now()
					s.Serve(s.Ok, l.Watch, s.Apart, sitetest.Calm, serving("default", 4))
					if plain {
						s.EnqueueMany("acme", 0, tasks)
					} else {
						s.JoinMany(client, "acme", 0, tasks)
					}
					// The window opens at each full second: it is looked at in between, after five openings
					// and after five more.
					time.Sleep(4500 * time.Millisecond)
					from := l.Count()
					if want := 5 * (10 - taken); from < want {
						t.Errorf("%d of the served queue ran in the first 4.5 s, want %d", from, want)
					}
					time.Sleep(5 * time.Second)
					if n, want := l.Count()-from, 5*(10-taken); n < want {
						t.Errorf("%d of the served queue ran in 5 s, want %d", n, want)
					} else {
						t.Logf("%d ran in the first 4.5 s, %d in the 5 s after", from, n)
					}
					if over := l.Excess(10, time.Second); over > 0 {
						t.Errorf("%d were granted above the limit", over)
					}
					if row.name == "never served" { // after a minute its tasks do not make newcomers wait
						time.Sleep(time.Minute)
						s.EnqueueMany("acme", tasks, 1)
						time.Sleep(5 * time.Second)
						if n := l.WakesOf(fmt.Sprintf("acme-%04d", tasks)); n != 1 {
							t.Errorf("it woke %d times", n)
						}
					}
					if row.name == "redeployed" { // its server comes back after 30 s
						time.Sleep(time.Until(begun.Add(30 * time.Second)))
						s.Serve(s.Ok, l.Watch, s.Apart, sitetest.Calm, serving(slow, 4))
						s.SleepUntil(l, tasks+others-60, 2*time.Minute)
					}
				})
			})
		}
	}
}
