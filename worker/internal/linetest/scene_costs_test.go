package linetest

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// The expected start of a task holds where costs do not fill a window, or differ. It is exact, or
// an upper bound.
func TestSceneStartsOfCostsAreTold(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		cost  func() int64
		exact bool
	}{
		{"7 of 12", func() int64 { return 7 }, true},
		{"1 to 7 of 12", func() int64 { return 1 + rand.Int64N(7) }, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sitetest.NewInBubble(t, sitetest.Shared(12, 10*time.Second))
				d := newDiary()
				client := s.Client(s.AnotherLimiter(s.Redis))
				s.Serve(d.handle, d.watch, s.Apart, sitetest.Calm)
				for i := range 40 {
					cost := worker.Identity{Tenant: "acme", Cost: map[string]int64{"requests": row.cost()}}
					if err := d.plan(client, worker.NewTask(cost, "x", fmt.Append(nil, "t", i))); err != nil {
						t.Fatal(err)
					}
				}
				const most = sitetest.Spacing + time.Millisecond // await wants it to be less
				d.awaitAll(t, most)
				early := time.Duration(0)
				for payload, e := range d.tasks {
					early = max(early, e.least.Sub(e.starts[0]))
					if row.exact && (e.starts[0].Sub(e.least).Abs() > most || !e.least.Equal(e.most)) {
						t.Errorf("%s started %v after it was to, and was told %v to %v", payload, e.starts[0].Sub(e.least), e.least, e.most)
					}
					if e.decisions > 1 {
						t.Errorf("%s woke %d times", payload, e.decisions)
					}
				}
				t.Logf("the earliest started %v before its time", early)
				s.WantNobodyInLine()
			})
		})
	}
}

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
				client := s.Client(s.AnotherLimiter(s.Redis))
				tasks := make([]*asynq.Task, all)
				for i := range tasks {
					tasks[i] = taskOf(s, "acme", i, asynq.TaskID(fmt.Sprintf("acme-%04d", i)))
				}
				for _, result := range client.EnqueueBatch(t.Context(), tasks) {
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
				if err != nil {
					t.Fatal(err)
				}
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
