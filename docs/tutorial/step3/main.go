// Step 3 of the tutorial: the client names tenants, and tells when a task will start.
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/docs/tutorial/crm"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// The contacts to sync, in the order in which they come.
var contacts = []struct{ tenant, name string }{
	{"acme", "a1"}, {"acme", "a2"}, {"acme", "a3"}, {"acme", "a4"}, {"acme", "a5"}, {"acme", "a6"},
	{"beta", "b1"}, {"beta", "b2"}, {"beta", "b3"},
}

func main() {
	m, err := miniredis.Run() // an embedded Redis; yours is a server
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	url, end := crm.Start(3, 2*time.Second) // refuses a fourth call within 2 s
	defer end()

	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: m.Addr()}),
		Policies: []throttle.Policy{{
			Name:  "crm",
			Match: []string{"crm:*"},
			Windows: []throttle.Window{
				{Name: "account", Limit: 3, Period: 2 * time.Second, Margin: 500 * time.Millisecond, Shared: true}, // shared by all tenants
				{Name: "tenant", Limit: 100, Period: time.Minute},                                                  // of each tenant
			},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}

	redisOpt := asynq.RedisClientOpt{Addr: m.Addr()}
	client, err := worker.NewClient(redisOpt, worker.ClientConfig{Limiter: limiter, LimiterTimeout: 5 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	for _, c := range contacts {
		task := worker.NewTask(worker.Identity{Tenant: c.tenant}, "crm:sync", []byte(c.name))
		var start worker.ExpectedStart
		if _, err := client.EnqueueContext(context.Background(), task, worker.ReportStart(&start)); err != nil {
			log.Fatal(err)
		}
		if !start.At.IsZero() {
			fmt.Printf("%s starts in %v\n", c.name, time.Until(start.At).Round(time.Second))
		}
	}

	server, err := worker.NewServer(
		redisOpt,
		asynq.Config{Concurrency: 1, LogLevel: asynq.FatalLevel}, // one at a time: the order shows
		worker.Config{Limiter: limiter},
	)
	if err != nil {
		log.Fatal(err)
	}
	s := &syncer{url: url}
	s.tries.Add(len(contacts))
	mux := asynq.NewServeMux()
	mux.HandleFunc("crm:sync", s.sync)
	if err := server.Start(mux); err != nil {
		log.Fatal(err)
	}
	defer server.Shutdown()

	s.tries.Wait()
	fmt.Printf("%d synced, %d failed\n", s.synced.Load(), s.failed.Load())
}

// A syncer copies contacts to the CRM.
type syncer struct {
	url            string
	synced, failed atomic.Int64
	tries          sync.WaitGroup // ends when every task was tried once
}

func (s *syncer) sync(ctx context.Context, task *asynq.Task) error {
	retried, _ := asynq.GetRetryCount(ctx)
	if retried == 0 {
		defer s.tries.Done()
	}
	resp, err := http.Post(s.url, "text/plain", nil)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		s.failed.Add(1)
		return fmt.Errorf("%s: the CRM answered %s", task.Payload(), resp.Status)
	}
	s.synced.Add(1)
	fmt.Printf("%s synced\n", task.Payload())
	return nil
}
