package sitetest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker"
)

// WantStates fails unless the queue has so many tasks in these states, and no others.
func (s *Site) WantStates(queue string, pending, scheduled int) {
	s.Helper()
	ctx := context.Background()
	key := "asynq:{" + queue + "}:"
	p, n := int(s.Redis.LLen(ctx, key+"pending").Val()), int(s.Redis.ZCard(ctx, key+"scheduled").Val())
	expect.That(s, p == pending && n == scheduled, "queue", queue, p, "pending and", n, "scheduled, want", pending, "and", scheduled)
	expect.Equal(s, len(s.Redis.Keys(ctx, key+"t:*").Val()), pending+scheduled, "queue", queue, "tasks that are stored")
}

// Task returns the task, empty if there is none.
func (s *Site) Task(id string) asynq.TaskInfo {
	info, err := s.Inspector.GetTaskInfo("default", id)
	if errors.Is(err, asynq.ErrTaskNotFound) || errors.Is(err, asynq.ErrQueueNotFound) {
		return asynq.TaskInfo{}
	}
	if err != nil {
		s.Error(err)
		return asynq.TaskInfo{}
	}
	return *info
}

// WaitState waits until the tasks are in this state.
func (s *Site) WaitState(state asynq.TaskState, ids ...string) {
	s.Helper()
	for _, id := range ids {
		s.Wait(fmt.Sprintf("task %s is %v", id, state), func() bool { return s.Task(id).State == state })
	}
}

// WaitGone waits until asynq has none of the tasks.
func (s *Site) WaitGone(ids ...string) {
	s.Helper()
	for _, id := range ids {
		s.Wait(fmt.Sprintf("task %s is gone", id), func() bool { return s.Task(id).ID == "" })
	}
}

// Counters are what asynq's tools show of the queue.
type Counters struct{ Processed, Failed, Active, Leases, Scheduled, Retry, Archived int64 }

// Counters reads them.
func (s *Site) Counters() Counters {
	s.Helper()
	ctx := context.Background()
	number := func(key string) int64 {
		n, err := s.Redis.Get(ctx, "asynq:{default}:"+key).Int64()
		expect.Require(s, err == nil || err == redis.Nil, err)
		return n
	}
	return Counters{
		Processed: number("processed"), Failed: number("failed"),
		Active:    s.Redis.LLen(ctx, "asynq:{default}:active").Val(),
		Leases:    s.Redis.ZCard(ctx, "asynq:{default}:lease").Val(),
		Scheduled: s.Redis.ZCard(ctx, "asynq:{default}:scheduled").Val(),
		Retry:     s.Redis.ZCard(ctx, "asynq:{default}:retry").Val(),
		Archived:  s.Redis.ZCard(ctx, "asynq:{default}:archived").Val(),
	}
}

// WantCounters fails unless the counters are these.
func (s *Site) WantCounters(want Counters) {
	s.Helper()
	got := s.Counters()
	expect.That(s, got == want, "counters", got, "want", want)
}

// Stored returns the fields by which asynq keeps a task.
func (s *Site) Stored(id string) map[string]string {
	s.Helper()
	return expect.Got(s.Redis.HGetAll(context.Background(), "asynq:{default}:t:"+id).Result())(s)
}

// AcmeTask is a task of the tenant acme.
func AcmeTask(opts ...asynq.Option) *asynq.Task {
	return worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil, opts...)
}

// Off says that two times differ by more than a machine may be slow.
func Off(a, b time.Time) bool { return a.Sub(b).Abs() > 20*time.Second }

// Task is a task of a tenant, with a cost if one is given.
func Task(tenant string, cost ...map[string]int64) *asynq.Task {
	id := worker.Identity{Tenant: tenant}
	if len(cost) > 0 {
		id.Cost = cost[0]
	}
	return worker.NewTask(id, "x", nil)
}
