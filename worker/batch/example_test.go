package batch_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

// Two tenants have two tasks each night. When would they be done now?
func Example() {
	server, err := miniredis.Run() // in production, a Redis
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	ctx, client := context.Background(), redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	limiter, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{{
		Name: "geocoder", Match: []string{"geocode:*"},
		Windows: []throttle.Window{{Name: "per-hour", Limit: 3, Period: time.Hour, Shared: true}},
	}}})
	if err != nil {
		log.Fatal(err)
	}

	tasks, err := batch.Template{Count: 2, Payload: `{"tenant": "{{.Tenant}}"}`, Type: "geocode:address"}.Tasks()
	if err != nil {
		log.Fatal(err)
	}
	scheduler, err := batch.NewScheduler(asynq.RedisClientOpt{Addr: server.Addr()}, batch.Config{
		Batches: []batch.Batch{{Name: "nightly", Schedule: "0 2 * * *", Tasks: tasks, Tenants: batch.List("acme", "beta")}},
		Client:  worker.ClientConfig{Limiter: limiter},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer scheduler.Close()
	plan, err := scheduler.Plan(ctx, "nightly", batch.PlanOptions{At: time.Now()})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(plan.Total, "tasks, the last starts in", plan.Finish.Sub(plan.Tick).Round(time.Hour))

	// It also fires by hand. A scheduler that runs, by Scheduler.Run, enqueues the tasks.
	firing, err := scheduler.Fire(ctx, "nightly")
	if err != nil {
		log.Fatal(err)
	}
	status, err := scheduler.Status(ctx, firing)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(status.State)
	// Output:
	// 4 tasks, the last starts in 1h0m0s
	// waiting
}
