package main

import (
	"context"
	"crypto/rand"
	"fmt"
	mathrand "math/rand/v2"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// A joiner makes tickets like a worker's, for lines from which no server takes.
type joiner struct {
	limiter *throttle.Limiter
	asynqID string
}

func (s *testbed) newJoiner(policies ...throttle.Policy) *joiner {
	client := redis.NewClient(&redis.Options{Addr: s.addr(), PoolSize: enqueuers})
	s.o.cleanup(func() { client.Close() })
	limiter := must(throttle.New(throttle.Config{Client: client, Policies: policies}))
	return &joiner{limiter: limiter, asynqID: rand.Text()[:8]}
}

// inBulk joins tickets by hundreds a call, on several goroutines.
func (j *joiner) inBulk(ctx context.Context, policy string, n int) {
	inParallel((n+bulkSize-1)/bulkSize, enqueuers, func(i int) {
		j.join(ctx, policy, min(bulkSize, n-i*bulkSize))
	})
}

// fill joins tickets, logs its progress, and returns the CPU of Redis in microseconds.
func (s *testbed) fill(ctx context.Context, j *joiner, policy string, n int) (cpu float64) {
	const portion = 50_000
	for from := 0; from < n; from += portion {
		s.o.say("%d of %d wait", from, n)
		_, spent := s.spent(ctx, func() { j.inBulk(ctx, policy, min(portion, n-from)) })
		cpu += spent
	}
	return cpu
}

// oneByOne joins tickets by one a call, one after the other.
func (j *joiner) oneByOne(ctx context.Context, policy string, n int) {
	for range n {
		j.join(ctx, policy, 1)
	}
}

func (j *joiner) join(ctx context.Context, policy string, n int) {
	requests := make([]throttle.Request, n)
	for i := range requests {
		requests[i] = throttle.Request{
			Key:    rand.Text()[:16],
			Tenant: "tenant-" + strconv.Itoa(mathrand.IntN(10)),
			Ticket: throttle.Ticket{Queue: j.asynqID + "/default", ID: taskID()},
		}
	}
	for _, decision := range must(j.limiter.Line(policy).Join(ctx, requests)) {
		check(decision.Err)
	}
}

// taskID returns a random UUID, as asynq does.
func taskID() string {
	var u [16]byte
	rand.Read(u[:])
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// takenNothing is the number of values in the reply of a take that found nothing.
const takenNothing = 3

// takeScript returns the SHA of the script that takes, as seen when a limiter calls the script.
func takeScript(ctx context.Context, addr string) string {
	probe := throttle.Policy{Name: "probe", Windows: []throttle.Window{shared("any", 1, time.Second)}}
	client, limiter := newLimiter(addr, probe)
	defer client.Close()
	calls := &callLog{}
	client.AddHook(calls)
	must(limiter.Line("probe").Take(ctx, throttle.TakeOptions{Queues: map[string]int{"nobody": 1}}))
	all := calls.callsOf("")
	if len(all) == 0 {
		fail("a take called no script")
	}
	return all[0].sha
}
