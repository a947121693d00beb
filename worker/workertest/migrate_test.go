package workertest_test

import (
	"context"
	"fmt"
	"log"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

// identify finds the tenant of tasks that were enqueued before tasks named one.
func identify(task *asynq.Task) (worker.Identity, error) {
	id, err := worker.IdentityOf(task)
	if id.Tenant == "" {
		id.Tenant, _, _ = strings.Cut(string(task.Payload()), "/")
	}
	if id.Tenant == "" {
		id.Tenant = "unknown" // a task without one would fail
	}
	return id, err
}

func startThrottled(redisOpt asynq.RedisConnOpt, config asynq.Config, limiter *throttle.Limiter, handler asynq.Handler) *worker.Server {
	server, err := worker.NewServer(redisOpt, config, worker.Config{Limiter: limiter, Identify: identify})
	if err != nil {
		log.Fatal(err)
	}
	if err := server.Start(handler); err != nil {
		log.Fatal(err)
	}
	return server
}

// A queue full of a plain client's tasks is drained within the limits, without a retry used. Then the
// application goes back to plain asynq, and what waits runs too. Each task runs once.
func TestAFullQueueIsThrottledAndGoesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redisOpt := throttletest.InMemory(t)
		limiter, err := throttle.New(throttle.Config{Client: redisOpt.Client(t), Policies: []throttle.Policy{{
			Name: "crm", Match: []string{"crm:*"}, Windows: []throttle.Window{{Name: "w", Limit: 2, Period: time.Minute}},
		}}})
		expect.Must(t, err)
		plain := asynq.NewClient(redisOpt)
		defer plain.Close()
		const tasks = 40
		for i := range tasks {
			opts := []asynq.Option{asynq.MaxRetry(0)}
			if i%10 == 9 {
				opts = append(opts, asynq.ProcessIn(time.Minute))
			}
			task := asynq.NewTask("crm:sync", fmt.Appendf(nil, "tenant%d/%d", i%2, i))
			expect.Must(t, expect.ErrOf(plain.Enqueue(task, opts...)))
		}
		var mu sync.Mutex
		ran := map[string]int{}
		count := func() int {
			mu.Lock()
			defer mu.Unlock()
			return len(ran)
		}
		handler := asynq.HandlerFunc(func(_ context.Context, task *asynq.Task) error {
			mu.Lock()
			defer mu.Unlock()
			ran[string(task.Payload())]++
			return nil
		})
		config := asynq.Config{Concurrency: 4, LogLevel: asynq.FatalLevel}

		server := startThrottled(redisOpt, config, limiter, handler)
		for minute := range 5 {
			time.Sleep(time.Second)
			got, want := count(), 4*(minute+1)
			expect.That(t, got == want, "after minute", minute, got, "tasks have run, want", want)
			time.Sleep(59 * time.Second)
		}
		server.Shutdown()
		throttled := count()

		back := asynq.NewServer(redisOpt, config)
		expect.Must(t, back.Start(handler))
		defer back.Shutdown()
		time.Sleep(15 * time.Minute)
		expect.Equal(t, count(), tasks, "tasks have run in the end")
		expect.That(t, throttled <= 6*4, throttled, "tasks have run throttled") // the sixth minute may have begun
		for payload, times := range ran {
			expect.That(t, times == 1, payload, "ran", times, "times")
		}
		inspector := asynq.NewInspector(redisOpt)
		defer inspector.Close()
		info := expect.Got(inspector.GetQueueInfo("default"))(t)
		expect.That(t, info.Size == 0 && info.FailedTotal == 0, info)
	})
}
