package queuetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A task keeps its class: when it is denied, when it failed, and when it joins later.
func TestATaskKeepsItsClass(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Shared(2, 100*time.Millisecond))
	var mu sync.Mutex
	classes := map[string][]throttle.Class{}
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		id, _ := asynq.GetTaskID(ctx)
		d, _ := worker.FromContext(ctx).Decision()
		mu.Lock()
		defer mu.Unlock()
		classes[id] = append(classes[id], d.Reservation.Class)
		if len(classes[id]) == 1 {
			return errors.New("boom")
		}
		return nil
	})
	client := s.Client(s.Limiter)
	var ids []string
	for i := range 4 {
		ids = append(ids, fmt.Sprint("plain", i), fmt.Sprint("ours", i), fmt.Sprint("later", i))
		task := worker.NewTask(worker.Identity{Class: throttle.ClassBatch, Tenant: "acme"}, "x", nil)
		s.Enqueue(task, asynq.TaskID(fmt.Sprint("plain", i)))
		expect.Must(t, expect.ErrOf(client.Enqueue(task, asynq.TaskID(fmt.Sprint("ours", i)))))
		expect.Must(t, expect.ErrOf(client.Enqueue(task, asynq.TaskID(fmt.Sprint("later", i)), asynq.ProcessIn(time.Second))))
	}
	s.WaitGone(ids...)
	mu.Lock()
	defer mu.Unlock()
	for _, id := range ids {
		expect.Equal(t, classes[id], []throttle.Class{throttle.ClassBatch, throttle.ClassBatch}, id)
	}
	night := worker.NewTask(worker.Identity{Class: "night", Tenant: "acme"}, "x", nil)
	expect.Err(t, expect.ErrOf(client.Enqueue(night)), new(*throttle.RequestError), "a class that there is not:")
}
