package queuetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Live tasks start within a second although a batch waits that would take all of the limit and of
// the slots, whether they are enqueued by our client or by asynq's. The batch gets all that is left.
func TestLiveTasksBesideABatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const live, warm = 24, 3 // live tasks come four a second, after so many seconds
		const limit, period = 20, time.Second
		own := throttle.Window{Name: "own", Limit: 600, Period: time.Minute}
		p := sitetest.Shared(limit, period)
		p.Windows = append(p.Windows, own)
		s := sitetest.NewInBubble(t, p)
		var mu sync.Mutex
		begun, started := map[string]time.Time{}, map[string]time.Duration{}
		batch := 0
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			id, _ := asynq.GetTaskID(ctx)
			mu.Lock()
			if at, live := begun[id]; live {
				started[id] = time.Since(at)
			} else {
				batch++
			}
			mu.Unlock()
			time.Sleep(200 * time.Millisecond)
			return nil
		}, sitetest.Brisk)
		client := s.Client(s.Limiter)
		for _, tenant := range []string{"acme", "beta"} {
			tasks := make([]*asynq.Task, 120)
			for i := range tasks {
				tasks[i] = worker.NewTask(worker.Identity{Tenant: tenant}, "x", fmt.Append(nil, i))
			}
			for _, e := range client.EnqueueBulk(context.Background(), tasks, worker.Class(throttle.ClassBatch)) {
				expect.Must(t, e.Err)
			}
		}
		time.Sleep(warm * time.Second)
		for i := range live {
			id := fmt.Sprint("live", i)
			mu.Lock()
			begun[id] = time.Now()
			mu.Unlock()
			task := sitetest.Task([]string{"acme", "cora"}[i%2])
			enqueue := s.Plain.EnqueueContext
			if i%4 > 0 {
				enqueue = client.EnqueueContext
			}
			expect.Must(t, expect.ErrOf(enqueue(context.Background(), task, asynq.TaskID(id))))
			time.Sleep(250 * time.Millisecond)
		}
		time.Sleep(time.Second)
		mu.Lock()
		defer mu.Unlock()
		var most, sum time.Duration
		for _, late := range started {
			most, sum = max(most, late), sum+late
		}
		t.Logf("%d of %d live tasks started after %v on average, %v at the most, beside %d of a batch",
			len(started), live, sum/live, most, batch)
		expect.That(t, len(started) == live && most <= period,
			len(started), "live tasks started, after", most, "at the most")
		if batch < limit*(warm+live/4+1)-live { // in so many seconds
			t.Errorf("%d of the batch started", batch)
		}
	})
}

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
			task := asynq.NewTaskWithHeaders("x", nil, map[string]string{"sluice-tenant": "acme"}, asynq.TaskID(id))
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
