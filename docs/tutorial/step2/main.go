// Step 2 of the tutorial: the server throttles, the client is still asynq's.
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

const contacts = 9

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
			Match: []string{"crm:*"}, // the task types that it guards
			Windows: []throttle.Window{
				{Name: "account", Limit: 3, Period: 2 * time.Second, Margin: 500 * time.Millisecond},
			},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}

	redisOpt := asynq.RedisClientOpt{Addr: m.Addr()}
	server, err := worker.NewServer(
		redisOpt,
		asynq.Config{Concurrency: 10, LogLevel: asynq.FatalLevel},
		worker.Config{
			Limiter: limiter,
			Identify: func(*asynq.Task) (worker.Identity, error) {
				return worker.Identity{Tenant: "us"}, nil // one tenant, for now
			},
		},
	)
	if err != nil {
		log.Fatal(err)
	}
	s := &syncer{url: url}
	s.tries.Add(contacts)
	mux := asynq.NewServeMux()
	mux.HandleFunc("crm:sync", s.sync)
	if err := server.Start(mux); err != nil {
		log.Fatal(err)
	}
	defer server.Shutdown()

	client := asynq.NewClient(redisOpt)
	defer client.Close()
	for i := range contacts {
		task := asynq.NewTask("crm:sync", fmt.Appendf(nil, "contact %d", i+1))
		if _, err := client.Enqueue(task); err != nil {
			log.Fatal(err)
		}
	}

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
	return nil
}
