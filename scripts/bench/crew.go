package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A crew is a setup of asynq's servers, plain or throttled by a policy. Other settings are the
// defaults.
type crew struct {
	policy  *throttle.Policy // nil: plain asynq
	servers int              // 0 is one
	slots   int              // of each: asynq.Config.Concurrency
	work    time.Duration    // of every handler
	queues  map[string]int   // asynq.Config.Queues

	denied func(id string, d throttle.Decision) // is called with every denial, if not nil
}

// plain returns the same crew without a policy.
func (c crew) plain() crew {
	c.policy, c.denied = nil, nil
	return c
}

// A shift is a crew at work, or not yet.
type shift struct {
	calls []*callLog // of each server's limiter
	ends  []func()
}

// start starts the servers, each with connections and a limiter of its own.
func (s *shift) start(c crew, addr string, j *startLog) {
	for i := range cmp.Or(c.servers, 1) {
		if c.policy == nil {
			s.startPlain(c, i, addr, j)
		} else {
			s.startThrottled(c, i, addr, j)
		}
	}
}

// end shuts all servers down as a deploy does.
func (s *shift) end() {
	var all sync.WaitGroup
	for _, end := range s.ends {
		all.Go(end)
	}
	all.Wait()
	s.ends = nil
}

func (c crew) config() asynq.Config {
	return asynq.Config{Concurrency: c.slots, LogLevel: asynq.FatalLevel, Queues: c.queues}
}

func (s *shift) startPlain(c crew, server int, addr string, j *startLog) {
	srv := asynq.NewServer(asynq.RedisClientOpt{Addr: addr}, c.config())
	check(srv.Start(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
		id, _ := asynq.GetTaskID(ctx)
		j.start(start{at: time.Now(), id: id, server: server})
		time.Sleep(c.work)
		return nil
	})))
	s.ends = append(s.ends, srv.Shutdown)
}

func (s *shift) startThrottled(c crew, server int, addr string, j *startLog) {
	client, limiter := newLimiter(addr, *c.policy)
	calls := &callLog{}
	client.AddHook(calls)
	srv := must(worker.NewServer(asynq.RedisClientOpt{Addr: addr}, c.config(), worker.Config{
		Limiter: limiter,
		Logger:  slog.New(slog.DiscardHandler),
		OnDecision: func(ctx context.Context, _ *asynq.Task, d throttle.Decision) {
			if d.Granted {
				return
			}
			j.deny()
			if c.denied != nil {
				id, _ := asynq.GetTaskID(ctx)
				c.denied(id, d)
			}
		},
	}))
	check(srv.Start(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
		at := time.Now()
		d, _ := worker.FromContext(ctx).Decision()
		id, _ := asynq.GetTaskID(ctx)
		s := start{at: at, id: id, server: server, tenant: d.Tenant}
		if d.Granted && d.FailedOpen == nil {
			s.granted = d.At
		}
		j.start(s)
		time.Sleep(c.work)
		return nil
	})))
	s.calls = append(s.calls, calls)
	s.ends = append(s.ends, func() { srv.Shutdown(); client.Close() })
}

func newLimiter(addr string, policy throttle.Policy) (*redis.Client, *throttle.Limiter) {
	client := redis.NewClient(&redis.Options{Addr: addr})
	return client, must(throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{policy}}))
}

// A cost is the mean cost of one of many equal things.
type cost struct {
	each float64 // microseconds, of all goroutines together
	cpu  float64 // microseconds of Redis, without idling
}

func (c cost) String() string { return fmt.Sprintf("%.1f us each, %.1f us of Redis", c.each, c.cpu) }

// turns is the number of slices of a side in a round.
const turns = 20

// inTurns calls sides in turn, in short slices, so that a disturbance of the machine hits all sides.
// A side does a part of its things in each slice, and returns how many.
func (s *testbed) inTurns(ctx context.Context, sides ...func() int) []cost {
	n, took, cpu := make([]int, len(sides)), make([]time.Duration, len(sides)), make([]float64, len(sides))
	for range turns {
		for i, act := range sides {
			t, c := s.spent(ctx, func() { n[i] += act() })
			took[i] += t
			cpu[i] += c
		}
	}
	costs := make([]cost, len(sides))
	for i := range sides {
		costs[i] = cost{took[i].Seconds() * 1e6 / float64(n[i]), cpu[i] / float64(n[i])}
	}
	return costs
}
