package worker_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
)

// A client says when tasks would start, and an enqueue when its task is expected to. It refuses one that would wait for
// too long.
func ExampleClient_EnqueueContext() {
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	m, err := miniredis.Run()
	check(err)
	defer m.Close()
	connection := redis.NewClient(&redis.Options{Addr: m.Addr()})
	defer connection.Close()
	limiter, err := throttle.New(throttle.Config{Client: connection, Policies: []throttle.Policy{{
		Name: "reports", Match: []string{"report"}, Windows: []throttle.Window{{Name: "per-hour", Limit: 1, Period: time.Hour}},
	}}})
	check(err)
	client, err := worker.NewClient(asynq.RedisClientOpt{Addr: m.Addr()}, worker.ClientConfig{Limiter: limiter, LimiterTimeout: 5 * time.Second})
	check(err)
	defer client.Close()

	// How long would three tasks take, if they were enqueued now?
	request, err := client.RequestOf(worker.NewTask(worker.Identity{Tenant: "acme"}, "report", nil))
	check(err)
	snapshot, err := inspect.Of(limiter).Snapshot(context.Background(), []inspect.Demand{{Count: 3, Request: request}})
	check(err)
	plan, err := snapshot.Plan(context.Background(), inspect.PlanOptions{})
	check(err)
	fmt.Println("the last would start in", plan.Expected.Sub(plan.At).Round(time.Hour))
	for range 3 {
		var start worker.ExpectedStart
		task := worker.NewTask(worker.Identity{Tenant: "acme"}, "report", nil)
		_, err := client.EnqueueContext(context.Background(), task, worker.ReportStart(&start), worker.MaxWait(90*time.Minute))
		var late *throttle.DeniedError
		switch {
		case errors.As(err, &late):
			fmt.Println("refused: would wait for", late.Decision.RetryIn.Round(time.Hour))
		case err != nil:
			log.Fatal(err)
		default:
			fmt.Println("starts in", time.Until(start.At).Round(time.Hour))
		}
	}
	// Output:
	// the last would start in 2h0m0s
	// starts in 0s
	// starts in 1h0m0s
	// refused: would wait for 2h0m0s
}
