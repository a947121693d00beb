package queuetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/apitest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

const (
	apiLimit  = 20
	apiPeriod = 2 * time.Second

	kept = 7. / 8 // of the rate, when a refusal lowers it
)

// An adaptingAPI counts the calls of each tenant, and answers after 50 ms.
type adaptingAPI struct {
	count func() apitest.Count

	mu       sync.Mutex
	start    time.Time
	tenants  map[string]apitest.Count
	accepted []time.Duration
	refused  []time.Duration
}

func (a *adaptingAPI) call(tenant string) int {
	status := a.decide(tenant)
	time.Sleep(50 * time.Millisecond)
	return status
}

func (a *adaptingAPI) decide(tenant string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.tenants == nil {
		a.tenants, a.start = map[string]apitest.Count{}, time.Now()
	}
	if a.tenants[tenant] == nil {
		a.tenants[tenant] = a.count()
	}
	now := time.Since(a.start)
	if !a.tenants[tenant](now) {
		a.refused = append(a.refused, now)
		return http.StatusTooManyRequests
	}
	a.accepted = append(a.accepted, now)
	return http.StatusOK
}

// RoundTrip is for fake time: a call is on its way for 0.5 ms, and 2 ms more on average.
func (a *adaptingAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	time.Sleep(500*time.Microsecond + time.Duration(rand.ExpFloat64()*float64(2*time.Millisecond)))
	return &http.Response{
		StatusCode: a.call(strings.TrimPrefix(r.URL.Path, "/")),
		Header:     http.Header{}, Body: io.NopCloser(strings.NewReader("")), Request: r,
	}, nil
}

func (a *adaptingAPI) done() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.accepted)
}

func within(times []time.Duration, from, until time.Duration) (n float64) {
	for _, at := range times {
		if at >= from && at < until {
			n++
		}
	}
	return n
}

// refusals is the part of calls that were refused in a time.
func (a *adaptingAPI) refusals(from, until time.Duration) float64 {
	refused := within(a.refused, from, until)
	return refused / (refused + within(a.accepted, from, until))
}

func adaptingPolicy(adapt throttle.Adapt) throttle.Policy {
	return throttle.Policy{
		Name: "api", Match: []string{"*"}, Adapt: adapt,
		Windows: []throttle.Window{{Name: "published", Limit: apiLimit, Period: apiPeriod, Margin: 50 * time.Millisecond}},
	}
}

// work enqueues jobs of two tenants, and runs a server until they are done, for a minute at most.
// They call the API through a transport.
func work(s *sitetest.Site, api *adaptingAPI, jobs int) {
	transport, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{Base: api, Limiter: s.Limiter, LearnOnly: true})
	sitetest.Must(s, err)
	client := s.Client(s.Limiter)
	for i := range jobs {
		task := worker.NewTask(worker.Identity{Tenant: []string{"acme", "umbrella"}[i%2]}, "call", nil)
		if _, err := client.EnqueueContext(s.Context(), task, asynq.MaxRetry(3)); err != nil {
			s.Fatal(err)
		}
	}
	server := s.Serve(func(ctx context.Context, _ *asynq.Task) error {
		d, _ := worker.FromContext(ctx).Decision()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://api/"+d.Tenant, nil)
		if err != nil {
			return err
		}
		resp, err := transport.RoundTrip(r)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return nil
	}, func(c *asynq.Config, _ *worker.Config) {
		c.Concurrency, c.DelayedTaskCheckInterval, c.TaskCheckInterval = 8, time.Second, time.Second
	})
	for until := time.Now().Add(time.Minute); api.done() < jobs && time.Now().Before(until); {
		time.Sleep(100 * time.Millisecond)
	}
	time.Sleep(time.Second)
	server.Shutdown()
}

// meets fails unless all jobs are done, and few calls were refused. It returns how much of the limit was
// used.
func meets(s *sitetest.Site, api *adaptingAPI, jobs int, adapts bool) (utilization float64) {
	s.Helper()
	c := s.Counters()
	end := slices.Max(api.accepted)
	const start = 2 * apiPeriod
	refusals := api.refusals(start, end+1)
	utilization = within(api.accepted, start, end+1) / (2 * apiLimit * (end - start).Seconds() / apiPeriod.Seconds())
	s.Logf("%d jobs in %v, %d refusals; after two periods %.3f of calls, utilization %.3f",
		jobs, end, len(api.refused), refusals, utilization)
	if len(api.accepted) != jobs || c.Failed != 0 || c.Retry != 0 || c.Archived != 0 {
		s.Errorf("%d of %d jobs are done: %+v", len(api.accepted), jobs, c)
	}
	if refusals > apitest.MostRefused {
		s.Errorf("want refusals at most %.2f", apitest.MostRefused)
	}
	if !adapts && len(api.refused) > 0 {
		s.Errorf("%d refusals, want none", len(api.refused))
	}
	return utilization
}

