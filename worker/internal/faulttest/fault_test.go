// Package faulttest tests workers while processes, connections and servers of Redis fail, and on
// each topology of Redis. Read TestCallsAreLost first, then TestRedisStopsAnswering.
package faulttest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Calls of tasks that never arrive, or whose reply is lost, delay tasks and do nothing else: each
// runs once, completed ones too, and no ticket is left behind.
func TestCallsAreLost(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(false, true), func(t *testing.T, lost bool) {
		s := sitetest.NewInBubble(t, sitetest.Shared(4, 5*time.Second))
		random := rand.New(rand.NewPCG(3, 4))
		f := &sitetest.Fault{Is: sitetest.IsPick, Lost: lost, Err: io.EOF, Hits: func(int) bool { return random.IntN(3) == 0 }}
		whole := s.Asynq
		s.Asynq = hooktest.With(whole, hooktest.Hook(f.See))
		s.EnqueueMany("acme", 0, 15, asynq.Retention(time.Hour), asynq.MaxRetry(0))
		s.JoinMany(s.Client(s.AnotherLimiter()), "acme", 15, 15, asynq.Retention(time.Hour), asynq.MaxRetry(0))
		for range 2 {
			s.Serve(s.Ok, s.Apart)
		}
		s.SleepUntil(30, 8*time.Minute)
		time.Sleep(3 * time.Minute) // for what may come after
		s.WantOnceEach(t, 30)
		expect.That(t, f.Count() != 0, "no call was lost")
		sitetest.WantNeverOver(t, s.Grants(), 4, 5*time.Second)
		s.WantCounters(sitetest.Counters{Processed: 30})
		expect.Equal(t, s.Redis.ZCard(t.Context(), "asynq:{default}:completed").Val(), 30, "tasks are completed")
		keys := s.Redis.Keys(t.Context(), "sluice:{*}:*").Val()
		expect.That(t, len(keys) <= 0, "left behind:", keys)
	})
}

// A shutdown does not wait until the leases of denied tasks run out that cannot be put back.
func TestShutdownWithoutRedis(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		var proxy sitetest.BreakableProxy
		s.Asynq = sitetest.Dialed{Options: proxy.Options(sitetest.SameRedis(s.Redis))}
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(1))
		server := s.Serve(s.Ok, func(theirs *asynq.Config, ours *worker.Config) {
			theirs.ShutdownTimeout = 3 * time.Second
			ours.OnDecision = func(context.Context, *asynq.Task, throttle.Decision) { proxy.Cut() }
		})
		time.Sleep(2 * time.Second)
		begun := time.Now()
		server.Shutdown()
		// A requeue that failed is repeated after 2 s at most.
		took := time.Since(begun)
		expect.That(t, took >= 3*time.Second && took <= (3+2)*time.Second, "shut down in", took, "want 3 s and a bit")
		proxy.Mend()
		s.WantCounters(sitetest.Counters{Active: 1, Leases: 1}) // as after the death of a worker
		time.Sleep(2 * time.Second)                             // go-redis tries to connect in the background
	})
}

