package queuetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Replies cross, so that the newest reply does not tell the newest state. No task is forgotten for
// that. Two tasks of a tenant come at once, and a third when the second starts, over and over. Each
// tenant has a policy of its own, so that no other tenant's task has its line asked.
func TestRepliesThatCrossStrandNobody(t *testing.T) {
	const tenants = 10 // more is too much for a miniredis with the race detector
	policies := idle(30)
	for i := range tenants {
		policies[i].Match = []string{fmt.Sprint("x", i)}
		policies[i].Windows[0].Period = 20 * time.Millisecond
	}
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, n, crosses := sitetest.NewInBubble(t, policies...), rounds(12), hooktest.Hook(jitter)
		s.Asynq = hooktest.With(s.Asynq, crosses)
		var clients []*worker.Client
		for range 2 {
			s.Serve(s.Ok, sitetest.By(s.AnotherLimiter(crosses)))
			clients = append(clients, s.Client(s.AnotherLimiter(crosses)))
		}
		var all sync.WaitGroup
		for tenant := range tenants {
			all.Go(func() {
				who, typename := worker.Identity{Tenant: fmt.Sprint("tenant", tenant)}, fmt.Sprint("x", tenant)
				for round := range n {
					enqueue := func(name string) string {
						id := fmt.Sprintf("%s-%d-%s", who.Tenant, round, name)
						enqueue := s.Plain.Enqueue
						if client := rand.N(2 * len(clients)); client < len(clients) {
							enqueue = clients[client].Enqueue
						}
						_, err := enqueue(worker.NewTask(who, typename, nil), asynq.TaskID(id))
						expect.That(s, err == nil, err)
						return id
					}
					starts := func(id string) bool {
						for begun := time.Now(); s.WakesOf(id) == 0 || !slices.Contains(s.Starts(), id); time.Sleep(time.Millisecond) {
							if time.Since(begun) > crossingStart {
								s.Errorf("%s had not started after %v", id, crossingStart)
								return false
							}
						}
						return true
					}
					var a string
					var first sync.WaitGroup
					first.Go(func() { a = enqueue("a") })
					b := enqueue("b")
					first.Wait()
					if !starts(b) || !starts(enqueue("c")) || !starts(a) {
						return
					}
					time.Sleep(rand.N(30 * time.Millisecond)) // so that lines are empty now and then
				}
			})
		}
		all.Wait()
		s.WantOnceEach(t, 3*tenants*n)
		s.Wait("nobody is in line", func() bool { return len(s.InLine()) == 0 })
	})
}

// One process serves the asynqs of two databases by one limiter, and loses some of its replies. A take that is
// repeated for the other server moves no task to the wrong one. All run once, within the limit that they share.
func TestTwoAsynqsByOneLimiter(t *testing.T) {
	if sitetest.OnCluster() {
		t.Skip("a Redis Cluster has one database")
	}
	const tasks = 60
	s := sitetest.OnRedis(t, append(idle(10), sitetest.Shared(20, 500*time.Millisecond))...)
	s.Limiter = s.AnotherLimiter(hooktest.Hook((&sitetest.Fault{
		Is: sitetest.IsScript, Lost: true, Err: context.DeadlineExceeded, Hits: func(int) bool { return rand.N(10) == 0 },
	}).See))
	begun := time.Now()
	var ran [2]sitetest.Ledger // the same IDs are in both
	for i := range ran {
		o := sitetest.SameRedis(s.Redis)
		o.DB = i
		s.Asynq = sitetest.Dialed{Options: o}
		s.Serve(ran[i].Ok)
		ours := s.Client(s.AnotherLimiter())
		plain := asynq.NewClient(s.Asynq)
		defer plain.Close()
		for n := range tasks {
			enqueue := ours.Enqueue
			if n%4 == 0 {
				enqueue = plain.Enqueue
			}
			expect.Must(t, expect.ErrOf(enqueue(sitetest.AcmeTask(), asynq.TaskID(fmt.Sprint(n)))))
		}
	}
	for i := range ran {
		s.Wait("all have run", func() bool { return ran[i].Done() == tasks })
	}
	t.Logf("all ran within %v", time.Since(begun))
	sitetest.WantNeverOver(t, s.Grants(), 20, 500*time.Millisecond)
	s.Wait("nobody is in line", func() bool { return len(s.InLine()) == 0 })
	for i := range ran {
		ran[i].WantOnceEach(t, tasks)
	}
}

// asynq's Redis comes back empty, while the limiter's has kept its lines. Tasks run at once, whoever enqueues first.
func TestAnAsynqThatComesBackEmpty(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values("the new client", "the old client"), func(t *testing.T, first string) {
		limits, s := sitetest.NewInBubble(t, sitetest.Shared(1000, time.Second)), sitetest.NewInBubble(t)
		s.Limiter = limits.AnotherLimiter()
		s.Serve(s.Ok)
		s.Serve(s.Ok)
		old := s.Client(s.Limiter)
		s.JoinMany(old, "acme", 0, 10)
		s.SleepUntil(10, time.Second)
		expect.Must(t, s.Redis.FlushAll(t.Context()).Err())
		time.Sleep(time.Second)
		clients := []*worker.Client{s.Client(s.Limiter), old}
		if first == "the old client" {
			clients[0], clients[1] = clients[1], clients[0]
		}
		for i, client := range clients {
			begin := time.Now()
			s.JoinMany(client, fmt.Sprint("tenant", i), 0, 10)
			s.SleepUntil(20+10*i, 10*time.Minute)
			late := time.Since(begin) - time.Second
			expect.That(t, late <= 3*time.Second, "the tasks of client", i, "ran after", late)
		}
	})
}

// roundsEnv multiplies the rounds of tests with random order.
const roundsEnv = "SLUICE_ROUNDS"

// rounds is n, times what the environment asks for.
func rounds(n int) int {
	if times, err := strconv.Atoi(os.Getenv(roundsEnv)); err == nil {
		return n * times
	}
	return n
}

// crossingStart is how late a task may start that fits at once: the last of many idle servers asks by then (SPREAD of
// line_appointments.lua).
const crossingStart = 2 * time.Second

// idle returns policies that guard nothing. A server asks one of its empty lines every 5 s. So
// beside 30 of them a task waits for minutes if a server wrongly holds its line to be empty.
func idle(n int) (policies []throttle.Policy) {
	for i := range n {
		policies = append(policies, throttle.Policy{
			Name:    "idle-" + strconv.Itoa(i),
			Windows: []throttle.Window{{Name: "window", Limit: 1, Period: time.Second, Shared: true}},
		})
	}
	return policies
}

// jitter delays every reply by up to a millisecond, so that replies on several connections cross.
func jitter(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	time.Sleep(rand.N(time.Millisecond))
	return err
}