// Jobs of a real worker meet APIs that count differently: none fails, in fake time. More ways to
// count are simulated in throttle/internal/modeltest.
func TestJobsAdaptToAnotherWayToCount(t *testing.T) {
	for _, row := range []struct {
		name   string
		count  func() apitest.Count
		adapts bool // the limiter has to
		runs   int  // their median counts: one run in some twenty lowers its rate twice more than the average
	}{
		{"a leaky bucket without a burst", func() apitest.Count { return apitest.BucketCount(apiLimit, apiPeriod, 1) }, true, 3},
		{"as published", func() apitest.Count { return apitest.PublishedCount(apiLimit, apiPeriod) }, false, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			var used []float64
			for range row.runs {
				synctest.Test(t, func(t *testing.T) {
					const jobs = 250
					s, api := sitetest.NewInBubble(t, adaptingPolicy(throttle.AdaptFull)), &adaptingAPI{count: row.count}
					work(s, api, jobs)
					used = append(used, meets(s, api, jobs, row.adapts))
				})
			}
			slices.Sort(used)
			if least := apitest.LeastUsed * kept; used[row.runs/2] < least {
				t.Errorf("utilization %.3f, want at least %.2f", used, least)
			}
		})
	}
}

// A few refusals of known length cost that time and little more. Where each doubled the time in which
// the limit opens again, these 80 tasks took 111 s in place of 9.
func TestAFewRefusalsCostLittle(t *testing.T) {
	const limit, takes, pause = 8, 10 * time.Millisecond, time.Second
	for name, row := range map[string]struct {
		refused func(i int) bool
		pauses  int // refusals of calls under way together count as one
	}{
		"none":          {func(int) bool { return false }, 0},
		"eight at once": {func(i int) bool { return i < limit }, 1},
		"every tenth":   {func(i int) bool { return i%10 == 9 }, 8},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const jobs = 80
				p := sitetest.Policy(limit, time.Second)
				p.Windows[0].Scope = throttle.ScopeShared
				s := sitetest.NewInBubble(t, p)
				waits := map[string]bool{}
				for i := range jobs {
					if id := fmt.Sprintf("%02d", i); row.refused(i) {
						waits[id] = true
					}
				}
				var mu sync.Mutex
				done, runs := 0, 0
				begun := time.Now()
				var took time.Duration
				refused := len(waits)
				client := s.Client(s.Limiter)
				for i := range jobs {
					id := asynq.TaskID(fmt.Sprintf("%02d", i))
					if _, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(), id, asynq.MaxRetry(0)); err != nil {
						t.Fatal(err)
					}
				}
				s.Serve(func(ctx context.Context, _ *asynq.Task) error {
					id, _ := asynq.GetTaskID(ctx)
					time.Sleep(takes)
					mu.Lock()
					defer mu.Unlock()
					runs++
					if waits[id] {
						delete(waits, id)
						return worker.RetryAfter(pause)
					}
					done++
					took = time.Since(begun)
					return nil
				}, sitetest.Calm, func(c *asynq.Config, _ *worker.Config) { c.Concurrency = limit })
				time.Sleep(40 * time.Second)
				// The first window's worth goes at once. The first pause spaces the rest. Each later one
				// lowers the rate, which does not recover if it is the worst.
				most := takes + time.Duration(row.pauses)*(pause+takes)
				for i, rate := 0, float64(limit); i < max(1, row.pauses); i, rate = i+1, rate*kept {
					calls := float64(jobs+refused-limit) / float64(max(1, row.pauses))
					most += time.Duration(calls / rate * float64(time.Second))
				}
				t.Logf("%d jobs, %d of them refused for 1 s: %v", jobs, refused, took)
				if done != jobs || runs != jobs+refused || took > most+sitetest.Spacing {
					t.Errorf("%d of %d done by %d runs, after %v, want at most %v", done, jobs, runs, took, most)
				}
			})
		})
	}
}
