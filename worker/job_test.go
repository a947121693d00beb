package worker_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// methods calls all methods of a job that need a policy, and returns their errors.
func methods(ctx context.Context, job *worker.Job) map[string]error {
	_, reserve := job.Reserve(ctx, throttle.Request{})
	return map[string]error{
		"Cancel":  job.Cancel(ctx),
		"Pause":   job.Pause(ctx, time.Minute),
		"Reserve": reserve,
		"Settle":  job.Settle(ctx, throttle.Requests, 1),
	}
}

func TestARefusalSaysHowLongItLasts(t *testing.T) {
	for after, want := range map[time.Duration]string{
		0:           "worker: the upstream refuses calls",
		-time.Hour:  "worker: the upstream refuses calls",
		time.Minute: "worker: the upstream refuses calls for 1m0s",
	} {
		expect.Equal(t, worker.RetryAfter(after).Error(), want, after)
	}
}

func TestAContextWithoutATaskHasNoJob(t *testing.T) {
	job := worker.FromContext(t.Context())
	_, ok := job.Decision()
	expect.That(t, !ok, "it has a decision")
	for name, err := range methods(t.Context(), job) {
		expect.Err(t, err, worker.ErrNoJob, name)
	}
	expect.Err(t, expect.ErrOf(job.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})), worker.ErrNoJob)
}

// The methods of a job whose type may be misspelt say so. By a policy that it names its handler may reserve.
func TestAJobThatNoPolicyMatchesSaysSo(t *testing.T) {
	s := sitetest.OnRedis(t, github())
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		job := worker.FromContext(ctx)
		_, ok := job.Decision()
		expect.That(t, !ok, "it has a decision")
		for name, err := range methods(ctx, job) {
			expect.Err(t, err, worker.ErrUnmatched, name)
			expect.Contains(t, err.Error(), `task type "githib:star"`)
		}
		r, err := job.Reserve(ctx, throttle.Request{Policy: "api"})
		expect.That(t, err == nil && r.Tenant == "acme", "reserved for", r.Tenant, err)
		return s.Ok(ctx, task)
	})
	s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "githib:star", nil), asynq.TaskID("a"))
	s.WaitGone("a")
	s.WaitUsed(1) // the handler's
}

// A handler's transport that reserves by the policy that its task was counted by would count each call twice, and
// requeue the task for ever. It says so at the first call. After Cancel it may reserve.
func TestATransportDoesNotCountAJobTwice(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1, time.Hour))
	var calls atomic.Int64
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { calls.Add(1) }))
	defer upstream.Close()
	transport := expect.Got(httpthrottle.NewTransport(httpthrottle.TransportConfig{Limiter: s.Limiter, Policy: "api"}))(t)
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		if id, _ := asynq.GetTaskID(ctx); id == "cancels" {
			err := worker.FromContext(ctx).Cancel(ctx)
			expect.That(t, err == nil, err)
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, upstream.URL, nil)
		if err != nil {
			return err
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			return err
		}
		return errors.Join(response.Body.Close(), s.Ok(ctx, task))
	})
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("counted"), asynq.MaxRetry(0))
	s.WaitState(asynq.TaskStateArchived, "counted")
	s.Mu.Lock()
	var counted *httpthrottle.CountedError
	expect.That(t, len(s.Reported) == 1 && errors.As(s.Reported[0], &counted) && counted.Policy == "api", "it failed by", s.Reported)
	s.Mu.Unlock()
	s.Enqueue(sitetest.Task("other"), asynq.TaskID("cancels"), asynq.MaxRetry(0))
	s.WaitGone("cancels")
	expect.Equal(t, calls.Load(), 1, "calls were made, want the cancelled job's")
}
