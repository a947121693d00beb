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

// An enqueue says when the task is expected to start, and refuses one that would wait for too long.
func ExampleClient_EnqueueContext() {
	m, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	connection := redis.NewClient(&redis.Options{Addr: m.Addr()})
	defer connection.Close()
	limiter, err := throttle.New(throttle.Config{Client: connection, Policies: []throttle.Policy{{
		Name: "reports", Match: []string{"report"}, Windows: []throttle.Window{{Name: "per-hour", Limit: 1, Period: time.Hour}},
	}}})
	if err != nil {
		log.Fatal(err)
	}
	client, err := worker.NewClient(asynq.RedisClientOpt{Addr: m.Addr()}, worker.ClientConfig{Limiter: limiter, LimiterTimeout: 5 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
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
	// starts in 0s
	// starts in 1h0m0s
	// refused: would wait for 2h0m0s
}