// A task that has ended is put down as its handler left it, however long asynq's Redis is out then.
// Plain asynq leaves it active, and recovers it minutes later: it runs again, or is archived.
func TestTasksEndInSpiteOfAnOutage(t *testing.T) {
	refused := errors.New("READONLY You can't write against a read only replica.")
	retention := asynq.Retention(time.Hour)
	for _, row := range []struct {
		verb  string
		err   error // of the handler
		plain bool
		lost  bool
		fault error
		fails int
		want  sitetest.Counters
	}{
		{asynqredis.Done, nil, false, false, io.ErrUnexpectedEOF, 4, sitetest.Counters{Processed: 1}},
		{asynqredis.Done, nil, false, true, io.EOF, 1, sitetest.Counters{Processed: 1}}, // the next one finds the task gone
		{asynqredis.Done, nil, true, false, io.ErrUnexpectedEOF, 4, sitetest.Counters{Active: 1, Leases: 1}},
		{asynqredis.Complete, nil, false, false, refused, 4, sitetest.Counters{Processed: 1}},
		{asynqredis.Retry, errors.New("no"), false, false, refused, 4, sitetest.Counters{Processed: 1, Failed: 1, Retry: 1}},
		{asynqredis.Archive, asynq.SkipRetry, false, false, io.ErrUnexpectedEOF, 4,
			sitetest.Counters{Processed: 1, Failed: 1, Archived: 1}},
	} {
		t.Run(fmt.Sprintf("%s, plain %v, arrives %v", row.verb, row.plain, row.lost), func(t *testing.T) {
			sitetest.Bubble(t, sitetest.Policy(10, time.Hour), func(t *testing.T, s *sitetest.Site) {
				f := &sitetest.Fault{
					Is:   func(args []any) bool { return asynqredis.CallOf(args).Verb == row.verb },
					Hits: func(n int) bool { return n <= 4 }, Lost: row.lost, Err: row.fault,
				}
				opts := []asynq.Option{asynq.TaskID("a"), asynq.MaxRetry(1)}
				if row.verb == asynqredis.Complete {
					opts = append(opts, retention)
				}
				s.Enqueue(sitetest.AcmeTask(), opts...)
				theirs, ours := s.Configs()
				theirs.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
				logs := &sitetest.Logs{}
				theirs.Logger, theirs.LogLevel = sitetest.AsynqLog{Logs: logs}, asynq.WarnLevel
				inside := &keepingConn{RedisConnOpt: s.Asynq}
				var server interface {
					Start(asynq.Handler) error
					Shutdown()
				}
				if row.plain {
					server = asynq.NewServer(inside, theirs)
				} else {
					var err error
					server, err = worker.NewServer(inside, theirs, ours)
					expect.Require(t, err == nil, err)
				}
				inside.made.AddHook(hooktest.Hook(f.See))
				expect.Must(t, server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
					s.Ok(ctx, task)
					return row.err
				})))
				t.Cleanup(server.Shutdown)
				time.Sleep(20 * time.Second)
				s.WantCounters(row.want)
				expect.That(t, (row.plain || f.Count() == row.fails) && f.Count() != 0 && len(s.Runs()) == 1 &&
					logs.Count("retry syncing") > 0 == row.plain, f.Count(), "calls have failed, want", row.fails,
					"ran", s.Runs(), "asynq says", logs)
			})
		})
	}
}

// A keepingConn keeps the client that it makes: hooks that are added later are nearer to Redis.
type keepingConn struct {
	asynq.RedisConnOpt
	made redis.UniversalClient
}

func (k *keepingConn) MakeRedisClient() any {
	made := k.RedisConnOpt.MakeRedisClient()
	k.made = made.(redis.UniversalClient)
	return made
}

// A queue is paused until all its denied tasks have reached their fallback. They wake in vain once at most.
func TestTasksOutlastALongPauseOfTheirQueue(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(8, 30*time.Second), func(t *testing.T, s *sitetest.Site) {
		s.Serve(s.Ok)
		s.EnqueueMany("acme", 0, 40, asynq.MaxRetry(0))
		time.Sleep(10 * time.Second)
		expect.Must(t, s.Inspector.PauseQueue("default"))
		granted := s.Granted()
		time.Sleep(6 * time.Minute)
		s.WantStates("default", 0, 40-granted)
		expect.Must(t, s.Inspector.UnpauseQueue("default"))
		s.SleepUntil(40, 20*time.Minute)
		s.WantWakes(sitetest.DeniedAndRun + 1)
		sitetest.WantNeverOver(t, s.Grants(), 8, 30*time.Second)
		s.WantCounters(sitetest.Counters{Processed: 40})
		s.WantNobodyInLine()
	})
}
