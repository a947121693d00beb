// Package tasktrace traces tasks by OpenTelemetry. The headers of a task carry the trace that enqueued
// it. The task's wait, from the enqueue to the start of its handler, is a span of that trace.
//
// It uses OpenTelemetry's API alone: the application brings the SDK and the exporter.
package tasktrace

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/sluice-go/sluice/worker"
)

// enqueuedHeader has the time of the enqueue: microseconds since 1970.
const enqueuedHeader = "sluice-enqueued"

// Config configures New. Both fields are required.
type Config struct {
	// Propagator writes a trace into headers, and reads it: for instance propagation.TraceContext{}, or
	// what otel.GetTextMapPropagator returns. Clients and servers need the same one.
	Propagator propagation.TextMapPropagator

	// TracerProvider makes the tracer of the waits, for instance what otel.GetTracerProvider returns.
	TracerProvider trace.TracerProvider
}

// Tracing traces tasks. Its methods are for a worker.Client and a worker.Server. It is safe for concurrent use.
type Tracing struct {
	propagator propagation.TextMapPropagator
	tracer     trace.Tracer
}

// New returns a Tracing, or an error that names the field that is missing.
func New(c Config) (*Tracing, error) {
	if c.Propagator == nil {
		return nil, errors.New("tasktrace: Config.Propagator is nil: must be such as propagation.TraceContext{}")
	}
	if c.TracerProvider == nil {
		return nil, errors.New("tasktrace: Config.TracerProvider is nil: must be such as otel.GetTracerProvider()")
	}
	return &Tracing{propagator: c.Propagator, tracer: c.TracerProvider.Tracer("github.com/sluice-go/sluice/worker/tasktrace")}, nil
}

// Headers is for worker.ClientConfig.Headers: a task gets the trace of the context with which it is enqueued.
func (t *Tracing) Headers(ctx context.Context, _ *asynq.Task) map[string]string {
	headers := propagation.MapCarrier{enqueuedHeader: strconv.FormatInt(time.Now().UnixMicro(), 10)}
	t.propagator.Inject(ctx, headers)
	return headers
}

// Middleware continues the trace that the task carries in the handler's context, and reports the task's
// wait as a span of the trace. Give the handler that it returns to the server's Start or Run. For nil it
// returns nil, which Start and Run refuse.
//
// The span has the name sluice.wait and the attributes sluice.policy, sluice.tenant, sluice.task_type, sluice.task_id
// and sluice.queue. sluice.window names the window that delayed it in line, if one did. The span begins when the task was
// enqueued, by the clock of the client, also with ProcessAt. A retry reports no wait. A task that waits again without
// a retry after its handler ran, such as when the upstream refused it, reports one more span since it was enqueued.
func (t *Tracing) Middleware(next asynq.Handler) asynq.Handler {
	if next == nil {
		return nil
	}
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		ctx = t.propagator.Extract(ctx, propagation.MapCarrier(task.Headers()))
		t.waited(ctx, task, time.Now())
		return next.ProcessTask(ctx, task)
	})
}

// waited reports the wait of a task that starts now.
func (t *Tracing) waited(ctx context.Context, task *asynq.Task, now time.Time) {
	us, err := strconv.ParseInt(task.Headers()[enqueuedHeader], 10, 64)
	if retried, _ := asynq.GetRetryCount(ctx); err != nil || retried > 0 {
		return
	}
	enqueued := time.UnixMicro(us)
	if enqueued.After(now) { // by another clock
		enqueued = now
	}
	id, _ := asynq.GetTaskID(ctx)
	queue, _ := asynq.GetQueueName(ctx)
	text := func(key, value string) attribute.KeyValue { // with invalid text an exporter would lose all spans of one request
		return attribute.String(key, strings.ToValidUTF8(value, "\uFFFD"))
	}
	attributes := []attribute.KeyValue{text("sluice.queue", queue), text("sluice.task_id", id), text("sluice.task_type", task.Type())}
	if d, ok := worker.FromContext(ctx).Decision(); ok {
		attributes = append(attributes, text("sluice.policy", d.Policy), text("sluice.tenant", d.Tenant))
		if d.Binds != "" {
			attributes = append(attributes, text("sluice.window", d.Binds))
		}
	}
	_, span := t.tracer.Start(ctx, "sluice.wait", trace.WithTimestamp(enqueued), trace.WithAttributes(attributes...))
	span.End(trace.WithTimestamp(now))
}
