//go:build drill

// Package drill records what Prometheus would scrape during real outages, for scripts/alerts.
package drill

import (
	"compress/gzip"
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/worker"
)

const scrapeEvery = 5 * time.Second

// A drill is a fleet of three workers, a client, and what watches them.
type drill struct {
	*testing.T
	setup
	begun     time.Time
	calm      atomic.Bool // nothing is enqueued steadily any more
	client    *worker.Client
	inspector *asynq.Inspector
	limiter   *throttle.Limiter
	redis     *exec.Cmd
	refuse    chan string // a Retry-After, which the API answers once
	size      size
	store     *control.Store
	dir       string
	workers   []*workerProcess

	browser http.Client
	url     string // of the page

	mu        sync.Mutex
	called    map[string]int  // the API, by task
	enqueued  map[string]bool // tasks of type api:call
	recording recording
}

// startRedis starts a redis-server that keeps its data, where the last one was.
func (d *drill) startRedis() {
	d.Helper()
	_, port, _ := net.SplitHostPort(d.Redis)
	d.redis = exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", d.dir,
		"--appendonly", "yes", "--save", "", "--logfile", d.dir+"/log")
	if err := d.redis.Start(); err != nil {
		d.Fatal(err)
	}
	client := redis.NewClient(&redis.Options{Addr: d.Redis})
	defer client.Close()
	for range 100 {
		if client.Ping(context.Background()).Err() == nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	d.Fatal("redis-server does not start: is it installed?")
}

func (d *drill) stopRedis() {
	_ = d.redis.Process.Kill()
	_ = d.redis.Wait()
}

// newDrill starts a fleet, and watches it until the test ends.
func newDrill(t *testing.T, s setup, scrapeEvery time.Duration) *drill {
	t.Helper()
	d := &drill{T: t, setup: s, dir: t.TempDir(), refuse: make(chan string, 1), called: map[string]int{}, enqueued: map[string]bool{}}
	port, err := servers.FreePort()
	d.must(err)
	d.Redis = fmt.Sprintf("127.0.0.1:%d", port)
	if s.API != "" {
		d.API = d.serveAPI()
	}
	d.startRedis()
	t.Cleanup(d.stopRedis)
	var metrics http.Handler
	d.limiter, d.store, metrics, err = d.setup.limiter()
	d.must(err)
	exporter := httptest.NewServer(metrics)
	t.Cleanup(exporter.Close)
	d.client, err = worker.NewClient(asynq.RedisClientOpt{Addr: d.Redis}, worker.ClientConfig{Limiter: d.limiter, LimiterTimeout: time.Minute})
	d.must(err)
	t.Cleanup(func() { d.client.Close() })
	for i := range 3 {
		d.workers = append(d.workers, d.start(t, fmt.Sprint("worker-", i+1)))
	}
	d.begun = time.Now()
	ctx, stop := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	names := used(t)
	for _, p := range append([]*workerProcess{{name: "client", url: exporter.URL}}, d.workers...) {
		ended.Go(func() {
			for tick := time.NewTicker(scrapeEvery); ; {
				at := time.Now()
				series := scraped(p.url, names)
				d.mu.Lock()
				d.recording = append(d.recording, scrape{at, p.name, series})
				d.mu.Unlock()
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
			}
		})
	}
	t.Cleanup(func() { stop(); ended.Wait() })
	return d
}

// until waits for a time of the scenario.
func (d *drill) until(at time.Duration) { time.Sleep(time.Until(d.begun.Add(at))) }

// enqueue enqueues tasks of a tenant.
func (d *drill) enqueue(n int, tenant, queue string) { d.enqueueAs("api:call", n, tenant, queue) }

