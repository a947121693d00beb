package queuetest

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// All but 20 of 500 waiting tasks are deleted, which fill 50 s. At that moment another task comes,
// with a deadline in half a minute, by a client of ours or by a plain one. It runs.
func TestSceneDeletedTasksHoldUpNobody(t *testing.T) {
	t.Parallel()
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprint("plain client ", plain), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const limit, all, deleted, begin = 10, 500, 480, 500 * time.Millisecond
				s := sitetest.NewInBubble(t, sitetest.Shared(limit, time.Second))
				d := newDiary()
				client := s.Client(s.AnotherLimiter())
				tasks := make([]*asynq.Task, all)
				for i := range tasks {
					tasks[i] = taskOf(s, "acme", i, asynq.TaskID(fmt.Sprintf("acme-%04d", i)))
				}
				for _, result := range client.EnqueueBulk(t.Context(), tasks) {
					if result.Err != nil {
						t.Fatal(result.Err)
					}
				}
				s.Serve(d.handle, d.watch, s.Apart, sitetest.Calm)
				time.Sleep(begin)
				for i := range deleted {
					_ = s.Inspector.DeleteTask("default", fmt.Sprintf("acme-%04d", i)) // the first have run
				}
				soon := worker.NewTask(worker.Identity{Tenant: "acme"}, "x", []byte("soon"))
				deadline := asynq.Deadline(time.Now().Add(30 * time.Second))
				var err error
				if plain {
					err = d.enqueue(s.Plain, soon, deadline)
				} else {
					err = d.plan(client, soon, deadline)
				}
				sitetest.Must(t, err)
				begun := time.Now()
				// It goes with the window after those of the tasks that are left. Each look at a deleted
				// one may take a millisecond.
				const most = (1+(all-deleted)/limit)*time.Second - begin + deleted*time.Millisecond
				time.Sleep(30 * time.Second)
				d.mu.Lock()
				defer d.mu.Unlock()
				if e := d.of("soon"); len(e.starts) != 1 {
					t.Fatalf("it started %d times: %+v", len(e.starts), s.Task("soon"))
				} else if after := e.starts[0].Sub(begun); after > most {
					t.Errorf("it started after %v, want at most %v", after, most)
				}
				if want := limit + all - deleted + 1; d.runs != want {
					t.Errorf("%d tasks ran, want %d", d.runs, want)
				}
				s.WantNobodyInLine()
			})
		})
	}
}
