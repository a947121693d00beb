package queuetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A task keeps its class: when it is denied, when it failed, and when it joins later.
func TestATaskKeepsItsClass(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{sitetest.Shared(2, 100*time.Millisecond)}, func(t *testing.T, s *sitetest.Site) {
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
		ours := func(id string, opts ...asynq.Option) {
			task := asynq.NewTaskWithHeaders("x", nil, map[string]string{"sluice-identity": "tenant=acme"}, asynq.TaskID(id))
			_, err := client.Enqueue(task, append(opts, worker.Class(throttle.ClassBatch))...)
			sitetest.Must(t, err)
		}
		var ids []string
		for i := range 4 {
			ids = append(ids, fmt.Sprint("plain", i), fmt.Sprint("ours", i), fmt.Sprint("later", i))
			task := worker.NewTask(worker.Identity{Class: throttle.ClassBatch, Tenant: "acme"}, "x", nil)
			s.Enqueue(task, asynq.TaskID(fmt.Sprint("plain", i)))
			ours(fmt.Sprint("ours", i))
			ours(fmt.Sprint("later", i), asynq.ProcessIn(time.Second))
		}
		s.WaitGone(ids...)
		mu.Lock()
		defer mu.Unlock()
		for _, id := range ids {
			if got := classes[id]; len(got) != 2 || got[0] != throttle.ClassBatch || got[1] != throttle.ClassBatch {
				t.Errorf("%s ran as %q", id, got)
			}
		}
		if _, err := client.Enqueue(sitetest.AcmeTask(), worker.Class("night")); !errors.As(err, new(*throttle.RequestError)) {
			t.Errorf("a class that there is not: %v", err)
		}
	})
}
