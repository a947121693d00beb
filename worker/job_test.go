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

// methods calls all methods of a job that need a policy, and returns their errors.
func methods(ctx context.Context, job *worker.Job) map[string]error {
	_, reserve := job.Reserve(ctx, worker.ReserveOptions{})
	return map[string]error{
		"Cancel":  job.Cancel(ctx),
		"Pause":   job.Pause(ctx, time.Minute),
		"Reserve": reserve,
		"Settle":  job.Settle(ctx, throttle.Requests, 1),
	}
}

func TestAContextWithoutATaskHasNoJob(t *testing.T) {
	job := worker.FromContext(t.Context())
	if _, ok := job.Decision(); ok {
		t.Error("it has a decision")
	}
	for name, err := range methods(t.Context(), job) {
		if !errors.Is(err, worker.ErrNoJob) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := job.Reserve(t.Context(), worker.ReserveOptions{Request: throttle.Request{Policy: "api", Tenant: "acme"}}); !errors.Is(err, worker.ErrNoJob) {
		t.Errorf("Reserve by a policy: %v", err)
	}
}

// The methods of a job whose type may be misspelt say so. By a policy that it names its handler may reserve.
func TestAJobThatNoPolicyMatchesSaysSo(t *testing.T) {
	each(t, []throttle.Policy{github()}, func(t *testing.T, s *site) {
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			job := worker.FromContext(ctx)
			if _, ok := job.Decision(); ok {
				t.Error("it has a decision")
			}
			for name, err := range methods(ctx, job) {
				var unmatched *worker.UnmatchedError
				if !errors.As(err, &unmatched) || unmatched.TaskType != "githib:star" {
					t.Errorf("%s: %v", name, err)
				}
			}
			r, err := job.Reserve(ctx, worker.ReserveOptions{Request: throttle.Request{Policy: "api"}})
			if err != nil || r.Tenant != "acme" {
				t.Errorf("reserved for %q, %v", r.Tenant, err)
			}
			return s.ok(ctx, task)
		})
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "githib:star", nil), asynq.TaskID("a"))
		s.waitGone("a")
		if used := s.used(); used != 1 {
			t.Errorf("%d units are used, want the handler's 1", used)
		}
	})
}
