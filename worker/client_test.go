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

func TestClientRefusesWhatCanNeverRun(t *testing.T) {
	p := policy(5, time.Hour)
	p.Match = []string{"x"}
	p.Windows[0].Scope = throttle.Per("tenant", "user")
	each(t, []throttle.Policy{p}, func(t *testing.T, s *site) {
		limiter, err := throttle.New(throttle.Config{Client: s.redis, Policies: []throttle.Policy{p},
			Tenants: func(_ context.Context, _, tenant string) (throttle.Tenant, bool, error) {
				if tenant == "unknown" {
					return throttle.Tenant{}, false, errors.New("the database of plans is down")
				}
				return throttle.Tenant{}, false, nil
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		client, err := worker.NewClient(s.asynq, worker.ClientConfig{Limiter: limiter})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		task := func(tenant string, cost int64) *asynq.Task {
			return worker.NewTask(worker.Identity{Attributes: map[string]string{"user": "bob"}, Cost: map[string]int64{"requests": cost}, Tenant: tenant}, "x", nil)
		}
		var request *throttle.RequestError
		var neverFits *throttle.NeverFitsError
		if _, err := client.EnqueueContext(t.Context(), asynq.NewTask("x", nil)); err == nil ||
			err.Error() != `worker: task type "x": no tenant, and policy "api" matches it: make the task with worker.NewTask, or set Config.Tenant` {
			t.Errorf("without a tenant: %v", err)
		}
		if _, err := client.EnqueueContext(t.Context(), task("acme", 6)); !errors.As(err, &neverFits) || neverFits.Capacity != 5 {
			t.Errorf("a cost of 6 of 5: %v", err)
		}
		if _, err := client.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil)); !errors.As(err, &request) || request.Field != "attribute user" {
			t.Errorf("without the user: %v", err)
		}
		if _, err := client.EnqueueContext(t.Context(), nil); err == nil {
			t.Error("nil was enqueued")
		}
		if n := s.redis.DBSize(t.Context()).Val(); n != 0 {
			t.Errorf("%d keys were written", n)
		}

		for _, ok := range []*asynq.Task{task("acme", 5), task("unknown", 6), asynq.NewTask("unmatched", nil)} {
			info, err := client.EnqueueContext(t.Context(), ok, asynq.MaxRetry(7))
			if err != nil {
				t.Fatal(err)
			}
			if got := s.task(info.ID); got.MaxRetry != 7 || ok.Type() == "unmatched" && got.State != asynq.TaskStatePending {
				t.Errorf("enqueued %+v", got)
			}
		}

		byPayload, err := worker.NewClient(s.asynq, worker.ClientConfig{
			Attributes: func(*asynq.Task) map[string]string { return map[string]string{"user": "bob"} },
			Cost:       func(*asynq.Task) map[string]int64 { return map[string]int64{"requests": 5} },
			Limiter:    limiter,
			Tenant:     func(task *asynq.Task) string { return string(task.Payload()) },
		})
		if err != nil {
			t.Fatal(err)
		}
		defer byPayload.Close()
		if _, err := byPayload.EnqueueContext(t.Context(), asynq.NewTask("x", []byte("acme"))); err != nil {
			t.Error(err)
		}
	})
}
