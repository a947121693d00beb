package batch_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/batch"
)

// 100,000 tasks of 50 tenants are enqueued by one scheduler, and again by schedulers of which five
// are killed. It says how long that took, and how much memory. It takes a minute:
// SLUICE_LONG=1 go test -run TestALargeBatchIsEnqueuedOnceWhateverIsKilled -v ./worker/batch
func TestALargeBatchIsEnqueuedOnceWhateverIsKilled(t *testing.T) {
	long(t)
	const perTenant, many = 2000, 50
	b := batch.Batch{Name: "large", Tasks: calls(perTenant), Tenants: batch.List(tenants(many)...)}
	for _, kills := range []int{0, 5} {
		s := newSite(t, &redis.Options{Addr: throttletest.Redis(t)}, []throttle.Window{
			{Name: "tenant", Limit: 100, Period: time.Minute},
			{Name: "quota", Algorithm: throttle.AlgorithmCalendar, Limit: 50_000, Resets: "@daily", Scope: throttle.ScopeShared},
		})
		watch := s.idle(b)
		defer watch.Close()
		f, err := watch.Fire(t.Context(), "large")
		s.ok(err)
		stop := make(chan struct{})
		peak := make(chan uint64)
		go func() {
			var most uint64
			for {
				select {
				case <-stop:
					peak <- most
					return
				case <-time.After(100 * time.Millisecond):
					var m runtime.MemStats
					runtime.ReadMemStats(&m)
					most = max(most, m.HeapAlloc)
				}
			}
		}()
		begun := time.Now()
		for range kills {
			p := s.mortal(time.Second, b)
			time.Sleep(1100*time.Millisecond + rand.N(2*time.Second))
			p.kill()
			status, err := watch.Status(t.Context(), f)
			t.Logf("killed with %d enqueued, %v", status.Total, err)
		}
		s.mortal(time.Second, b)
		status := s.wait(watch, f, "all are enqueued", func(st batch.Status) bool { return st.State == batch.StateRunning })
		took := time.Since(begun)
		close(stop)
		t.Logf("%d kills: %d tasks enqueued in %v, with at most %d MB on the heap",
			kills, status.Total, took.Round(time.Millisecond), <-peak>>20)
		scheduled, err := s.redis.ZCard(context.Background(), "asynq:{default}:scheduled").Result()
		s.ok(err)
		pending, err := s.redis.LLen(context.Background(), "asynq:{default}:pending").Result()
		s.ok(err)
		if scheduled != perTenant*many || pending != 0 || status.Waiting != perTenant*many {
			t.Errorf("%d are scheduled and %d pending: %+v", scheduled, pending, status)
		}
	}
}
