package queuetest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A job may settle again and again while it runs, however long that is.
func TestAJobSettlesAgainAfterMinutes(t *testing.T) {
	p := sitetest.Policy(10_000, 10*time.Second)
	p.Windows[0].Unit = "tokens"
	sitetest.Bubble(t, p, func(t *testing.T, s *sitetest.Site) {
		var charged []int64
		s.Serve(func(ctx context.Context, _ *asynq.Task) error {
			for _, tokens := range []int64{1000, 2000, 3000, 3000} {
				time.Sleep(2 * time.Minute)
				expect.Must(t, worker.FromContext(ctx).Settle(ctx, "tokens", tokens))
				charged = append(charged, s.Used())
			}
			return nil
		}, sitetest.Calm)
		s.Enqueue(sitetest.Task("acme", map[string]int64{"tokens": 500}), asynq.Timeout(time.Hour))
		time.Sleep(10 * time.Minute)
		expect.Equal(t, charged, []int64{500, 1000, 1000, 0}, "charged")
	})
}

// The lock of a unique task holds while the task waits in line, also if it joined later.
func TestALockHoldsForATaskThatJoinsLater(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 10*time.Minute), func(t *testing.T, s *sitetest.Site) {
		client, unique := s.Client(s.Limiter), asynq.Unique(time.Minute)
		s.Fill("acme")
		expect.Must(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask(unique, asynq.ProcessIn(10*time.Second)))))
		s.Serve(s.Ok, sitetest.Calm)
		for range 25 {
			time.Sleep(20 * time.Second)
			_, err := client.Enqueue(sitetest.AcmeTask(unique))
			expect.Require(t, errors.Is(err, asynq.ErrDuplicateTask), "it waits, and its lock is open:", err)
		}
	})
}
