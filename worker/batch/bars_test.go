package batch_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

func long(t *testing.T) {
	t.Helper()
	if os.Getenv("SLUICE_LONG") == "" {
		t.Skip("SLUICE_LONG=1 runs it")
	}
}

func tenants(n int) (names []string) {
	for i := range n {
		names = append(names, "tenant-"+strconv.Itoa(i))
	}
	return names
}

// Batches of 20 tenants on a real Redis: when they are expected to end, and when they do. A limit binds,
// far below what a machine of two cores enqueues and runs, or handler slots, or a concurrency window. It
// takes a minute:
// SLUICE_LONG=1 go test -run TestExpectedAgainstReality -v ./worker/batch
func TestExpectedAgainstReality(t *testing.T) {
	long(t)
	names := tenants(20)
	for bind, row := range map[string]struct {
		window    throttle.Window
		perTenant int
		takes     time.Duration
	}{
		"limits": {shared("all", "", 300, time.Second), 300, 0},
		"slots":  {shared("all", "", 100_000, time.Second), 30, 200 * time.Millisecond},
		"concurrency": {throttle.Window{Name: "at-once", Algorithm: throttle.AlgorithmConcurrency, Limit: 5, Scope: throttle.ScopeShared},
			20, 200 * time.Millisecond},
	} {
		perTenant, takes := row.perTenant, row.takes
		own := throttle.Window{Name: "own", Limit: 100_000, Period: time.Minute}
		s := newSite(t, &redis.Options{Addr: throttletest.Redis(t)}, []throttle.Window{own, row.window})
		last, mu := map[string]time.Time{}, sync.Mutex{}
		s.serve(func(_ context.Context, task *asynq.Task) error {
			id, _ := worker.IdentityOf(task)
			time.Sleep(takes)
			mu.Lock()
			last[id.Tenant] = time.Now()
			mu.Unlock()
			return nil
		})
		time.Sleep(6 * time.Second) // a server tells of itself every 5 s
		b := batch.Batch{Name: "b", Tasks: calls(perTenant), Tenants: batch.List(names...), Duration: takes}
		p := s.scheduler(b)
		f, err := p.Fire(t.Context(), "b")
		s.ok(err)
		begun := time.Now()
		type look struct {
			at time.Time
			batch.Status
			tenants []batch.TenantStatus
		}
		var looks []look
		s.wait(p, f, "it is done", func(st batch.Status) bool {
			if len(looks) == 0 && !st.Planned.IsZero() ||
				st.Waiting > 0 && st.State == batch.StateRunning && time.Since(looks[len(looks)-1].at) > time.Second {
				all, err := p.Tenants(t.Context(), f)
				s.ok(err)
				looks = append(looks, look{time.Now(), st, all})
			}
			return st.State == batch.StateDone
		})
		var ended time.Time
		for _, at := range last {
			if at.After(ended) {
				ended = at
			}
		}
		t.Logf("where %s bind, the last of %d tasks ended after %.1f s", bind, perTenant*len(names), ended.Sub(begun).Seconds())
		for _, l := range looks {
			off := func(expected, was time.Time) float64 {
				return 100 * expected.Sub(was).Seconds() / was.Sub(begun).Seconds()
			}
			worst := 0.0
			for _, tenant := range l.tenants {
				if tenant.Waiting > 0 {
					worst = max(worst, off(tenant.Finish, last[tenant.Tenant]), -off(tenant.Finish, last[tenant.Tenant]))
				}
			}
			t.Logf("after %4.1f s, %5d done: expected after %.1f s, off by %+.1f %%; "+
				"the worst tenant by %.1f %%; %q binds", l.at.Sub(begun).Seconds(), l.Done,
				l.Finish.Sub(begun).Seconds(), off(l.Finish, ended), worst, l.Binds)
		}
	}
}

