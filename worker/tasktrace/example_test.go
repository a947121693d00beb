package tasktrace_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/tasktrace"
)

// A task that carries the trace of who enqueued it. With OpenTelemetry's SDK, the application has the TracerProvider.
func Example() {
	server, err := miniredis.Run() // in production, a Redis
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	queues := asynq.RedisClientOpt{Addr: server.Addr()}
	redisClient := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer redisClient.Close()
	limiter, err := throttle.New(throttle.Config{Client: redisClient, Policies: []throttle.Policy{{
		Name: "api", Match: []string{"api:*"}, Windows: []throttle.Window{{Name: "w", Limit: 10, Period: time.Second}},
	}}})
	if err != nil {
		log.Fatal(err)
	}

	tracing, err := tasktrace.New(tasktrace.Config{
		Propagator:     propagation.TraceContext{},
		TracerProvider: noop.NewTracerProvider(), // in production, otel.GetTracerProvider()
	})
	if err != nil {
		log.Fatal(err)
	}
	client, err := worker.NewClient(queues, worker.ClientConfig{Headers: tracing.Headers, Limiter: limiter})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	workers, err := worker.NewServer(queues, asynq.Config{LogLevel: asynq.FatalLevel}, worker.Config{Limiter: limiter})
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan bool)
	handler := asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
		fmt.Println("runs in the trace    ", trace.SpanContextFromContext(ctx).TraceID())
		close(done)
		return nil
	})
	if err := workers.Start(tracing.Middleware(handler)); err != nil {
		log.Fatal(err)
	}
	defer workers.Shutdown()

	request := trace.ContextWithSpanContext(context.Background(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{0x5f}, SpanID: trace.SpanID{1}, TraceFlags: trace.FlagsSampled,
	}))
	fmt.Println("enqueued in the trace", trace.SpanContextFromContext(request).TraceID())
	if _, err := client.EnqueueContext(request, worker.NewTask(worker.Identity{Tenant: "acme"}, "api:call", nil)); err != nil {
		log.Fatal(err)
	}
	<-done
	// Output:
	// enqueued in the trace 5f000000000000000000000000000000
	// runs in the trace     5f000000000000000000000000000000
}
