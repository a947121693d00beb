package worker_test

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
)

// One process serves the asynqs of two databases by one limiter, and loses some of its replies. A
// take that is repeated for the other server moves no task to the wrong one. All tasks run once,
// and keep to the limit that they share.
func TestSceneTwoAsynqsByOneLimiter(t *testing.T) {
	if onCluster() {
		t.Skip("a Redis Cluster has one database")
	}
	const tasks = 100
	each(t, append(idle(10), shared(20, 500*time.Millisecond)), func(t *testing.T, s *site) {
		client := connect(like(s.redis))
		defer client.Close()
		client.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if err == nil && hooktest.IsScript(cmd) && rand.N(10) == 0 {
				err = context.DeadlineExceeded
				cmd.SetErr(err)
			}
			return err
		}))
		s.limiter = s.limiterOn(client)
		l := newLedger()
		diaries := []*diary{newDiary(), newDiary()}
		begun := time.Now()
		for i, d := range diaries {
			o := like(s.redis)
			o.DB = i
			s.asynq = dialed{o}
			s.serve(d.handle, l.watch)
			ours := s.client(s.anotherLimiter(s.redis))
			plain := asynq.NewClient(s.asynq)
			defer plain.Close()
			for n := range tasks {
				var err error
				if task := s.taskOf("acme", n); n%4 == 0 {
					err = d.enqueue(plain, task)
				} else {
					err = d.plan(ours, task)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, d := range diaries {
			s.wait("all have run", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return len(d.tasks) == tasks && d.runs >= tasks })
		}
		t.Logf("all ran within %v", time.Since(begun))
		if over := l.excess(20, 500*time.Millisecond); over > 0 {
			t.Errorf("%d were granted above the limit", over)
		}
		for _, d := range diaries {
			d.awaitAll(t, time.Minute) // each once
		}
		s.wait("nobody is in line", func() bool { return len(s.inLine()) == 0 })
	})
}
