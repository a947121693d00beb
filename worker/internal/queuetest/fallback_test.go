package queuetest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A line is lost. A task runs two minutes after its expected start, however far away that is, and
// whether a client or a server had it join.
func TestATaskWithoutATicketRunsTwoMinutesLate(t *testing.T) {
	for name, enqueue := range map[string]func(*sitetest.Site){
		"by our client":     func(s *sitetest.Site) { s.JoinMany(s.Client(s.Limiter), "acme", 0, 2) },
		"by a plain client": func(s *sitetest.Site) { s.EnqueueMany("acme", 0, 2) },
	} {
		t.Run(name, func(t *testing.T) {
			sitetest.Bubble(t, sitetest.Shared(1, 10*time.Minute), func(t *testing.T, s *sitetest.Site) {
				l := sitetest.NewLedger()
				s.Serve(s.Ok, l.Watch, sitetest.Calm)
				begin := time.Now()
				enqueue(s)
				s.SleepUntil(l, 1, time.Second)
				for _, key := range s.Redis.Keys(t.Context(), "sluice:*").Val() {
					s.Redis.Del(t.Context(), key)
				}
				s.SleepUntil(l, 2, 20*time.Minute)
				late := time.Since(begin) - 10*time.Minute
				if late > sitetest.FallbackMin+6*time.Second { // asynq looks every 5 s, in whole seconds
					t.Errorf("it ran %v after its expected start", late)
				}
			})
		})
	}
}

// A task whose error is no failure keeps its place in line, as a retry does.
func TestATaskThatDidNotFailRejoinsInFront(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, 4*time.Second), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		errAgain := errors.New("again")
		failed := false
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			if !failed {
				failed = true
				return errAgain
			}
			return s.Ok(ctx, task)
		}, l.Watch, sitetest.Calm, func(c *asynq.Config, _ *worker.Config) {
			c.IsFailure = func(err error) bool { return !errors.Is(err, errAgain) }
			c.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Second }
		})
		s.JoinMany(s.Client(s.Limiter), "acme", 0, 5)
		s.SleepUntil(l, 6, time.Minute)
		if got := l.Got(); got[1] != "acme-0000" && got[2] != "acme-0000" { // asynq looks for retries every 5 s
			t.Errorf("granted in the order %q", got)
		}
	})
}
