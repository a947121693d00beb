package faulttest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Policies and queues are in slots of their own, and no call reaches across: tasks of two queues
// and two policies, of our client and a plain one, wait in line and run.
func TestThrottledTasksRunOnARedisCluster(t *testing.T) {
	t.Parallel()
	opt := asynq.RedisClusterClientOpt{Addrs: []string{sitetest.Cluster(t)}}
	limits := redis.NewClusterClient(&redis.ClusterOptions{Addrs: opt.Addrs})
	defer limits.Close()
	var policies []throttle.Policy
	for _, name := range []string{"a", "b"} {
		policies = append(policies, throttle.Policy{
			Name: name, Match: []string{name + ":*"},
			Windows: []throttle.Window{
				{Name: "each", Limit: 100, Period: time.Minute},
				{Name: "all", Limit: 4, Period: 200 * time.Millisecond, Scope: throttle.ScopeShared},
				{Name: "at-once", Algorithm: throttle.AlgorithmConcurrency, Limit: 2, Scope: throttle.ScopeShared},
			},
		})
	}
	limiter, err := throttle.New(throttle.Config{Client: limits, Policies: policies})
	if err != nil {
		t.Fatal(err)
	}

	ran := make(chan string, 100)
	server, err := worker.NewServer(opt,
		asynq.Config{
			Concurrency: 4, LogLevel: asynq.FatalLevel, Queues: map[string]int{"one": 1, "two": 1},
			TaskCheckInterval: 20 * time.Millisecond,
		},
		worker.Config{Limiter: limiter, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Shutdown()
	err = server.Start(asynq.HandlerFunc(func(_ context.Context, task *asynq.Task) error {
		ran <- string(task.Payload())
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}

	client, err := worker.NewClient(opt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	plain := asynq.NewClient(opt)
	defer plain.Close()
	want := map[string]bool{}
	for i := range 24 {
		name, tenant := []string{"a", "b"}[i%2]+":call", worker.Identity{Tenant: fmt.Sprint("tenant ", i%3)}
		payload := fmt.Sprint("task ", i)
		task := worker.NewTask(tenant, name, []byte(payload), asynq.MaxRetry(0))
		queue := asynq.Queue([]string{"one", "two"}[i/2%2])
		if i%6 == 0 {
			_, err = plain.Enqueue(task, queue)
		} else {
			_, err = client.EnqueueContext(t.Context(), task, queue)
		}
		if err != nil {
			t.Fatal(err)
		}
		want[payload] = true
	}
	timeout := time.After(time.Minute)
	for len(want) > 0 {
		select {
		case payload := <-ran:
			if !want[payload] {
				t.Errorf("%s ran twice", payload)
			}
			delete(want, payload)
		case <-timeout:
			t.Fatalf("never ran: %v", want)
		}
	}
}
