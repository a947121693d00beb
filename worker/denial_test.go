package worker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// Middlewares may make the same text of a denial and of a failure. IsFailure is called for the
// failure and not for the denial, though asynq does not tell it which task it is about.
func TestADenialIsNotTakenForAFailureOfTheSameText(t *testing.T) {
	each(t, []throttle.Policy{policy(1, time.Hour)}, func(t *testing.T, s *site) {
		theirs, ours := s.configs()
		failing, denied := make(chan struct{}), make(chan struct{})
		record := theirs.ErrorHandler
		theirs.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
		theirs.ErrorHandler = asynq.ErrorHandlerFunc(func(ctx context.Context, task *asynq.Task, err error) {
			record.HandleError(ctx, task, err)
			close(failing)
			<-denied
		})
		ad, err := worker.NewAdapter(ours)
		if err != nil {
			t.Fatal(err)
		}
		server := asynq.NewServer(ad.Redis(s.asynq), ad.Asynq(theirs))
		middleware, err := ad.Middleware()
		if err != nil {
			t.Fatal(err)
		}
		handler := middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return errors.New("boom") }))
		if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			if err := handler.ProcessTask(ctx, task); err != nil {
				return errors.New("try later")
			}
			return nil
		})); err != nil {
			t.Fatal(err)
		}
		defer server.Shutdown()
		s.enqueue(acmeTask(), asynq.TaskID("fails"), asynq.MaxRetry(1))
		<-failing
		s.enqueue(acmeTask(), asynq.TaskID("waits"), asynq.MaxRetry(1))
		s.waitState(asynq.TaskStateScheduled, "waits")
		s.mu.Lock()
		asked := len(s.asked)
		s.mu.Unlock()
		close(denied)
		if asked != 0 {
			t.Errorf("IsFailure was called %d times for the denial", asked)
		}
		s.waitState(asynq.TaskStateRetry, "fails")
		s.wantTold([]string{"try later"}, []string{"try later"})
		s.wantCounters(counters{Processed: 1, Failed: 1, Scheduled: 1, Retry: 1})
	})
}
