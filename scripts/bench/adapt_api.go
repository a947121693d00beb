package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"

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
func (a *api) drain(
	ctx context.Context, o scenarioOptions,
	mode throttle.Adapt, jobs int, until time.Duration,
) (failed int) {
	check(o.apart(func(o scenarioOptions) {
		s := newSite(o)
		web := httptest.NewServer(a)
		o.atEnd(web.Close)
		policy := throttle.Policy{
			Name: "api", Match: []string{"*"}, Adapt: mode,
			Windows: []throttle.Window{{Name: "published", Limit: apiLimit, Period: apiPeriod, Margin: apiMargin}},
		}
		var done atomic.Int64
		for range 2 {
			s.serveCalls(policy, web.URL, &done)
		}
		s.withOurClient(policy, func(c *worker.Client) { inBatches(ctx, c, callTasks(jobs)) })
		for begun := time.Now(); done.Load() < int64(jobs); time.Sleep(50 * time.Millisecond) {
			check(ctx.Err())
			if until > 0 && time.Since(begun) > until {
				break
			}
			if time.Since(begun) > 4*time.Minute {
				fail("%d of %d jobs are done after 4 minutes", done.Load(), jobs)
			}
		}
		inspector := asynq.NewInspector(s.opt())
		defer inspector.Close()
		info := must(inspector.GetQueueInfo("default"))
		failed = info.Failed + info.Archived + info.Retry
	}))
	return failed
}

func callTasks(n int) []*asynq.Task {
	tasks := make([]*asynq.Task, n)
	for i := range tasks {
		identity := worker.Identity{Tenant: []string{"acme", "umbrella"}[i%2]}
		tasks[i] = worker.NewTask(identity, "call", []byte(fmt.Sprint(i)), asynq.MaxRetry(3))
	}
	return tasks
}

// serveCalls starts a server whose tasks are calls of the URL. It ends with the case.
func (s *site) serveCalls(policy throttle.Policy, url string, done *atomic.Int64) {
	client, limiter := newLimiter(s.addr(), policy)
	quiet := slog.New(slog.DiscardHandler)
	base := &http.Transport{MaxIdleConnsPerHost: 8}
	s.o.atEnd(func() { client.Close(); base.CloseIdleConnections() })
	calls := &http.Client{Transport: must(httpthrottle.NewTransport(
		httpthrottle.TransportConfig{Base: base, LearnOnly: true, Limiter: limiter, Logger: quiet}))}
	config := asynq.Config{Concurrency: 4, LogLevel: asynq.FatalLevel}
	srv := must(worker.NewServer(s.opt(), config, worker.Config{Limiter: limiter, Logger: quiet}))
	check(srv.Start(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
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
	})))
	s.o.atEnd(srv.Shutdown)
}
