package faulttest

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Redis stops answering, the limiter's own or that of all: nothing is lost or runs twice, no retry is burnt, no limit
// exceeded, and it is logged once.
func TestRedisStopsAnswering(t *testing.T) {
	for _, outage := range []time.Duration{10 * time.Second, 40 * time.Second} {
		for _, who := range []string{"the limiter's", "all"} {
			t.Run(fmt.Sprint(who, " for ", outage), func(t *testing.T) {
				sitetest.Bubble(t, sitetest.Policy(4, 10*time.Second), func(t *testing.T, s *sitetest.Site) {
					var proxy sitetest.BreakableProxy
					if who == "all" {
						s.Asynq = sitetest.Dialed{Options: proxy.Options(sitetest.SameRedis(s.Redis))}
					}
					s.Limiter = s.LimiterThrough(&proxy)

					// A dequeue that Redis did when nobody waited for it any more costs a retry, as in plain asynq.
					retries := asynq.MaxRetry(0)
					if who == "all" {
						retries = asynq.MaxRetry(3)
					}
					const n, late = 20, 6
					s.Serve(s.Ok)
					s.EnqueueMany("acme", 0, n, retries)
					time.Sleep(15 * time.Second)
					goesOn := proxy.Hang(outage)
					if who == "all" {
						<-goesOn
					}
					for i := range late {
						s.Enqueue(sitetest.Task("initech"), asynq.TaskID(fmt.Sprint("late", i)), retries)
					}
					<-goesOn
					for end := time.Now().Add(10 * time.Minute); s.Done() < n+late && time.Now().Before(end); {
						time.Sleep(time.Second)
					}
					time.Sleep(2 * time.Minute) // time for a task to run twice
					s.WantOnceEach(t, n+late)
					for _, tenant := range []string{"acme", "initech"} {
						sitetest.WantNeverOver(t, s.GrantsOf(tenant), 4, 10*time.Second)
					}
					// For 12 s go-redis repeats the call, and nobody notices.
					begun := s.Logs.Count("worker: the limiter is unavailable")
					over := s.Logs.Count("worker: the limiter is available again")
					silent := who != "all" && outage > 12*time.Second && begun == 0
					expect.That(t, begun <= 1 && begun == over && !silent, "want the outage logged once:", s.Logs)
					if who == "all" {
						expect.Equal(t, s.Counters().Archived, 0, "tasks were archived")
						return
					}
					s.WantCounters(sitetest.Counters{Processed: n + late})
					s.WantReported(nil, nil)
				})
			})
		}
	}
}

// A redisServer is a Redis whose address may change, as when it is restarted.
type redisServer struct {
	addr    atomic.Value
	admin   *redis.Client
	dir     string
	process *servers.Process
}

func (p *redisServer) options() *redis.Options {
	return &redis.Options{
		Addr: "redis.test:6379", DialerRetries: 1,
		Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, p.addr.Load().(string))
		},
		MaxRetries: 1, ReadTimeout: 500 * time.Millisecond, MinRetryBackoff: time.Millisecond, MaxRetryBackoff: time.Millisecond,
	}
}

// start starts a redis-server in the directory, which its last one has left. It keeps what it writes.
func (p *redisServer) start(t *testing.T) {
	t.Helper()
	process := expect.Got(servers.StartRedis(p.dir, "--appendonly", "yes", "--appendfsync", "always"))(t)
	t.Cleanup(process.Stop)
	p.process = process
	p.addr.Store(process.Addr)
	p.admin = throttletest.Client(t, process.Addr)
}

