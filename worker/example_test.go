package worker_test

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
)

// The README's code: policies, a server, a client.
func Example() {
	m, err := miniredis.Run() // an embedded Redis, for the example
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	ctx, addr := context.Background(), m.Addr()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	done := make(chan struct{})
	mux := asynq.NewServeMux()
	mux.HandleFunc("github:star", func(ctx context.Context, task *asynq.Task) error {
		d, _ := worker.FromContext(ctx).Decision()
		fmt.Printf("%s: one of %d this minute\n", d.Tenant, d.Windows[0].Limit)
		done <- struct{}{}
		return nil
	})

	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: addr}),
		Policies: []throttle.Policy{{
			Name:  "github-api",
			Match: []string{"github:*"}, // the task types that it guards
			Windows: []throttle.Window{ // of each tenant
				{Name: "per-minute", Limit: 20, Period: time.Minute, Margin: 50 * time.Millisecond},
				{Name: "burst", Limit: 2, Period: time.Second, Margin: 50 * time.Millisecond},
			},
		}},
	})
	check(err)

	redisOpt := asynq.RedisClientOpt{Addr: addr}
	server, err := worker.NewServer(redisOpt, asynq.Config{Concurrency: 10}, worker.Config{Limiter: limiter})
	check(err)
	check(server.Start(mux)) // your own handlers: not called while a task does not fit
	defer server.Shutdown()

	client, err := worker.NewClient(redisOpt, worker.ClientConfig{Limiter: limiter})
	check(err)
	defer client.Close()
	for range 3 {
		var start worker.ExpectedStart // start.At is zero if the limiter did not answer
		task := worker.NewTask(worker.Identity{Tenant: "acme"}, "github:star", nil)
		_, err = client.EnqueueContext(ctx, task, worker.ReportStart(&start))
		check(err)
	}
	for range 3 {
		<-done
	}
	// Output:
	// acme: one of 20 this minute
	// acme: one of 20 this minute
	// acme: one of 20 this minute
}
