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
	"github.com/sluice-go/sluice/worker"
)

// How to run nightly batches: docs/howto/nightly-batches.md.
func Example_nightlyBatch() {
	m, err := miniredis.Run() // an embedded Redis, for the example
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	redisOpt := asynq.RedisClientOpt{Addr: m.Addr()}

	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: m.Addr()}),
		Policies: []throttle.Policy{{
			Name:  "geocoder",
			Match: []string{"geocode:*"},
			Windows: []throttle.Window{
				{Name: "pace", Algorithm: throttle.GCRA, Limit: 20, Period: time.Second, Burst: 1, Scope: throttle.Shared},
				{Name: "quota", Algorithm: throttle.Calendar, Limit: 4, Resets: "@monthly", Timezone: "Europe/Berlin", Scope: throttle.Shared},
			},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}

	client, err := worker.NewClient(redisOpt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	const tonight = 10 * time.Second // for the example; say 4 * time.Hour
	enqueued := make(chan struct{})
	startBatch := func(ctx context.Context, _ *asynq.Task) error {
		night := time.Now().Format(time.DateOnly)
		var tasks []*asynq.Task
		for i := range 6 {
			tasks = append(tasks, worker.NewTask(
				worker.Identity{Tenant: "nightly"},
				"geocode:address",
				fmt.Appendf(nil, "address %d", i+1),
				asynq.TaskID(fmt.Sprintf("geocode-%s-%d", night, i+1)),
				asynq.Retention(24*time.Hour), // keeps the ID: a repeated batch enqueues nothing twice
			))
		}
		results := client.EnqueueBatch(ctx, tasks, worker.MaxWait(tonight))
		for i, result := range results {
			var refused *throttle.TooLateError
			switch {
			case errors.Is(result.Err, asynq.ErrTaskIDConflict): // it was enqueued before
			case errors.As(result.Err, &refused):
				fmt.Printf("%s: not tonight\n", tasks[i].Payload())
			case result.Err != nil:
				return result.Err
			}
		}
		close(enqueued)
		return nil
	}
	done := make(chan struct{})
	geocode := func(_ context.Context, task *asynq.Task) error {
		<-enqueued
		fmt.Printf("%s: done\n", task.Payload())
		done <- struct{}{}
		return nil
	}

	server, err := worker.NewServer(
		redisOpt,
		asynq.Config{Concurrency: 1, LogLevel: asynq.ErrorLevel}, // one at a time: the order shows
		worker.Config{Limiter: limiter},
	)
	if err != nil {
		log.Fatal(err)
	}
	defer server.Shutdown()
	mux := asynq.NewServeMux()
	mux.HandleFunc("batch:start", startBatch) // no policy matches it: it is not throttled
	mux.HandleFunc("geocode:address", geocode)
	if err := server.Start(mux); err != nil {
		log.Fatal(err)
	}

	scheduler := asynq.NewScheduler(redisOpt, &asynq.SchedulerOpts{LogLevel: asynq.ErrorLevel})
	const nightly = "@every 2s" // for the example; "0 2 * * *" is two o'clock every night
	if _, err := scheduler.Register(nightly, asynq.NewTask("batch:start", nil), asynq.Unique(12*time.Hour)); err != nil {
		log.Fatal(err)
	}
	if err := scheduler.Start(); err != nil {
		log.Fatal(err)
	}
	<-enqueued
	scheduler.Shutdown() // for the example; yours goes on

	for range 4 {
		<-done
	}
	// Output:
	// address 5: not tonight
	// address 6: not tonight
	// address 1: done
	// address 2: done
	// address 3: done
	// address 4: done
}
