package tasktrace_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/tasktrace"
	"github.com/sluice-go/sluice/worker/workertest"
)

// A spanRecorder is an SDK that keeps the spans that have ended.
type spanRecorder struct {
	noop.TracerProvider
	mu    sync.Mutex
	spans []span
}

type span struct {
	noop.Span
	recorder   *spanRecorder
	name       string
	begun, end time.Time
	attributes map[string]string
	parent     trace.SpanContext
}

type tracer struct {
	noop.Tracer
	recorder *spanRecorder
}

func (r *spanRecorder) Tracer(string, ...trace.TracerOption) trace.Tracer { return tracer{recorder: r} }

func (t tracer) Start(ctx context.Context, name string, options ...trace.SpanStartOption) (context.Context, trace.Span) {
	c := trace.NewSpanStartConfig(options...)
	s := &span{
		recorder: t.recorder, name: name, begun: c.Timestamp(), attributes: map[string]string{},
		parent: trace.SpanContextFromContext(ctx),
	}
	for _, a := range c.Attributes() {
		s.attributes[string(a.Key)] = a.Value.String()
	}
	return trace.ContextWithSpan(ctx, s), s
}

func (s *span) End(options ...trace.SpanEndOption) {
	c := trace.NewSpanEndConfig(options...)
	s.end = c.Timestamp()
	s.recorder.mu.Lock()
	defer s.recorder.mu.Unlock()
	s.recorder.spans = append(s.recorder.spans, *s)
}

func (s *span) SetAttributes(...attribute.KeyValue) {}

var enqueuer = trace.NewSpanContext(trace.SpanContextConfig{
	TraceID: trace.TraceID{1, 2, 3}, SpanID: trace.SpanID{4, 5, 6}, TraceFlags: trace.FlagsSampled,
})

// A task's wait is a span of the trace in which it was enqueued, however it came to the worker, as its handler.
func TestWaitsAreSpans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opt := throttletest.InMemory(t)
		limiter, err := throttle.New(throttle.Config{Client: opt.Client(t), Policies: []throttle.Policy{{
			Name: "api", Match: []string{"api:*"}, Windows: []throttle.Window{{Name: "w", Limit: 1, Period: 10 * time.Second}},
		}}})
		expect.Must(t, err)
		var spans spanRecorder
		tracing := expect.Got(tasktrace.New(tasktrace.Config{Propagator: propagation.TraceContext{}, TracerProvider: &spans}))(t)
		client := expect.Got(worker.NewClient(opt, worker.ClientConfig{Headers: tracing.Headers, Limiter: limiter}))(t)
		defer client.Close()
		ctx := trace.ContextWithSpanContext(t.Context(), enqueuer)
		begun := time.Now()
		acme := worker.Identity{Tenant: "acme\xff"}
		for id, task := range map[string]*asynq.Task{
			"a-now": worker.NewTask(acme, "api:x", nil), "b-then": worker.NewTask(acme, "api:x", nil, asynq.ProcessIn(15*time.Second)),
			"c-unmatched": asynq.NewTask("other", nil), "d-unmatched-then": asynq.NewTask("other", nil, asynq.ProcessIn(30*time.Second)),
			"e-unique": worker.NewTask(acme, "api:y", nil, asynq.Unique(time.Hour), asynq.ProcessIn(35*time.Second)),
		} {
			expect.Must(t, expect.ErrOf(client.EnqueueContext(ctx, task, asynq.TaskID(id), asynq.MaxRetry(1))))
		}
		time.Sleep(5 * time.Second)

		server := expect.Got(worker.NewServer(opt, asynq.Config{
			DelayedTaskCheckInterval: 100 * time.Millisecond, LogLevel: asynq.FatalLevel,
			RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Second },
		}, worker.Config{Limiter: limiter}))(t)
		var runs sync.Map
		if err := server.Start(tracing.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			id, _ := asynq.GetTaskID(ctx)
			runs.Store(id, trace.SpanContextFromContext(ctx).TraceID())
			if retried, _ := asynq.GetRetryCount(ctx); id == "c-unmatched" && retried == 0 {
				return errors.New("fails once")
			}
			return nil
		}))); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		server.Shutdown()

		expect.Equal(t, len(spans.spans), 5, "spans, want 5")
		wants := map[string]time.Duration{
			"a-now":            5 * time.Second,
			"b-then":           15 * time.Second,
			"c-unmatched":      5 * time.Second,
			"d-unmatched-then": 30 * time.Second,
			"e-unique":         35 * time.Second,
		}
		for _, s := range spans.spans {
			id := s.attributes["sluice.task_id"]
			want := wants[id]
			if s.name != "sluice.wait" || !s.begun.Equal(begun) || s.end.Sub(begun) < want ||
				s.end.Sub(begun) > want+time.Second || // asynq's times are whole seconds
				s.parent.SpanID() != enqueuer.SpanID() {
				t.Errorf("%s: %s from %v to %v, parent %v, want %v",
					id, s.name, s.begun.Sub(begun), s.end.Sub(begun), s.parent.SpanID(), want)
			}
			matched, a := id[2] != 'u' || id == "e-unique", s.attributes
			expect.That(t, matched == (a["sluice.policy"] == "api") && matched == (a["sluice.tenant"] == "acme\uFFFD"), id, "attributes", s.attributes)
		}
		runs.Range(func(id, traceID any) bool {
			delete(wants, id.(string))
			expect.That(t, traceID == enqueuer.TraceID(), id, "ran in the trace", traceID)
			return true
		})
		expect.That(t, len(wants) <= 0, "did not run:", wants)
	})
}

