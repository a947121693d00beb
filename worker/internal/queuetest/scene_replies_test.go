package queuetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
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

// One process serves the asynqs of two databases by one limiter, and loses some of its replies. A
// take that is repeated for the other server moves no task to the wrong one. All tasks run once,
// and keep to the limit that they share.
func TestSceneTwoAsynqsByOneLimiter(t *testing.T) {
	if sitetest.OnCluster() {
		t.Skip("a Redis Cluster has one database")
	}
	const tasks = 60
	sitetest.OnRedis(t, append(idle(10), sitetest.Shared(20, 500*time.Millisecond)), func(t *testing.T, s *sitetest.Site) {
		s.Limiter = s.AnotherLimiter(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if err == nil && hooktest.IsScript(cmd) && rand.N(10) == 0 {
				err = context.DeadlineExceeded
				cmd.SetErr(err)
			}
			return err
		}))
		l := sitetest.NewLedger()
		diaries := []*diary{newDiary(), newDiary()}
		begun := time.Now()
		for i, d := range diaries {
			o := sitetest.SameRedis(s.Redis)
			o.DB = i
			s.Asynq = sitetest.Dialed{Options: o}
			s.Serve(d.handle, l.Watch)
			ours := s.Client(s.AnotherLimiter())
			plain := asynq.NewClient(s.Asynq)
			defer plain.Close()
			for n := range tasks {
				var err error
				if task := taskOf(s, "acme", n); n%4 == 0 {
					err = d.enqueue(plain, task)
				} else {
					err = d.plan(ours, task)
				}
				sitetest.Must(t, err)
			}
		}
		for _, d := range diaries {
			s.Wait("all have run", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return len(d.tasks) == tasks && d.runs >= tasks })
		}
		t.Logf("all ran within %v", time.Since(begun))
		if over := l.Excess(20, 500*time.Millisecond); over > 0 {
			t.Errorf("%d were granted above the limit", over)
		}
		for _, d := range diaries {
			d.awaitAll(t, notStranded) // each once
		}
		s.Wait("nobody is in line", func() bool { return len(s.InLine()) == 0 })
	})
}

// asynq's Redis comes back empty, while the limiter's has kept its lines. Tasks run at once, whether a
// new client or an old one enqueues first.
func TestAnAsynqThatComesBackEmpty(t *testing.T) {
	for _, first := range []string{"the new client", "the old client"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				limits, s := sitetest.NewInBubble(t, sitetest.Shared(1000, time.Second)), sitetest.NewInBubble(t)
				s.Limiter = limits.AnotherLimiter()
				l := sitetest.NewLedger()
				s.Serve(s.Ok, l.Watch, sitetest.Calm)
				s.Serve(s.Ok, l.Watch, sitetest.Calm)
				old := s.Client(s.Limiter)
				s.JoinMany(old, "acme", 0, 10)
				s.SleepUntil(l, 10, time.Second)
				sitetest.Must(t, s.Redis.FlushAll(t.Context()).Err())
				time.Sleep(time.Second)
				clients := []*worker.Client{s.Client(s.Limiter), old}
				if first == "the old client" {
					clients[0], clients[1] = clients[1], clients[0]
				}
				for i, client := range clients {
					begin := time.Now()
					s.JoinMany(client, fmt.Sprint("tenant", i), 0, 10)
					s.SleepUntil(l, 20+10*i, 10*time.Minute)
					if late := time.Since(begin) - time.Second; late > 3*time.Second {
						t.Errorf("the tasks of client %d ran after %v", i, late)
					}
				}
			})
		})
	}
}
