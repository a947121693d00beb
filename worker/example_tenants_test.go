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

// How to share a queue fairly between tenants: docs/howto/share-a-queue.md.
func Example_shareAQueue() {
	m, err := miniredis.Run() // an embedded Redis, for the example
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	redisOpt := asynq.RedisClientOpt{Addr: m.Addr()}

	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: m.Addr()}),
		Policies: []throttle.Policy{{
			Name:  "reports",
			Match: []string{"report:*"},
			Windows: []throttle.Window{
				{Name: "all", Limit: 100, Period: time.Second, Shared: true}, // shared by all tenants
				{Name: "each", Limit: 1000, Period: time.Hour},               // of each tenant
			},
			Tenants: map[string]throttle.Tenant{
				"gold":  {Weight: 2}, // twice the share of another tenant
				"trial": {Windows: map[string]throttle.Override{"each": {Limit: 2}}},
			},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}

	client, err := worker.NewClient(redisOpt, worker.ClientConfig{Limiter: limiter, LimiterTimeout: 5 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	for _, tenant := range []string{"bulk", "gold", "trial"} { // bulk comes first, with all it has
		for i := range 4 {
			task := worker.NewTask(worker.Identity{Tenant: tenant}, "report:render", fmt.Appendf(nil, "%s-%d", tenant, i+1))
			if _, err := client.EnqueueContext(context.Background(), task); err != nil {
				log.Fatal(err)
			}
		}
	}

	done := make(chan struct{})
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
	mux.HandleFunc("report:render", func(_ context.Context, task *asynq.Task) error {
		fmt.Printf("%s\n", task.Payload())
		done <- struct{}{}
		return nil
	})
	if err := server.Start(mux); err != nil {
		log.Fatal(err)
	}
	for range 10 { // two tasks of trial wait for their tenant's next hour
		<-done
	}
	// Output:
	// bulk-1
	// gold-1
	// trial-1
	// gold-2
	// bulk-2
	// gold-3
	// trial-2
	// gold-4
	// bulk-3
	// bulk-4
}
