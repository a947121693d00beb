package queuetest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// zoneWindow is the gcra window that keeps to a zone. One call may be on its way for up to `jitter` longer than the
// next: as much of the burst is left free, or, where there is none, of the time between any two.
func zoneWindow(z servers.Zone, name string, jitter time.Duration) throttle.Window {
	w := throttle.Window{Name: name, Algorithm: throttle.AlgorithmGCRA, Limit: int64(z.Rate), Period: time.Second, Shared: true}
	each := time.Second / time.Duration(z.Rate)
	free := int64((jitter + each - 1) / each)
	if w.Burst = int64(z.Burst) + 1 - free; w.Burst < 1 {
		w.Burst = 1
		w.Margin = min((jitter * time.Duration(z.Rate)).Truncate(time.Microsecond), w.Period)
	}
	return w
}

// nginx has limits of its own, and never answers 503 to throttled jobs.
func TestNginxNeverRefuses(t *testing.T) {
	for _, row := range []struct {
		name          string
		jobs          int
		jitter, bound time.Duration // allowed for at first, and at most: a margin is no longer than its period
		zones         []servers.Zone
	}{
		{"two limits at once", 300, 200 * time.Millisecond, time.Minute, []servers.Zone{{Rate: 100, Burst: 40}, {Rate: 80, Burst: 100}}},
		{"a burst", 300, 300 * time.Millisecond, time.Minute, []servers.Zone{{Rate: 150, Burst: 60}}},
		{"no burst", 30, 10 * time.Millisecond, 200 * time.Millisecond, []servers.Zone{{Rate: 5}}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			// How long calls are on their way depends on the machine. A run in which it was longer
			// than the policy allows for proves nothing. It is repeated with three times as much.
			for attempt, jitter := 1, row.jitter; ; attempt, jitter = attempt+1, min(3*jitter, row.bound) {
				run := throughNginx(t, row.jobs, jitter, row.zones)
				t.Logf("%d jobs in %v, up to %v on their way, %v allowed for; utilization %.3f; %d refused",
					row.jobs, run.took.Round(time.Millisecond), run.transit.Round(time.Millisecond), jitter, run.utilization, run.refused)
				switch {
				case run.refused == 0:
					return
				case run.transit <= jitter:
					t.Fatal("nginx refused calls that kept to its limits")
				case attempt == 8:
					t.Fatalf("calls are on their way for up to %v: longer than any policy here allows for", run.transit)
				}
			}
		})
	}
}

type nginxRun struct {
	refused     int
	took        time.Duration // from the first answer to the last
	transit     time.Duration // the longest from a grant to its answer
	utilization float64
}

// throughNginx runs jobs of one call each by workers on a Redis of their own.
func throughNginx(t *testing.T, jobs int, jitter time.Duration, zones []servers.Zone) nginxRun {
	var windows []throttle.Window
	for i, z := range zones {
		windows = append(windows, zoneWindow(z, fmt.Sprintf("zone%d", i), jitter))
	}
	api := throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows}
	s := sitetest.New(t, throttletest.Client(t, throttletest.Redis(t)), api)
	var served atomic.Int64
	far := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served.Add(1) }))
	defer far.Close()
	proxy := servers.Nginx(t, far.Listener.Addr().String(), zones...)
	calls := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	defer calls.CloseIdleConnections()
	call := func(path string) int {
		resp, err := calls.Get("http://" + proxy.Addr + path)
		if err != nil {
			t.Error(err)
			return 0
		}
		defer resp.Body.Close()
		io.Copy(io.Discard, resp.Body)
		return resp.StatusCode
	}

	client := s.Client(s.Limiter)

	var mu sync.Mutex
	var first, last time.Time
	var done int
	var run nginxRun
	server := s.Serve(func(ctx context.Context, _ *asynq.Task) error {
		status := call("/")
		now := time.Now()
		d, _ := worker.FromContext(ctx).Decision()
		mu.Lock()
		defer mu.Unlock()
		if first.IsZero() {
			first = now
		}
		done, last, run.transit = done+1, now, max(run.transit, now.Sub(d.At))
		if status != http.StatusOK {
			run.refused++
		}
		return nil
	}, func(c *asynq.Config, _ *worker.Config) { c.Concurrency = 16 })
	for range jobs {
		_, err := client.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "acme"}, "call", nil))
		expect.Require(t, err == nil, err)
	}
	s.Wait("all jobs are done", func() bool { mu.Lock(); defer mu.Unlock(); return done == jobs })
	server.Shutdown()

	// What nginx itself wrote down, and what came through it.
	logged := func(status int) int {
		n, err := proxy.Logged(status)
		expect.That(t, err == nil, err)
		return n
	}
	s.Wait("nginx has logged all calls", func() bool { return logged(200)+logged(503) >= jobs })
	refused := logged(503)
	expect.That(t, refused == run.refused && int(served.Load()) == jobs-refused, refused, served.Load(), run.refused)
	// It does refuse callers that do not keep to its limits.
	s.Wait("nginx refuses somebody", func() bool {
		var herd sync.WaitGroup
		for range 4 * (zones[0].Burst + 1) {
			herd.Go(func() { call("/") })
		}
		herd.Wait()
		return logged(503) > run.refused
	})

	ideal := time.Duration(0)
	for _, z := range zones {
		ideal = max(ideal, time.Duration(jobs-1-z.Burst)*time.Second/time.Duration(z.Rate))
	}
	run.took = last.Sub(first)
	run.utilization = ideal.Seconds() / run.took.Seconds()
	return run
}
