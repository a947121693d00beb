//go:build drill

// Package drill records what Prometheus would scrape during real outages, for scripts/alerts.
package drill

import (
	"compress/gzip"
	"context"
	"fmt"
	"maps"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/worker"
)

const scrapeEvery = 5 * time.Second

// A drill is a fleet of three workers, a client, and what watches them.
type drill struct {
	*testing.T
	setup
	begun   time.Time
	client  *worker.Client
	redis   *exec.Cmd
	dir     string
	workers []*process

	mu      sync.Mutex
	scrapes recording
}

// startRedis starts a redis-server that keeps its data, where the last one was.
func (d *drill) startRedis() {
	d.Helper()
	_, port, _ := cutLast(d.Redis)
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

func cutLast(addr string) (host, port string, ok bool) {
	for i := len(addr) - 1; i >= 0; i-- {
		if addr[i] == ':' {
			return addr[:i], addr[i+1:], true
		}
	}
	return addr, "", false
}

func (d *drill) stopRedis() {
	_ = d.redis.Process.Kill()
	_ = d.redis.Wait()
}

// newDrill starts a fleet, and watches it until the test ends.
func newDrill(t *testing.T, s setup) *drill {
	t.Helper()
	port, err := servers.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	s.Redis = fmt.Sprintf("127.0.0.1:%d", port)
	d := &drill{T: t, setup: s, dir: t.TempDir()}
	d.startRedis()
	t.Cleanup(d.stopRedis)
	limiter, metrics, err := s.limiter()
	if err != nil {
		t.Fatal(err)
	}
	own := httptest.NewServer(metrics)
	t.Cleanup(own.Close)
	if d.client, err = worker.NewClient(asynq.RedisClientOpt{Addr: s.Redis}, worker.ClientConfig{Limiter: limiter}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.client.Close() })
	for i := range 3 {
		d.workers = append(d.workers, s.start(t, fmt.Sprint("worker-", i+1)))
	}
	d.begun = time.Now()
	ctx, stop := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	names := used(t)
	for _, p := range append([]*process{{name: "client", url: own.URL}}, d.workers...) {
		ended.Go(func() {
			for tick := time.NewTicker(scrapeEvery); ; {
				at := time.Now()
				series := scraped(p.url, names)
				d.mu.Lock()
				d.scrapes = append(d.scrapes, scrape{at, p.name, series})
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

// until waits for a time of the story.
func (d *drill) until(at time.Duration) { time.Sleep(time.Until(d.begun.Add(at))) }

// enqueue enqueues tasks of a tenant.
func (d *drill) enqueue(n int, tenant, queue string) {
	for n > 0 {
		tasks := make([]*asynq.Task, min(n, 5000))
		for i := range tasks {
			tasks[i] = worker.NewTask(worker.Identity{Tenant: tenant}, "api:call", nil)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		d.client.EnqueueBulk(ctx, tasks, asynq.Queue(queue))
		cancel()
		n -= len(tasks)
	}
}

// steadily enqueues some tasks each second, from one time of the story to another.
func (d *drill) steadily(from, to time.Duration, each func()) {
	go func() {
		d.until(from)
		for tick := time.NewTicker(time.Second); time.Since(d.begun) < to; <-tick.C {
			each()
		}
	}()
}

var (
	queues = map[string]int{"default": 1}
	strict = map[string]int{"live": 2, "bulk": 1}
)

// A story is what happens to a fleet. What has to fire then is in scripts/alerts.
type story struct {
	name  string
	setup setup
	play  func(d *drill)
}

const (
	s      = time.Second
	minute = time.Minute
)

var stories = []story{{
	name:  "redis",
	setup: setup{Limit: 10, Queues: queues},
	play: func(d *drill) {
		five := []string{"acme", "beta", "zeta", "small", `"><img src=x onerror=alert(1)>`}
		d.steadily(0, 17*minute, func() {
			for _, tenant := range five {
				go d.enqueue(1, tenant, "default")
			}
		})
		d.until(time.Minute)
		d.stopRedis()
		d.until(87 * s)
		d.startRedis()
		d.until(5 * minute)
		_ = d.redis.Process.Signal(syscall.SIGSTOP)
		d.until(5*minute + 44*s)
		_ = d.redis.Process.Signal(syscall.SIGCONT)
		d.until(9 * minute)
		d.workers[2].kill()
		d.until(10 * minute)
		d.stopRedis()
		d.until(15 * minute)
		d.startRedis()
		d.until(19 * minute)
	},
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

// The stories, in real time, all at once: some 20 minutes.
func TestRecord(t *testing.T) {
	for _, story := range stories {
		t.Run(story.name, func(t *testing.T) {
			t.Parallel()
			d := newDrill(t, story.setup)
			story.play(d)
			d.mu.Lock()
			defer d.mu.Unlock()
			d.scrapes.save(t, "../alerts/testdata/"+story.name+".gz")
		})
	}
}

// A scrape is what one process answered, or nothing if it did not.
type scrape struct {
	at       time.Time
	instance string
	series   map[string]float64 // by `name{labels}`
}

// A recording is all scrapes of a story, in order.
type recording []scrape

// used are the names of the metrics in the rules.
func used(t *testing.T) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../../docs/howto/metrics/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, name := range regexp.MustCompile(`sluice_[a-z_]+`).FindAllString(string(text), -1) {
		names[name] = true
	}
	return names
}

// save writes a recording.
func (r recording) save(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
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
