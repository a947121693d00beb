package worker_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A server that found a line empty hears of it in time when somebody joins: by a nudge if that was
// a client, as all the time if it was itself.
func TestServersHearOfNews(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name     string
		enqueued bool // by a plain client, so that it joins when it is denied
		period   time.Duration
		tasks    int
		most     time.Duration
	}{
		{"denied", true, 3 * time.Second, 3, 7 * time.Second},
		{"denied, and due soon", true, 300 * time.Millisecond, 2, 380 * time.Millisecond},
		{"enqueued by our client", false, 3 * time.Second, 3, 7 * time.Second},
		{"enqueued by our client, and due soon", false, 300 * time.Millisecond, 2, 380 * time.Millisecond},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := policy(1, row.period)
				p.Windows = append(p.Windows, throttle.Window{Name: "all", Limit: 1000, Period: time.Minute, Scope: throttle.Shared})
				others := make([]throttle.Policy, 20) // with empty lines, which are asked in rotation
				for i := range others {
					others[i] = throttle.Policy{Name: fmt.Sprint("other-", i), Windows: p.Windows}
				}
				s := synctestSite(t, append(others, p)...)
				l := newLedger()
				s.serve(s.ok, l.watch, s.apart, func(c *asynq.Config, _ *worker.Config) { c.TaskCheckInterval = time.Second })
				s.serve(s.ok, l.watch, s.apart, func(c *asynq.Config, _ *worker.Config) { c.TaskCheckInterval = time.Second })
				time.Sleep(10 * time.Second)
				if row.enqueued {
					s.enqueueMany("quick", 0, row.tasks)
				} else {
					client := s.client(s.anotherLimiter(s.redis))
					s.joinMany(client, "quick", 0, row.tasks)
					client.Close()
				}
				s.sleepUntil(l, row.tasks, 20*time.Second)
				grants := l.sorted()
				if took := grants[row.tasks-1].at.Sub(grants[0].at); took > row.most {
					t.Errorf("%d tasks at one per %v took %v", row.tasks, row.period, took)
				}
				s.wantNobodyInLine()
			})
		})
	}
}

// Servers and clients may share a limiter. One that ends leaves the line to the others.
func TestOneLimiterForAll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(2, 2*time.Second))
		l := newLedger()
		first := s.client(s.limiter)
		s.joinMany(first, "acme", 0, 4)
		one := s.serve(s.ok, l.watch, brisk)
		two := s.serve(s.ok, l.watch, brisk)
		s.joinMany(first, "acme", 4, 4)
		s.sleepUntil(l, 8, 10*time.Second)
		first.Close()
		s.joinMany(s.client(s.limiter), "acme", 8, 6)
		s.sleepUntil(l, 14, 10*time.Second)
		two.Shutdown()
		s.enqueueMany("acme", 14, 6)
		s.sleepUntil(l, 20, 10*time.Second)
		if u := l.utilization(2, 2*time.Second); u < 0.6 {
			t.Errorf("utilization %.2f", u)
		}
		s.wantNobodyInLine()
		one.Shutdown()
		s.joinMany(s.client(s.limiter), "acme", 20, 4) // there is no server
		s.serve(s.ok, l.watch, brisk)
		s.sleepUntil(l, 24, 10*time.Second)
		if mean, most := l.wakesPerTask(); most > 2 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
	})
}

// A server that stops or dies leaves the line to another one, which takes on at the same rate.
func TestServersComeAndGo(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		dies bool
	}{{"stopped", false}, {"died", true}} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, shared(20, 2*time.Second))
				l := newLedger()
				var c cable
				through := redis.NewClient(c.options(like(s.redis)))
				defer through.Close()
				own := s.anotherLimiter(through)
				s.enqueueMany("acme", 0, 300)
				leading := s.asynq
				s.asynq = dialed{c.options(like(s.redis))}
				server := s.serve(s.ok, l.watch, brisk, func(_ *asynq.Config, c *worker.Config) { c.Limiter = own })
				s.asynq = leading
				time.Sleep(5 * time.Second)
				s.serve(s.ok, l.watch, brisk, s.apart)
				time.Sleep(5 * time.Second)
				if row.dies {
					c.cut()
				} else {
					server.Shutdown()
				}
				s.sleepUntil(l, 300, 35*time.Second)
				mean, most := l.wakesPerTask()
				if mean > 2.2 || most > 4 {
					t.Errorf("%.2f wakes a task, at most %d", mean, most)
				}
				if n := l.excess(20, 2*time.Second); n != 0 {
					t.Errorf("%d more than the limit", n)
				}
				u := l.utilization(20, 2*time.Second)
				if !row.dies && u < 0.93 || u < 0.8 { // looking for work every 100 ms takes up to 0.05
					t.Errorf("utilization %.3f", u)
				}
				t.Logf("wakes %.2f, at most %d, utilization %.3f", mean, most, u)
				s.wantInOrder(l)
				if row.dies {
					c.mend()
					server.Shutdown()
					time.Sleep(2 * time.Second) // go-redis tries to connect in the background
				}
			})
		})
	}
}

// A server that dies between a take and its pick takes nobody with it: what it took is put back at
// its ranks after 5 s.
func TestServerDiesBeforeItPicks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(10, 2*time.Second))
		l := newLedger()
		var c cable
		through := redis.NewClient(c.options(like(s.redis)))
		defer through.Close()
		own := s.anotherLimiter(through)
		s.joinMany(s.client(s.limiter), "acme", 0, 60)
		whole := s.asynq
		s.asynq = hooktest.With(dialed{c.options(like(s.redis))}, hooktest.Hook(
			func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
				if isPick(cmd) {
					c.cut()
				}
				return next(ctx, cmd)
			}))
		dead := s.serve(s.ok, l.watch, brisk, func(_ *asynq.Config, c *worker.Config) { c.Limiter = own })
		time.Sleep(time.Second)
		if n := l.count(); n > 0 {
			t.Fatalf("%d tasks were picked", n)
		}
		s.asynq = whole
		s.serve(s.ok, l.watch, brisk, s.apart)
		s.sleepUntil(l, 60, 25*time.Second) // instead of 12 s
		if _, most := l.wakesPerTask(); most > 1 {
			t.Errorf("a task woke %d times", most)
		}
		if n := l.excess(10, 2*time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		s.wantInOrder(l)
		s.wantNobodyInLine()
		c.mend()
		dead.Shutdown()
		time.Sleep(2 * time.Second)
		s.wantCounters(counters{Processed: 60})
	})
}

// A server that reaches the limiter's Redis and not asynq's takes no more than it can pick.
func TestServerWithoutAsynqsRedis(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(10, 2*time.Second))
		l := newLedger()
		var c cable
		whole := s.asynq
		s.asynq = dialed{c.options(like(s.redis))}
		server := s.serve(s.ok, l.watch, brisk, s.apart)
		s.asynq = whole
		s.joinMany(s.client(s.limiter), "acme", 0, 60)
		time.Sleep(1500 * time.Millisecond)
		s.serve(s.ok, l.watch, brisk, s.apart)
		c.cut()
		s.sleepUntil(l, 60, 30*time.Second)
		s.wantNobodyInLine()
		c.mend()
		server.Shutdown()
		time.Sleep(2 * time.Second)
	})
}

// isPick reports whether the command is a pick.
func isPick(cmd redis.Cmder) bool { return hooktest.IsScript(cmd) && isPickCall(cmd.Args()) }

func isPickCall(args []any) bool {
	return len(args) > 6 && args[3] == "asynq:{default}:scheduled" && args[6] == "asynq:{default}:paused"
}