func TestConfigIsChecked(t *testing.T) {
	for want, c := range map[string]tasktrace.Config{
		"tasktrace: Config.Propagator is nil: must be such as propagation.TraceContext{}":   {},
		"tasktrace: Config.TracerProvider is nil: must be such as otel.GetTracerProvider()": {Propagator: propagation.TraceContext{}},
	} {
		_, err := tasktrace.New(c)
		expect.That(t, err != nil && err.Error() == want, err, "want", want)
	}
}

// The span of a wait names the window that held the task.
func TestAWaitNamesTheWindowThatHeldTheTask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var spans spanRecorder
		tracing := expect.Got(tasktrace.New(tasktrace.Config{Propagator: propagation.TraceContext{}, TracerProvider: &spans}))(t)
		w := workertest.Start(t, workertest.Config{
			Client:  worker.ClientConfig{Headers: tracing.Headers},
			Handler: tracing.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return nil })),
			Policies: []throttle.Policy{{Name: "api", Match: []string{"*"}, Windows: []throttle.Window{
				{Name: "burst", Limit: 1, Period: 3 * time.Second}, {Name: "provider", Limit: 2, Period: time.Minute, Shared: true},
			}}},
		})
		for range 3 {
			w.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "call", nil))
		}
		w.Drain(time.Hour)
		var held []string
		for _, s := range spans.spans {
			held = append(held, s.attributes["sluice.window"])
		}
		want := []string{"", "burst", "provider"}
		expect.That(t, slices.Equal(held, want), "held by", held, ", want", want)
	})
}

// Start refuses a nil handler, whether or not it is traced.
func TestThereIsNothingToTraceInNoHandler(t *testing.T) {
	opt := throttletest.InMemory(t)
	tracing := expect.Got(tasktrace.New(tasktrace.Config{Propagator: propagation.TraceContext{}, TracerProvider: noop.NewTracerProvider()}))(t)
	server := asynq.NewServer(opt, asynq.Config{LogLevel: asynq.FatalLevel})
	if err := server.Start(tracing.Middleware(nil)); err == nil {
		server.Shutdown()
		t.Error("a server has started without a handler: each task would fail")
	}
}
