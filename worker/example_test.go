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

// A server and a client. The third task waits for a second, and wakes once.
func Example() {
	m, err := miniredis.Run() // an embedded Redis, for the example
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()

	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: m.Addr()}),
		Policies: []throttle.Policy{{
			Name:  "github-api",
			Match: []string{"github:*"},
			Windows: []throttle.Window{
				{Name: "per-minute", Limit: 20, Period: time.Minute},
				{Name: "burst", Limit: 2, Period: time.Second},
			},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}

	done := make(chan struct{})
	handler := asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		d, _ := worker.FromContext(ctx).Decision()
		fmt.Printf("%s: %d of %d left this minute\n", d.Tenant, d.Windows[0].Remaining, d.Windows[0].Limit)
		done <- struct{}{}
		return nil // not called while it does not fit
	})
	server, err := worker.NewServer(asynq.RedisClientOpt{Addr: m.Addr()}, asynq.Config{Concurrency: 1, LogLevel: asynq.ErrorLevel}, worker.Config{Limiter: limiter})
	if err != nil {
		log.Fatal(err)
	}
	defer server.Shutdown()
	if err := server.Start(handler); err != nil {
		log.Fatal(err)
	}

	client, err := worker.NewClient(asynq.RedisClientOpt{Addr: m.Addr()}, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	var start worker.ExpectedStart // when the task is expected to start
	for range 3 {
		task := worker.NewTask(worker.Identity{Tenant: "acme"}, "github:star", nil, asynq.MaxRetry(0))
		if _, err := client.EnqueueContext(context.Background(), task, worker.ReportStart(&start)); err != nil {
			log.Fatal(err)
		}
	}
	for range 3 {
		<-done
	}
	fmt.Println("the last one joined its line:", start.Joined)
	// Output:
	// acme: 19 of 20 left this minute
	// acme: 18 of 20 left this minute
	// acme: 17 of 20 left this minute
	// the last one joined its line: true
}

// To throttle an asynq.Server of your own, put the three parts of an Adapter into it.
func ExampleAdapter() {
	m, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	redisOpt := asynq.RedisClientOpt{Addr: m.Addr()}
	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: m.Addr()}),
		Policies: []throttle.Policy{{
			Name: "email", Match: []string{"email:*"},
			Windows: []throttle.Window{{Name: "per-day", Limit: 500, Period: 24 * time.Hour}},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan struct{})
	sendMail := func(_ context.Context, task *asynq.Task) error {
		fmt.Printf("mail to %s\n", task.Payload())
		close(done)
		return nil
	}

	throttled, err := worker.NewAdapter(worker.Config{
		Limiter: limiter,
		Tenant:  func(task *asynq.Task) string { return string(task.Payload()) },
	})
	if err != nil {
		log.Fatal(err)
	}
	server := asynq.NewServer(throttled.Redis(redisOpt), throttled.Asynq(asynq.Config{LogLevel: asynq.ErrorLevel}))
	middleware, err := throttled.Middleware()
	if err != nil {
		log.Fatal(err)
	}
	mux := asynq.NewServeMux()
	mux.Use(middleware)
	mux.HandleFunc("email:welcome", sendMail)
	if err := server.Start(mux); err != nil {
		log.Fatal(err)
	}
	defer func() {
		throttled.Stop()
		server.Shutdown()
		throttled.Close()
	}()

	client := asynq.NewClient(redisOpt)
	defer client.Close()
	if _, err := client.Enqueue(asynq.NewTask("email:welcome", []byte("ann@example.com"))); err != nil {
		log.Fatal(err)
	}
	<-done
	// Output: mail to ann@example.com
}
