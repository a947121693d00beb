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
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	server, err := miniredis.Run() // in production, a Redis
	check(err)
	defer server.Close()
	ctx, client := context.Background(), redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	limiter, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{{
		Name: "geocoder", Match: []string{"geocode:*"},
		Windows: []throttle.Window{{Name: "per-hour", Limit: 3, Period: time.Hour, Shared: true}},
	}}})
	check(err)

	tasks, err := batch.Template{Count: 2, Payload: `{"tenant": "{{.Tenant}}"}`, Type: "geocode:address"}.Tasks()
	check(err)
	scheduler, err := batch.NewScheduler(asynq.RedisClientOpt{Addr: server.Addr()}, batch.Config{
		Batches: []batch.Batch{{Name: "nightly", Schedule: "0 2 * * *", Tasks: tasks, Tenants: batch.List("acme", "beta")}},
		Client:  worker.ClientConfig{Limiter: limiter},
	})
	check(err)
	defer scheduler.Close()
	plan, err := scheduler.Plan(ctx, "nightly", batch.PlanOptions{At: time.Now()})
	check(err)
	fmt.Println(plan.Total, "tasks, the last starts in", plan.Finish.Sub(plan.Tick).Round(time.Hour), plan.Begins)

	// It also fires by hand. A scheduler that runs, by Scheduler.Run, enqueues the tasks.
	_, err = scheduler.Fire(ctx, "nightly")
	check(err)
	firings, err := scheduler.Firings(ctx, "nightly", 1)
	check(err)
	status, err := scheduler.Status(ctx, firings[0]) // the newest
	check(err)
	fmt.Println(status.State, status.Done, "of", status.Total, status.HasEnded())
	// Output:
	// 4 tasks, the last starts in 1h0m0s true
	// waiting 0 of 0 false
}
