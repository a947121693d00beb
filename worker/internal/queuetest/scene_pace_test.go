package queuetest

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// 500 policies with empty lines cost the limiter's Redis nothing, with asynq's own settings.
func TestSceneIdlePoliciesCostLittle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, idle(500)...)
		var scripts atomic.Int64
		count := hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if hooktest.IsScript(cmd) {
				scripts.Add(1)
			}
			return next(ctx, cmd)
		})
		server, err := worker.NewServer(s.Asynq, asynq.Config{LogLevel: asynq.FatalLevel}, worker.Config{Limiter: s.AnotherLimiter(count)})
		sitetest.Must(t, err)
		sitetest.Must(t, server.Start(asynq.HandlerFunc(s.Ok)))
		defer server.Shutdown()
		time.Sleep(30 * time.Second) // each is asked once
		before := scripts.Load()
		time.Sleep(2 * time.Minute)
		if n := scripts.Load() - before; n > 0 {
			t.Errorf("%d scripts in two minutes", n)
		}
	})
}

// TaskCheckInterval does not delay the tasks of our client.
func TestSceneTaskCheckIntervalMattersToPlainTasksOnly(t *testing.T) {
	t.Parallel()
	for _, interval := range []time.Duration{4 * time.Second, 0} {
		t.Run(interval.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sitetest.NewInBubble(t, append(idle(30), sitetest.Shared(2, 3*time.Second))...)
				d := newDiary()
				for range 2 {
					s.Serve(d.handle, d.watch, s.Apart, func(c *asynq.Config, _ *worker.Config) {
						c.DelayedTaskCheckInterval, c.TaskCheckInterval = 0, interval
					})
				}
				time.Sleep(20 * time.Second)
				client := s.Client(s.AnotherLimiter())
				for i := range 12 {
					sitetest.Must(t, d.plan(client, taskOf(s, "acme", i)))
				}
				d.awaitAll(t, sitetest.Spacing)
				time.Sleep(10 * time.Second)
				if err := d.plan(client, taskOf(s, "acme", 12)); err != nil { // to an idle server
					t.Fatal(err)
				}
				d.awaitAll(t, sitetest.Spacing)
			})
		})
	}
}
