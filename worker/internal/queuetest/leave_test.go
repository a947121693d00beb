package queuetest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// lateMost is how late a task may start after it could, whatever happened to another server.
const lateMost = 3 * time.Second

// A machine is a server with a limiter and connections of its own, which can be cut.
type machine struct {
	proxy  sitetest.BreakableProxy
	server *worker.Server
}

// machines starts two of them, and returns which of them ran a task last.
func machines(s *sitetest.Site, hook func(*machine) hooktest.Hook, change ...func(*asynq.Config, *worker.Config)) (
	all [2]*machine, last func() *machine) {
	var mu sync.Mutex
	var ran *machine
	whole := s.Asynq
	for i := range all {
		m := &machine{}
		all[i] = m
		s.Asynq = hooktest.With(sitetest.Dialed{Options: m.proxy.Options(sitetest.SameRedis(s.Redis))}, hook(m))
		m.server = s.Serve(func(ctx context.Context, t *asynq.Task) error {
			mu.Lock()
			ran = m
			mu.Unlock()
			return s.Ok(ctx, t)
		}, append(change, sitetest.By(s.LimiterThrough(&m.proxy)))...)
		s.Cleanup(func() {
			m.proxy.Mend()
			m.server.Shutdown()
			time.Sleep(2 * time.Second) // go-redis tries to connect in the background
		})
	}
	s.Asynq = whole
	return all, func() *machine {
		mu.Lock()
		defer mu.Unlock()
		return ran
	}
}

// joinTogether enqueues tasks of acme by one join, which nudges one server.
func joinTogether(s *sitetest.Site, n int) {
	s.Helper()
	var tasks []*asynq.Task
	for range n {
		tasks = append(tasks, worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil))
	}
	for _, e := range s.Client(s.AnotherLimiter()).EnqueueBulk(context.Background(), tasks) {
		expect.Must(s, e.Err)
	}
}

// A server asks a line alone, and leaves. Another one idles: by what it knows the line is empty, like many.
func TestAServerThatLeavesDelaysNobody(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"stopped", "killed"} {
		for _, policies := range []int{1, 50} {
			t.Run(fmt.Sprint(how, " with ", policies), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					const period = 10 * time.Second
					s := sitetest.NewInBubble(t, append(idle(policies-1), sitetest.Shared(1, period))...)
					_, last := machines(s, func(*machine) hooktest.Hook {
						return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error { return next(ctx, cmd) }
					})
					time.Sleep(20 * time.Second)
					joinTogether(s, 4)
					s.SleepUntil(1, lateMost)
					time.Sleep(period / 2)
					if how == "stopped" {
						last().server.Shutdown()
					} else {
						last().proxy.Cut()
					}
					s.SleepUntil(4, 5*time.Minute)
					s.WantPace(lateMost, sitetest.Shared(1, period).Windows...)
					s.WantWakes(sitetest.OnlyRuns)
				})
			})
		}
	}
}

// A machine dies with the nudge that it was sent, or after a take that emptied the line, and before it picked.
// Who idles puts the tickets back when they count as lost, after 5 s.
func TestAMachineThatDiesWithANudgeOrTicketsDelaysThemBriefly(t *testing.T) {
	nudge := func(cmd redis.Cmder, done bool) bool { return done && cmd.Name() == "blpop" && cmd.Err() == nil }
	tickets := func(cmd redis.Cmder, done bool) bool { return !done && sitetest.IsPick(cmd.Args()) }
	type row struct {
		policies, tasks int
		dies            func(cmd redis.Cmder, done bool) bool
		most            time.Duration
	}
	sitetest.EachBubble(t, map[string]row{
		"a nudge, with 1":  {1, 1, nudge, lateMost},
		"a nudge, with 50": {50, 1, nudge, lateMost},
		"the last tickets": {50, 2, tickets, 5*time.Second + lateMost},
	}, func(t *testing.T, row row) {
		s := sitetest.NewInBubble(t, append(idle(row.policies-1), sitetest.Shared(100, time.Minute))...)
		var once sync.Once
		machines(s, func(m *machine) hooktest.Hook {
			return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
				if row.dies(cmd, false) {
					once.Do(m.proxy.Cut)
				}
				err := next(ctx, cmd)
				if row.dies(cmd, true) {
					once.Do(m.proxy.Cut)
				}
				return err
			}
		})
		time.Sleep(20 * time.Second)
		begun := time.Now()
		s.JoinMany(s.Client(s.AnotherLimiter()), "acme", 0, row.tasks)
		s.SleepUntil(row.tasks, 5*time.Minute)
		late := s.Grants()[row.tasks-1].At.Sub(begun)
		expect.That(t, late <= row.most, "it started", late, "late")
	})
}

// A machine dies while it runs a task. It uses a retry only if asynq's heartbeat has seen it run.
func TestATaskOfAMachineThatDiesGoesBack(t *testing.T) {
	for ran, want := range map[time.Duration]int{2 * time.Second: 0, 8 * time.Second: 1} {
		t.Run(ran.String(), func(t *testing.T) {
			sitetest.Bubble(t, sitetest.Shared(100, time.Minute), func(t *testing.T, s *sitetest.Site) {
				var proxy sitetest.BreakableProxy
				whole := s.Asynq
				s.Asynq = sitetest.Dialed{Options: proxy.Options(sitetest.SameRedis(s.Redis))}
				s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(1))
				s.Serve(func(ctx context.Context, _ *asynq.Task) error { <-ctx.Done(); return ctx.Err() })
				time.Sleep(ran)
				proxy.Cut()
				s.Asynq = whole
				s.Serve(func(ctx context.Context, task *asynq.Task) error {
					retried, _ := asynq.GetRetryCount(ctx)
					expect.That(t, retried == want, "it has used", retried, "retries, want", want)
					return s.Ok(ctx, task)
				}, s.Apart)
				time.Sleep(2 * time.Minute)
				runs := s.Runs()
				expect.That(t, len(runs) == 1, "ran", runs, "on the other machine")
				proxy.Mend()
				time.Sleep(2 * time.Second) // go-redis tries to connect in the background
			})
		})
	}
}

// The limiter does not answer for a while. Whatever waits then, and however it came, starts soon after.
func TestAnOutageOfTheLimiterDelaysNobodyForLong(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(10*time.Second, 3*time.Minute), func(t *testing.T, out time.Duration) {
		const tasks = 60
		s := sitetest.NewInBubble(t, append(idle(20), sitetest.Shared(100, time.Second))...)
		var proxy sitetest.BreakableProxy
		s.Serve(s.Ok, sitetest.By(s.LimiterThrough(&proxy)))
		time.Sleep(2 * time.Second)
		proxy.Cut()
		s.EnqueueMany("acme", 0, tasks/3) // are denied
		s.EnqueueMany("beta", 0, tasks/3, asynq.ProcessIn(out/2))
		s.JoinMany(s.Client(s.AnotherLimiter()), "gamma", 0, tasks/3)
		time.Sleep(out)
		proxy.Mend()
		mended := time.Now()
		s.SleepUntil(tasks, time.Minute)
		late := s.Grants()[tasks-1].At.Sub(mended)
		expect.That(t, late <= lateMost, "the last one started", late, "after the outage")
		time.Sleep(2 * time.Second) // go-redis tries to connect in the background
	})
}
