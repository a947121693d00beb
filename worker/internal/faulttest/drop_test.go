package faulttest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// More than ten thousand tasks are dropped in seconds. A drop that is interrupted tells how many it has dropped,
// and the next one drops the rest. No ticket has left the line whose task waits.
func TestADropOfManyTasks(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Shared(20, time.Second))
	c, tasks := s.Client(s.Limiter), make([]*asynq.Task, 5000)
	for i := range tasks {
		tasks[i] = worker.NewTask(worker.Identity{Tenant: "acme"}, "call", nil)
	}
	tasks[0] = worker.NewTask(worker.Identity{Tenant: "beta"}, "call", nil)
	const times = 3 // asynq keeps 10,000 that are archived
	for range times {
		for _, e := range c.EnqueueBulk(t.Context(), tasks) {
			expect.Must(t, e.Err)
		}
	}
	left := func() int { return int(expect.Got(s.Limiter.Line("api").Len(t.Context()))(t)) }
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for left() == times*len(tasks) {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	options := worker.DropOptions{Policy: "api", Tenant: "acme"}
	first, err := c.Drop(ctx, options)
	expect.Require(t, errors.Is(err, context.Canceled) && first != 0 && left() == times*len(tasks)-first,
		"interrupted after", first, left(), "wait,", err)
	s.Redis.ConfigResetStat(t.Context())
	begun := time.Now()
	rest, err := c.Drop(t.Context(), options)
	for more := 0; errors.Is(err, context.DeadlineExceeded); rest += more { // on a busy machine: the next one drops the rest
		more, err = c.Drop(t.Context(), options)
	}
	all := times * (len(tasks) - 1)
	expect.Require(t, err == nil && first+rest == all, "dropped", first, "and", rest, "of", all, err)
	var calls int
	_, stats, _ := strings.Cut(s.Redis.Info(t.Context(), "commandstats").Val(), "cmdstat_evalsha:")
	_, err = fmt.Sscanf(stats, "calls=%d", &calls)
	expect.That(t, err == nil && calls <= rest/20, calls, "calls for", rest, "tasks", err)
	t.Logf("%d in %v, by %d calls", rest, time.Since(begun), calls)
	q, err := s.Inspector.GetQueueInfo("default")
	wait := left()
	expect.That(t, err == nil && q.Archived == 9999 && q.Scheduled == times && wait == times, wait, "wait, and the queue is", q, err)
}