// Live tasks of four tenants, 40 in a second, in a system that is empty and beside a batch that
// would fill the window: when they start, and how many. It takes half a minute:
// SLUICE_LONG=1 go test -run TestLiveTasksBesideALargeBatch -v ./worker/batch
func TestLiveTasksBesideALargeBatch(t *testing.T) {
	long(t)
	const live, every = 600, 25 * time.Millisecond
	for _, beside := range []bool{false, true} {
		s := newSite(t, &redis.Options{Addr: throttletest.Redis(t)}, []throttle.Window{
			{Name: "own", Limit: 40, Period: time.Second}, {Name: "all", Limit: 100, Period: time.Second, Scope: throttle.ScopeShared},
		})
		var mu sync.Mutex
		waited, first, last := []time.Duration{}, time.Time{}, time.Time{}
		s.serve(func(_ context.Context, task *asynq.Task) error {
			id, _ := worker.IdentityOf(task)
			if id.Class != throttle.ClassBatch {
				at, err := time.Parse(time.RFC3339Nano, string(task.Payload()))
				if err != nil {
					return err
				}
				mu.Lock()
				waited = append(waited, time.Since(at))
				if last = time.Now(); first.IsZero() {
					first = last
				}
				mu.Unlock()
			}
			time.Sleep(20 * time.Millisecond)
			return nil
		})
		p := s.scheduler(batch.Batch{Name: "b", Tasks: calls(2000), Tenants: batch.List(tenants(4)...)})
		if beside {
			f, err := p.Fire(t.Context(), "b")
			s.ok(err)
			s.wait(p, f, "it runs", func(st batch.Status) bool { return st.State == batch.StateRunning })
		}
		client, err := worker.NewClient(s, worker.ClientConfig{Limiter: s.limiter})
		s.ok(err)
		for i := range live {
			now := time.Now()
			task := worker.NewTask(worker.Identity{Tenant: fmt.Sprint("tenant-", i%4)}, "call",
				[]byte(now.Format(time.RFC3339Nano)))
			_, err := client.Enqueue(task)
			s.ok(err)
			time.Sleep(time.Until(now.Add(every)))
		}
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			mu.Lock()
			n := len(waited)
			mu.Unlock()
			if n == live {
				break
			}
		}
		mu.Lock()
		slices.Sort(waited)
		n := len(waited)
		part := func(i int) time.Duration { return waited[i].Round(time.Millisecond) }
		t.Logf("beside a batch: %v: %d of %d live tasks started, %.2f a second; "+
			"from enqueue to start p50 %v, p99 %v, max %v", beside, n, live,
			float64(n)/last.Sub(first).Seconds(), part(n/2), part(n*99/100), part(n-1))
		mu.Unlock()
		client.Close()
		p.kill()
	}
}

// Live tasks, one a second, behind a batch that uses up a quota of 400 a minute: with the same quota, and
// with a fifth of it as a window of their own. It is in fake time:
// SLUICE_LONG=1 go test -run TestLiveTasksBehindALongQuota -v ./worker/batch
func TestLiveTasksBehindALongQuota(t *testing.T) {
	long(t)
	for _, period := range []time.Duration{time.Minute, 2 * time.Minute} {
		for _, own := range []int64{0, 80} {
			synctest.Test(t, func(t *testing.T) {
				per := func(limit int64) throttle.Window {
					return shared("quota", throttle.AlgorithmFixed, limit*int64(period/time.Minute), period)
				}
				s := fake(t, per(400-own))
				policies, task := s.limiter.Policies(), "call"
				if own > 0 {
					task = "live"
					policies = append(policies, throttle.Policy{Name: "live", Match: []string{task}, Windows: []throttle.Window{per(own)}})
					s.ok(s.limiter.SetPolicies(policies))
				}
				s.slots = 50
				var waited []time.Duration
				s.serve(func(_ context.Context, task *asynq.Task) error {
					s.mu.Lock()
					defer s.mu.Unlock()
					if at, err := time.Parse(time.RFC3339Nano, string(task.Payload())); err == nil { // it is live
						waited = append(waited, time.Since(at))
					}
					return nil
				})
				p := s.scheduler(batch.Batch{Name: "b", Tasks: calls(1000), Tenants: batch.List("a", "b")})
				_, err := p.Fire(t.Context(), "b")
				s.ok(err)
				time.Sleep(5 * time.Second)
				client, err := worker.NewClient(s, worker.ClientConfig{Limiter: s.limiter})
				s.ok(err)
				defer client.Close()
				for range 180 {
					payload := time.Now().AppendFormat(nil, time.RFC3339Nano)
					_, err := client.Enqueue(worker.NewTask(worker.Identity{Tenant: "c"}, task, payload))
					s.ok(err)
					time.Sleep(time.Second)
				}
				slices.Sort(waited)
				part := func(n int) time.Duration { return waited[len(waited)*n/100].Round(time.Second) }
				t.Logf("400 a minute, for %v, %d of them for live tasks alone: they waited p50 %v, p90 %v, max %v",
					period, own, part(50), part(90), part(99))
			})
		}
	}
}
