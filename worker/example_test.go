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
		fmt.Printf("%s: %d of %d left this minute\n", d.Tenant, d.Windows[0].Remaining, d.Windows[0].Limit)
		done <- struct{}{}
		return nil
	})

	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: addr}),
		Policies: []throttle.Policy{{
			Name:  "github-api",
			Match: []string{"github:*"}, // the task types that it guards
			Windows: []throttle.Window{
				{Name: "per-minute", Limit: 20, Period: time.Minute},
				{Name: "burst", Limit: 2, Period: time.Second},
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
		var start worker.ExpectedStart // start.At is when the task is expected to start
		task := worker.NewTask(worker.Identity{Tenant: "acme"}, "github:star", nil)
		_, err = client.EnqueueContext(ctx, task, worker.ReportStart(&start))
		check(err)
	}
	for range 3 {
		<-done
	}
	// Unordered output:
	// acme: 19 of 20 left this minute
	// acme: 18 of 20 left this minute
	// acme: 17 of 20 left this minute
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