// Whatever happens to a redis-server while tasks wait: none is lost or loses a retry, and no limit is exceeded.
func TestFaultsOfARedisServer(t *testing.T) {
	t.Parallel()
	const period = 1500 * time.Millisecond
	for name, fault := range map[string]func(t *testing.T, p *redisServer){
		"killed, and started again with what it had written": func(t *testing.T, p *redisServer) {
			p.process.Stop()
			time.Sleep(200 * time.Millisecond)
			p.start(t)
		},
		"its memory is full": func(t *testing.T, p *redisServer) {
			p.admin.ConfigSet(t.Context(), "maxmemory", "1")
			time.Sleep(period)
			p.admin.ConfigSet(t.Context(), "maxmemory", "0")
		},
		"it loses its scripts, again and again": func(t *testing.T, p *redisServer) {
			go func() {
				for ; t.Context().Err() == nil; time.Sleep(5 * time.Millisecond) {
					p.admin.ScriptFlush(t.Context())
				}
			}()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			throttletest.Redis(t) // or skips the test where there is none
			p := &redisServer{dir: t.TempDir()}
			p.start(t)
			client := redis.NewClient(p.options())
			t.Cleanup(func() { client.Close() })
			s := sitetest.New(t, client, sitetest.Policy(3, period))
			s.Asynq = sitetest.Dialed{Options: p.options()}
			const n = 9
			s.Serve(s.Ok)
			s.EnqueueMany("acme", 0, n, asynq.MaxRetry(0))
			s.Wait("the first have run and the others wait", func() bool { return s.Done() >= 3 && len(s.Wakes()) == n })
			s.Wait("all are put down", func() bool { return s.Counters().Active == 0 })
			fault(t, p)
			s.Wait("all have run", func() bool { return s.Done() == n })
			s.Wait("all are put down", func() bool { return s.Counters().Active == 0 })
			s.WantOnceEach(t, n)
			s.WantCounters(sitetest.Counters{Processed: n})
			s.WantReported(nil, nil)
			expect.That(t, s.Logs.Count("worker: the limiter is unavailable") <= 1, "want it logged at most once:", s.Logs)
			sitetest.WantNeverOver(t, s.GrantsOf("acme"), 3, period)
			expect.That(t, s.Logs.Count("NOSCRIPT") == 0, "nothing was to be noticed:", s.Logs)
		})
	}
}

// The limiter's Redis starts again with nothing, while asynq still has the tasks. They run two minutes
// after their expected start at the latest, however far away that is, and whether a client or a server
// had them join. Those that come after them do not wait for them.
func TestLimitersRedisRestartsEmpty(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(4, time.Minute), func(t *testing.T, s *sitetest.Site) {
		limiters := sitetest.NewInBubble(t, sitetest.Policy(4, time.Minute))
		s.Limiter = limiters.Limiter
		const n = 24
		s.Serve(s.Ok)
		s.EnqueueMany("acme", 0, n/2, asynq.MaxRetry(0))
		time.Sleep(time.Second)
		s.JoinMany(s.Client(s.Limiter), "acme", n/2, n/2, asynq.MaxRetry(0))
		time.Sleep(149 * time.Second)
		limiters.Redis.FlushAll(t.Context())
		limiters.Redis.ScriptFlush(t.Context())
		flushed := time.Now()
		s.EnqueueMany("acme", n, 4, asynq.MaxRetry(0))
		s.SleepUntil(n+4, 10*time.Minute)
		// The last was told to start 5 minutes after the first, and comes by its fallback: in the next second,
		// when asynq forwards, which is every 5 s. SleepUntil takes another second.
		took := time.Since(flushed)
		expect.That(t, took <= 150*time.Second+sitetest.FallbackMin+(1+5+1)*time.Second, "it took", took)
		time.Sleep(2 * time.Minute)
		s.WantOnceEach(t, n+4)
		s.WantCounters(sitetest.Counters{Processed: n + 4})
		s.WantReported(nil, nil)
		since := slices.DeleteFunc(s.Grants(), func(g sitetest.TaskGrant) bool { return g.At.Before(flushed) })
		sitetest.WantNeverOver(t, since, 4, time.Minute)
		limiters.WantNobodyInLine()
	})
}
