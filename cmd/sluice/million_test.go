package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

// How long operators' commands take while 1,000,000 tickets of 100,000 tenants wait, without the process's start:
//
//	go test -run - -bench AtAMillion -benchtime 10x ./cmd/sluice
func BenchmarkCommandsAtAMillion(b *testing.B) {
	addr := throttletest.Redis(b)
	client := redis.NewClient(&redis.Options{Addr: addr, ReadTimeout: time.Minute})
	defer client.Close()
	policies := []throttle.Policy{{Name: "p", Match: []string{"call"}, Windows: []throttle.Window{
		{Name: "shared", Limit: 100, Period: time.Second, Shared: true}, {Name: "own", Limit: 5, Period: time.Minute},
	}}}
	limiter := valueOf(throttle.New(throttle.Config{Client: client, Policies: policies}))(b)
	const tenants, each, chunk = 100_000, 10, 500
	for at := 0; at < tenants*each; at += chunk {
		requests := make([]throttle.Request, chunk)
		for i := range requests {
			n := at + i
			requests[i] = throttle.Request{Policy: "p", Tenant: fmt.Sprint("tenant-", n%tenants), Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(n)}}
		}
		must(b, errOf(limiter.Line("p").Join(b.Context(), requests)))
	}
	store := control.StoreOf(limiter)
	must(b, errOf(store.Publish(b.Context(), policies, 0, control.Author{Who: "ada", Why: "test"})))
	tasks, err := worker.NewClient(asynq.RedisClientOpt{Addr: addr}, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute})
	must(b, err)
	defer tasks.Close()
	_, err = tasks.EnqueueContext(b.Context(), worker.NewTask(worker.Identity{Tenant: "tenant-7"}, "call", nil), asynq.TaskID("last"))
	must(b, err)
	for _, command := range [][]string{{"status"}, {"explain", "last"}, {"simulate", "--limit", "shared=200"}} {
		b.Run(command[0], func(b *testing.B) {
			for b.Loop() {
				e := runMain(b.Context(), "", append(command, "--redis", "redis://"+addr)...)
				require(b, e.code == exitDone, e.stderr)
			}
		})
	}
}
