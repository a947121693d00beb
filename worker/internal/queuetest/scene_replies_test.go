package queuetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Replies cross, so that the newest reply does not tell the newest state. No task is forgotten for
// that. Two tasks of a tenant come at once, and a third when the second starts, over and over. Each
// tenant has a policy of its own, so that no other tenant's task has its line asked.
func TestSceneRepliesThatCrossStrandNobody(t *testing.T) {
	const tenants = 10 // more is too much for a miniredis with the race detector
	policies := idle(30)
	for i := range tenants {
		policies[i].Match = []string{fmt.Sprint("x", i)}
		policies[i].Windows[0].Period = 20 * time.Millisecond
	}
	crossing(t, 12, policies, func(t *testing.T, s *sitetest.Site, n int, most time.Duration) {
		d := newDiary()
		var clients []*worker.Client
		for range 2 {
			limiter := jitteryLimiter(s)
			s.Serve(d.handle, d.watch, sitetest.By(limiter))
			clients = append(clients, s.Client(jitteryLimiter(s)))
		}
		var latest atomic.Int64
		var all sync.WaitGroup
		for tenant := range tenants {
			all.Go(func() {
				who, typename := worker.Identity{Tenant: fmt.Sprint("tenant", tenant)}, fmt.Sprint("x", tenant)
				for round := range n {
					plan := func(name string) string {
						payload := fmt.Sprintf("%s-%d-%s", who.Tenant, round, name)
						var err error
						if rand.N(2) == 0 {
							err = d.enqueue(s.Plain, worker.NewTask(who, typename, []byte(payload)))
						} else {
							err = d.plan(clients[rand.N(len(clients))], worker.NewTask(who, typename, []byte(payload)))
						}
						if err != nil {
							s.Error(err)
						}
						return payload
					}
					starts := func(payload string) bool {
						after, ok := d.await(payload, most)
						if !ok {
							s.Errorf("%s had not started %v after it was to", payload, after)
						}
						for now := latest.Load(); int64(after) > now && !latest.CompareAndSwap(now, int64(after)); now = latest.Load() {
						}
						return ok
					}
					var a string
					var first sync.WaitGroup
					first.Go(func() { a = plan("a") })
					b := plan("b")
					first.Wait()
					if !starts(b) || !starts(plan("c")) || !starts(a) {
						return
					}
					time.Sleep(rand.N(30 * time.Millisecond)) // so that lines are empty now and then
				}
			})
		}
		all.Wait()
		d.awaitAll(s, most)
		s.Wait("nobody is in line", func() bool { return len(s.InLine()) == 0 })
		s.Logf("the latest started %v after it was to", time.Duration(latest.Load()))
	})
}

// A task whose ID conflicts with another's neither loses that task's place nor takes it.
func TestSceneConflictingIDsStrandNobody(t *testing.T) {
	p := sitetest.Policy(5, 100*time.Millisecond)
	p.Windows = append(p.Windows, throttle.Window{Name: "all", Limit: 20, Period: 100 * time.Millisecond, Scope: throttle.ScopeShared})
	crossing(t, 400, append(idle(30), p), func(t *testing.T, s *sitetest.Site, n int, most time.Duration) {
		d := newDiary()
		var clients []*worker.Client
		for range 2 {
			limiter := jitteryLimiter(s)
			s.Serve(d.handle, d.watch, sitetest.By(limiter))
			clients = append(clients, s.Client(jitteryLimiter(s)))
		}
		const ids = 30
		var accepted, next atomic.Int64
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for i := next.Add(1); i <= int64(n); i = next.Add(1) {
					who := worker.Identity{Tenant: fmt.Sprint("tenant", rand.N(3))}
					id := asynq.TaskID(fmt.Sprint("id", rand.N(ids)))
					var err error
					if payload := fmt.Sprint("task", i); rand.N(4) == 0 {
						err = d.enqueue(s.Plain, worker.NewTask(who, "x", []byte(payload)), id)
					} else {
						err = d.plan(clients[rand.N(len(clients))], worker.NewTask(who, "x", []byte(payload)), id)
					}
					switch {
					case err == nil:
						accepted.Add(1)
					case !errors.Is(err, asynq.ErrTaskIDConflict):
						s.Error(err)
					}
					time.Sleep(rand.N(50 * time.Millisecond))
				}
			})
		}
		all.Wait()
		d.awaitAll(s, most)
		if got := int64(len(d.tasks)); got != accepted.Load() || got <= ids { // or none is used again
			s.Errorf("%d tasks are noted, %d of %d were accepted", got, accepted.Load(), n)
		}
		s.Wait("nobody is in line", func() bool { return len(s.InLine()) == 0 })
	})
}
