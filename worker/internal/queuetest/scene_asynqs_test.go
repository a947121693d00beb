package queuetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"testing/synctest"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// One process serves the asynqs of two databases by one limiter, and loses some of its replies. A
// take that is repeated for the other server moves no task to the wrong one. All tasks run once,
// and keep to the limit that they share.
func TestSceneTwoAsynqsByOneLimiter(t *testing.T) {
	if sitetest.OnCluster() {
		t.Skip("a Redis Cluster has one database")
	}
	const tasks = 60
	sitetest.OnRedis(t, append(idle(10), sitetest.Shared(20, 500*time.Millisecond)), func(t *testing.T, s *sitetest.Site) {
		s.Limiter = s.AnotherLimiter(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if err == nil && hooktest.IsScript(cmd) && rand.N(10) == 0 {
				err = context.DeadlineExceeded
				cmd.SetErr(err)
			}
			return err
		}))
		l := sitetest.NewLedger()
		diaries := []*diary{newDiary(), newDiary()}
		begun := time.Now()
		for i, d := range diaries {
			o := sitetest.SameRedis(s.Redis)
			o.DB = i
			s.Asynq = sitetest.Dialed{Options: o}
			s.Serve(d.handle, l.Watch)
			ours := s.Client(s.AnotherLimiter())
			plain := asynq.NewClient(s.Asynq)
			defer plain.Close()
			for n := range tasks {
				var err error
				if task := taskOf(s, "acme", n); n%4 == 0 {
					err = d.enqueue(plain, task)
				} else {
					err = d.plan(ours, task)
				}
				sitetest.Must(t, err)
			}
		}
		for _, d := range diaries {
			s.Wait("all have run", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return len(d.tasks) == tasks && d.runs >= tasks })
		}
		t.Logf("all ran within %v", time.Since(begun))
		if over := l.Excess(20, 500*time.Millisecond); over > 0 {
			t.Errorf("%d were granted above the limit", over)
		}
		for _, d := range diaries {
			d.awaitAll(t, notStranded) // each once
		}
		s.Wait("nobody is in line", func() bool { return len(s.InLine()) == 0 })
	})
}

// asynq's Redis comes back empty, while the limiter's has kept its lines. Tasks run at once, whether a
// new client or an old one enqueues first.
func TestAnAsynqThatComesBackEmpty(t *testing.T) {
	for _, first := range []string{"the new client", "the old client"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				limits, s := sitetest.NewInBubble(t, sitetest.Shared(1000, time.Second)), sitetest.NewInBubble(t)
				s.Limiter = limits.AnotherLimiter()
				l := sitetest.NewLedger()
				s.Serve(s.Ok, l.Watch, sitetest.Calm)
				s.Serve(s.Ok, l.Watch, sitetest.Calm)
				old := s.Client(s.Limiter)
				s.JoinMany(old, "acme", 0, 10)
				s.SleepUntil(l, 10, time.Second)
				sitetest.Must(t, s.Redis.FlushAll(t.Context()).Err())
				time.Sleep(time.Second)
				clients := []*worker.Client{s.Client(s.Limiter), old}
				if first == "the old client" {
					clients[0], clients[1] = clients[1], clients[0]
				}
				for i, client := range clients {
					begin := time.Now()
					s.JoinMany(client, fmt.Sprint("tenant", i), 0, 10)
					s.SleepUntil(l, 20+10*i, 10*time.Minute)
					if late := time.Since(begin) - time.Second; late > 3*time.Second {
						t.Errorf("the tasks of client %d ran after %v", i, late)
					}
				}
			})
		})
	}
}
