package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/apitest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/worker"
)

// An api is an HTTP server on loopback that counts the calls of each tenant in its own way. It
// answers after 50 ms, without any field that says more than the status.
type api struct {
	of func() apitest.Count

	mu       sync.Mutex
	start    time.Time
	tenants  map[string]apitest.Count
	accepted []time.Duration
	refused  []time.Duration
}

func newAPI(of func() apitest.Count) *api {
	return &api{of: of, tenants: map[string]apitest.Count{}}
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ok := a.decide(strings.TrimPrefix(r.URL.Path, "/"))
	time.Sleep(50 * time.Millisecond)
	if !ok {
		w.WriteHeader(http.StatusTooManyRequests)
	}
}

func (a *api) decide(tenant string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.start.IsZero() {
		a.start = time.Now()
	}
	if a.tenants[tenant] == nil {
		a.tenants[tenant] = a.of()
	}
	at := time.Since(a.start)
	if !a.tenants[tenant](at) {
		a.refused = append(a.refused, at)
		return false
	}
	a.accepted = append(a.accepted, at)
	return true
}

// count returns how many of some calls came in a time.
func (a *api) count(calls []time.Duration, from, until time.Duration) (n float64) {
	for _, at := range calls {
		if at >= from && at < until {
			n++
		}
	}
	return n
}

// end is when the last call was accepted.
func (a *api) end() time.Duration {
	if len(a.accepted) == 0 {
		return 0
	}
	return slices.Max(a.accepted) + 1
}

// refusals is the part of calls that were refused from a time on.
func (a *api) refusals(from time.Duration) float64 {
	refused := a.count(a.refused, from, 1<<62)
	return refused / (refused + a.count(a.accepted, from, 1<<62))
}

// utilization is the part of the published limit of both tenants that was used in a time.
func (a *api) utilization(from, until time.Duration) float64 {
	return a.count(a.accepted, from, until) / (2 * apiLimit * (until - from).Seconds() / apiPeriod.Seconds())
}

// drain has two servers with four slots each work off jobs of two tenants, with three retries each,
// until all are done, or for a time. It returns how many have failed, or lost a retry.
func (a *api) drain(ctx context.Context, mode throttle.Adapt, jobs int, until time.Duration) (failed int, err error) {
	redisServer, err := startServer(20)
	if err != nil {
		return 0, err
	}
	defer redisServer.stop()
	web := httptest.NewServer(a)
	defer web.Close()
	policy := throttle.Policy{
		Name: "api", Match: []string{"*"}, Adapt: mode,
		Windows: []throttle.Window{{Name: "published", Limit: apiLimit, Period: apiPeriod, Margin: apiMargin}},
	}
	redisOpt := asynq.RedisClientOpt{Addr: redisServer.process.Addr}
	var done atomic.Int64
	for range 2 {
		end, err := a.serve(redisOpt, policy, web.URL, &done)
		if err != nil {
			return 0, err
		}
		defer end()
	}
	if err := enqueueCalls(ctx, redisOpt, policy, jobs); err != nil {
		return 0, err
	}
	for begun := time.Now(); done.Load() < int64(jobs); time.Sleep(50 * time.Millisecond) {
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		if until > 0 && time.Since(begun) > until {
			break
		}
		if time.Since(begun) > 4*time.Minute {
			return 0, fmt.Errorf("%d of %d jobs are done after 4 minutes", done.Load(), jobs)
		}
	}
	inspector := asynq.NewInspector(redisOpt)
	defer inspector.Close()
	info, err := inspector.GetQueueInfo("default")
	if err != nil {
		return 0, err
	}
	return info.Failed + info.Archived + info.Retry, nil
}

func (a *api) serve(redisOpt asynq.RedisClientOpt, policy throttle.Policy, url string, done *atomic.Int64) (end func(), err error) {
	client, limiter, err := newLimiter(redisOpt.Addr, policy)
	if err != nil {
		return nil, err
	}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	base := &http.Transport{MaxIdleConnsPerHost: 8}
	transport, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{Base: base, LearnOnly: true, Limiter: limiter, Logger: quiet})
	if err != nil {
		return nil, err
	}
	calls := &http.Client{Transport: transport}
	srv, err := worker.NewServer(redisOpt, asynq.Config{Concurrency: 4, LogLevel: asynq.FatalLevel}, worker.Config{Limiter: limiter, Logger: quiet})
	if err != nil {
		return nil, err
	}
	if err := srv.Start(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
		d, _ := worker.FromContext(ctx).Decision()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/"+d.Tenant, nil)
		if err != nil {
			return err
		}
		answer, err := calls.Do(request)
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return errors.New(answer.Status)
		}
		done.Add(1)
		return nil
	})); err != nil {
		return nil, err
	}
	return func() {
		srv.Shutdown()
		client.Close()
		base.CloseIdleConnections()
	}, nil
}

func enqueueCalls(ctx context.Context, redisOpt asynq.RedisClientOpt, policy throttle.Policy, jobs int) error {
	limits := redis.NewClient(&redis.Options{Addr: redisOpt.Addr})
	defer limits.Close()
	limiter, err := throttle.New(throttle.Config{Client: limits, Policies: []throttle.Policy{policy}})
	if err != nil {
		return err
	}
	client, err := worker.NewClient(redisOpt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		return err
	}
	defer client.Close()
	tasks := make([]*asynq.Task, jobs)
	for i := range tasks {
		identity := worker.Identity{Tenant: []string{"acme", "umbrella"}[i%2]}
		tasks[i] = worker.NewTask(identity, "call", []byte(fmt.Sprint(i)), asynq.MaxRetry(3))
	}
	for batch := range slices.Chunk(tasks, 500) {
		for _, result := range client.EnqueueBatch(ctx, batch) {
			if result.Err != nil {
				return result.Err
			}
		}
	}
	return nil
}