func (d *drill) enqueueAs(kind string, n int, tenant, queue string) {
	for n > 0 {
		tasks := make([]*asynq.Task, min(n, 5000))
		for i := range tasks {
			tasks[i] = worker.NewTask(worker.Identity{Tenant: tenant}, kind, nil)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		all := d.client.EnqueueBulk(ctx, tasks, asynq.Queue(queue))
		cancel()
		d.mu.Lock()
		for _, e := range all {
			if e.Err == nil && kind == "api:call" {
				d.enqueued[e.Info.ID] = true
			}
		}
		d.mu.Unlock()
		n -= len(tasks)
	}
}

// steadily enqueues some tasks each second, from one time of the scenario to another, or until calm.
func (d *drill) steadily(from, to time.Duration, each func()) {
	go func() {
		d.until(from)
		for tick := time.NewTicker(time.Second); time.Since(d.begun) < to && !d.calm.Load(); <-tick.C {
			each()
		}
	}()
}

var (
	queues = map[string]int{"default": 1}
	strict = map[string]int{"live": 2, "bulk": 1}
)

// A drillScenario is what happens to a fleet. What has to fire then is in scripts/alerts.
type drillScenario struct {
	name  string
	setup setup
	play  func(d *drill)
}

const (
	s      = time.Second
	minute = time.Minute
)

var scenarios = []drillScenario{{
	name:  "drill",
	setup: fleet,
	play:  func(d *drill) { playSteps(d, true) },
}, {
	name:  "starving",
	setup: setup{Limit: 20, Queues: strict, Strict: true},
	play: func(d *drill) {
		d.steadily(0, 6*minute, func() { d.enqueue(2, "acme", "live"); d.enqueue(1, "small", "bulk") })
		d.until(90 * s)
		d.enqueue(20*210, "acme", "live") // three and a half minutes of work that goes first
		d.until(7 * minute)
	},
}, {
	name:  "backlog",
	setup: setup{Limit: 50, Queues: queues},
	play: func(d *drill) {
		d.enqueue(100_000, "acme", "default")
		d.until(2 * minute) // it drains
		d.steadily(2*minute, 6*minute, func() { d.enqueue(50, "acme", "default") })
		d.until(9 * minute)
	},
}, {
	name:  "workers",
	setup: setup{Limit: 10, Queues: queues},
	play: func(d *drill) {
		d.enqueue(1500, "acme", "default")
		d.until(time.Minute)
		for _, p := range d.workers {
			p.stop()
		}
		d.until(4 * minute)
	},
}}

// The scenarios, in real time, all at once: some 25 minutes.
func TestRecord(t *testing.T) {
	for _, scenario := range scenarios {
		t.Run(scenario.name, func(t *testing.T) {
			t.Parallel()
			d := newDrill(t, scenario.setup, scrapeEvery)
			scenario.play(d)
			d.mu.Lock()
			defer d.mu.Unlock()
			d.recording.save(t, "../alerts/testdata/"+scenario.name+".gz")
		})
	}
}

// A scrape is what one process answered, or nothing if it did not. A step's name as instance marks the step's begin.
type scrape struct {
	at       time.Time
	instance string
	series   map[string]float64 // by `name{labels}`
}

// A recording is all scrapes of a scenario, in order.
type recording []scrape

// used are the names of the metrics in the rules and their tests.
func used(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, path := range []string{"../../docs/howto/metrics/alerts.yml", "../alerts/alerts_test.go"} {
		text := expect.Got(os.ReadFile(path))(t)
		for _, name := range regexp.MustCompile(`sluice_[a-z_]+`).FindAllString(string(text), -1) {
			names[name] = true
		}
	}
	return names
}

// save writes a recording.
func (r recording) save(t *testing.T, path string) {
	t.Helper()
	f := expect.Got(os.Create(path))(t)
	defer f.Close()
	w := gzip.NewWriter(f)
	defer w.Close()
	for _, s := range r {
		fmt.Fprintf(w, "> %d %s\n", s.at.UnixMilli(), s.instance)
		for _, name := range slices.Sorted(maps.Keys(s.series)) {
			fmt.Fprintf(w, "%s %v\n", name, s.series[name])
		}
	}
}
