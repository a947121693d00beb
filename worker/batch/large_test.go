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

// 100,000 tasks of 50 tenants are enqueued by one scheduler, again while the limiter stalls for 350 ms
// every 3 s, and again by schedulers of which five are killed. It says how long that took, and how much
// memory. It takes some minutes:
// SLUICE_LONG=1 go test -run TestALargeBatchIsEnqueuedOnceWhateverIsKilled -v ./worker/batch
func TestALargeBatchIsEnqueuedOnceWhateverIsKilled(t *testing.T) {
	long(t)
	const perTenant, many = 2000, 50
	b := batch.Batch{Name: "large", Tasks: calls(perTenant), Tenants: batch.List(tenants(many)...)}
	for _, run := range []struct {
		kills  int
		stalls bool
	}{{}, {stalls: true}, {kills: 5}} {
		kills := run.kills
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
		s.mortal(time.Second, b).stalls.Store(run.stalls)
		status := batch.Status{}
		for ; status.State != batch.StateRunning; time.Sleep(20 * time.Millisecond) {
			status, err = watch.Status(t.Context(), f)
			s.ok(err)
		}
		took := time.Since(begun)
		close(stop)
		t.Logf("%d kills, stalls %v: %d tasks enqueued in %v, with at most %d MB on the heap",
			kills, run.stalls, status.Total, took.Round(time.Millisecond), <-peak>>20)
		scheduled, err := s.redis.ZCard(context.Background(), "asynq:{default}:scheduled").Result()
		s.ok(err)
		pending, err := s.redis.LLen(context.Background(), "asynq:{default}:pending").Result()
		s.ok(err)
		if scheduled != perTenant*many || pending != 0 || status.Waiting != perTenant*many {
			t.Errorf("%d are scheduled and %d pending: %+v", scheduled, pending, status)
		}
	}
}
