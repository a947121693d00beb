// Command worker-demo is an example of a worker. Four tenants have jobs for an API that publishes its
// limits, and enforces them. The worker keeps to the limits, and obeys when the API halves one of
// them without notice. It runs for about 25 seconds, and needs nothing but itself.
package main

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/worker"
)

//go:embed policies.yml
var policyFile []byte

type tenant struct {
	name  string
	jobs  int
	plain bool // an asynq.Client enqueues its jobs, not a worker.Client
}

var tenants = []tenant{
	{name: "large", jobs: 40},
	{name: "medium", jobs: 24},
	{name: "small", jobs: 8},
	{name: "plain", jobs: 6, plain: true},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(os.Args) > 1 {
		fmt.Fprintln(os.Stderr, "worker-demo takes no arguments: run it, and read cmd/worker-demo/main.go.\n"+
			"The tool for your own workers is sluice: go run ./cmd/sluice -h")
		os.Exit(2)
	}
	server := miniredis.NewMiniRedis() // a Redis inside this process; yours is a server
	server.ClockTTL(true)
	if err := server.Start(); err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	api := newAPI()
	go http.Serve(listener, api)

	d := &demo{
		api: api, client: &http.Client{Timeout: 10 * time.Second}, out: os.Stdout,
		redis: asynq.RedisClientOpt{Addr: server.Addr()}, url: "http://" + listener.Addr().String(),
	}
	if err := d.run(ctx); err != nil {
		log.Fatal(err)
	}
}

// A demo is one run. Of its fields your own handler would need only the client.
type demo struct {
	api    *api
	client *http.Client
	out    io.Writer
	redis  asynq.RedisConnOpt
	url    string

	mu      sync.Mutex
	begun   time.Time                  // when the first job was enqueued
	denied  map[string]bool            // by ID: jobs that did not fit when a worker picked them up
	ended   chan struct{}              // closed when all jobs are done
	refused map[string]int             // by tenant: calls that the API refused
	retries int                        // of jobs that are done
	waits   map[string][]time.Duration // by tenant: from begun to the start of each job that is done
}

// run enqueues all jobs, and works on them until they are done or the context ends.
func (d *demo) run(ctx context.Context) error {
	d.denied, d.ended = map[string]bool{}, make(chan struct{})
	d.refused, d.waits = map[string]int{}, map[string][]time.Duration{}
	policies, err := policyfile.Parse("policies.yml", policyFile) // or Load, for a path
	if err != nil {
		return err
	}
	limits := d.redis.MakeRedisClient().(redis.UniversalClient)
	defer limits.Close()
	limiter, err := throttle.New(throttle.Config{Client: limits, Logger: d.logger(slog.LevelWarn), Policies: policies})
	if err != nil {
		return err
	}
	d.introduce()
	if err := d.enqueue(ctx, limiter); err != nil && ctx.Err() == nil {
		return err
	}

	server, err := worker.NewServer(
		d.redis,
		asynq.Config{Concurrency: 16, LogLevel: asynq.FatalLevel},
		worker.Config{Limiter: limiter, Logger: d.logger(slog.LevelError), OnDecision: d.onDecision},
	)
	if err != nil {
		return err
	}
	mux := asynq.NewServeMux()
	mux.HandleFunc("demo:call", d.call)
	if err := server.Start(mux); err != nil {
		return err
	}
	defer server.Shutdown() // which lets calls under way end

	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-d.ended:
			d.report()
			return nil
		case <-ctx.Done():
			d.progress()
			fmt.Fprintln(d.out, "Interrupted: calls under way end, and the rest is lost with the embedded Redis.")
			return nil
		case <-tick.C:
			d.progress()
		}
	}
}

// enqueue enqueues the jobs of all tenants, in turns.
func (d *demo) enqueue(ctx context.Context, limiter *throttle.Limiter) error {
	// The default timeout is short for a machine that still compiles, and a job that misses it joins the line later.
	client, err := worker.NewClient(d.redis, worker.ClientConfig{Limiter: limiter, LimiterTimeout: 10 * time.Second})
	if err != nil {
		return err
	}
	defer client.Close()
	plain := asynq.NewClient(d.redis)
	defer plain.Close()
	d.begun = time.Now()
	for n := 1; n <= tenants[0].jobs; n++ {
		for _, t := range tenants {
			if n > t.jobs {
				continue
			}
			id := fmt.Sprintf("%s-%d", t.name, n)
			task := worker.NewTask(worker.Identity{Tenant: t.name}, "demo:call", []byte(t.name), asynq.TaskID(id))
			enqueue := client.EnqueueContext
			if t.plain {
				enqueue = plain.EnqueueContext
			}
			if _, err := enqueue(ctx, task); err != nil {
				return err
			}
		}
	}
	return nil
}

// call is the handler. It runs when the job fits all windows of its policy.
func (d *demo) call(ctx context.Context, task *asynq.Task) error {
	tenant, begun := string(task.Payload()), time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.url+"/"+tenant, nil)
	if err != nil {
		return err
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusTooManyRequests:
		d.note(func() { d.refused[tenant]++ })
		wait, _ := httpthrottle.RetryAfter(resp)
		return worker.RetryAfter(max(wait, time.Second)) // pauses the policy on every worker, and costs no retry
	case http.StatusOK:
		retried, _ := asynq.GetRetryCount(ctx)
		d.note(func() {
			d.retries += retried
			d.waits[tenant] = append(d.waits[tenant], begun.Sub(d.begun))
			if d.done() == allJobs() {
				close(d.ended)
			}
		})
		return nil
	}
	return fmt.Errorf("the API answered %s", resp.Status)
}

// onDecision notes which jobs were denied.
func (d *demo) onDecision(ctx context.Context, _ *asynq.Task, decision throttle.Decision) {
	if id, _ := asynq.GetTaskID(ctx); !decision.Granted {
		d.note(func() { d.denied[id] = true })
	}
}

// note runs a function that reads or writes the notes of the run, under the mutex.
func (d *demo) note(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
}

// done returns the number of jobs that are done. The mutex must be held.
func (d *demo) done() (n int) {
	for _, waits := range d.waits {
		n += len(waits)
	}
	return n
}

func allJobs() (n int) {
	for _, t := range tenants {
		n += t.jobs
	}
	return n
}

// logger returns a logger for messages of a level and above.
func (d *demo) logger(level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(d.out, &slog.HandlerOptions{Level: level}))
}
