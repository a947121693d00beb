// Step 4 of the tutorial: policies come from a file, and the API's own word counts.
package main

import (
	"context"
	_ "embed"
	"fmt"
	"log"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/docs/tutorial/crm"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/worker"
)

//go:embed policies.yml
var policyFile []byte

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
	url, end := crm.StartBusy(3, 2*time.Second, 6) // refuses the sixth call, though it is within the limit
	defer end()

	policies, err := policyfile.Parse("policies.yml", policyFile) // or Load, for a path
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := throttle.New(throttle.Config{
		Client:   redis.NewClient(&redis.Options{Addr: m.Addr()}),
		Policies: policies,
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
		if _, err := client.EnqueueContext(context.Background(), task); err != nil {
			log.Fatal(err)
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
	s.pending.Add(len(contacts))
	mux := asynq.NewServeMux()
	mux.HandleFunc("crm:sync", s.sync)
	if err := server.Start(mux); err != nil {
		log.Fatal(err)
	}
	defer server.Shutdown()

	s.pending.Wait()
	fmt.Printf("%d synced, %d refused, %d retries used\n", s.synced.Load(), s.refused.Load(), s.retries.Load())
}

// A syncer copies contacts to the CRM.
type syncer struct {
	url                      string
	synced, refused, retries atomic.Int64
	pending                  sync.WaitGroup // ends when every contact is synced
}

func (s *syncer) sync(ctx context.Context, task *asynq.Task) error {
	retried, _ := asynq.GetRetryCount(ctx)
	s.retries.Add(int64(retried))
	resp, err := http.Post(s.url, "text/plain", nil)
	if err != nil {
		return err
	}
	resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusTooManyRequests:
		s.refused.Add(1)
		fmt.Printf("%s refused\n", task.Payload())
		return worker.RetryAfter(retryAfter(resp)) // pauses the policy, costs no retry
	case http.StatusOK:
		s.synced.Add(1)
		fmt.Printf("%s synced\n", task.Payload())
		s.pending.Done()
		return nil
	}
	return fmt.Errorf("%s: the CRM answered %s", task.Payload(), resp.Status)
}

// retryAfter is how long the API refuses calls: 1 s if it does not say.
func retryAfter(resp *http.Response) time.Duration {
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || seconds < 1 {
		return time.Second
	}
	return time.Duration(seconds) * time.Second
}
