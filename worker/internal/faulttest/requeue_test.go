package faulttest

import (
	"context"
	"errors"
	"io"
	"strings"
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

// Asynq's Redis goes away just when a task was denied, for a moment, or for longer than its lease: then the
// recoverer finds the task. Asynq would leave it active, and count a retry or archive it: it waits.
func TestRequeueOutlastsABrokenConnection(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(time.Second, 90*time.Second), func(t *testing.T, away time.Duration) {
		s := sitetest.NewInBubble(t, sitetest.Policy(1, 5*time.Minute))
		var proxy sitetest.BreakableProxy
		s.Asynq = sitetest.Dialed{Options: proxy.Options(sitetest.SameRedis(s.Redis))}
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.Serve(s.Ok, func(_ *asynq.Config, ours *worker.Config) {
			ours.OnDecision = func(_ context.Context, _ *asynq.Task, d throttle.Decision) {
				if !d.Granted {
					proxy.Cut()
					time.AfterFunc(away, proxy.Mend)
				}
			}
		})
		time.Sleep(away - time.Millisecond)
		s.WantCounters(sitetest.Counters{Active: 1, Leases: 1})
		time.Sleep(2 * away)
		a := s.Task("a")
		throttled := strings.HasPrefix(a.LastErr, "throttled: api/window")
		expect.That(t, a.State == asynq.TaskStateScheduled && a.Retried == 0 && throttled, a)
		time.Sleep(5*time.Minute - 2*away)
		s.WantCounters(sitetest.Counters{Processed: 1})
	})
}

// Asynq's recoverer, which has all the time there is, must not be delayed by one task.
func TestRequeueInTheRecovererFails(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		refused := &sitetest.Fault{Is: sitetest.IsRequeue, Err: io.ErrUnexpectedEOF}
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(refused.See))
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		server := s.Serve(s.Ok)
		time.Sleep(3 * time.Minute)
		expect.That(t, refused.Calls() >= 2, "the requeue was not repeated")
		down := make(chan struct{})
		go func() { server.Shutdown(); close(down) }()
		select {
		case <-down:
		case <-time.After(time.Minute):
			t.Fatal("the server does not shut down")
		}
		s.WantCounters(sitetest.Counters{Active: 1, Leases: 1})
	})
}

// A server's recoverer has listed a task whose lease had ended, and the same server has picked it up meanwhile.
func TestARecovererLeavesWhatRunsHere(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if args := cmd.Args(); sitetest.IsScript(args) && args[3] == "asynq:{default}:lease" { // it lists
				s.Redis.ZAddXX(ctx, "asynq:{default}:lease", redis.Z{Member: "a"})
				defer s.Redis.ZAddXX(ctx, "asynq:{default}:lease", redis.Z{Member: "a", Score: float64(time.Now().Unix() + 30)})
			}
			return next(ctx, cmd)
		}))
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.Serve(func(context.Context, *asynq.Task) error { time.Sleep(5 * time.Minute); return nil })
		time.Sleep(6 * time.Minute)
		s.WantCounters(sitetest.Counters{Processed: 1})
	})
}

// A requeue takes so long that the task's ticket is taken meanwhile. It is due when it is back, and starts then.
func TestRequeueThatIsLaterThanItsTicket(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, 2*time.Second), func(t *testing.T, s *sitetest.Site) {
		late := &sitetest.Fault{Is: sitetest.IsRequeue, Hits: sitetest.Only(1), Meanwhile: func() { time.Sleep(3 * time.Second) }}
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(late.See))
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask())
		s.Serve(s.Ok)
		begun := time.Now()
		s.SleepUntil(1, time.Minute)
		started := s.Grants()[0].At.Sub(begun)
		expect.That(t, started >= 3*time.Second && started <= 3*time.Second+100*time.Millisecond, "it started after", started)
	})
}

// A denied task was requeued, or a failed one is to be retried, but the reply was lost, and the task was picked up
// again before the call is repeated: the worker that runs it now must keep it.
func TestAnEndWhoseReplyWasLost(t *testing.T) {
	type row struct {
		is    func(args []any) bool
		fails int64
	}
	sitetest.EachBubble(t, map[string]row{
		"requeue": {sitetest.IsRequeue, 0},
		"retry":   {func(args []any) bool { return asynqredis.CallOf(args).Verb == asynqredis.Retry }, 1},
	}, func(t *testing.T, row row) {
		s := sitetest.NewInBubble(t, sitetest.Policy(1, time.Hour))
		running, finish := make(chan struct{}), make(chan struct{})
		lost := &sitetest.Fault{
			Is: row.is, Hits: sitetest.Only(1), Lost: true, Err: io.ErrUnexpectedEOF,
			Meanwhile: func() {
				s.Open("a")
				<-running
			},
		}
		if row.fails == 0 {
			s.Fill("acme")
		}
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(int(row.fails)))
		theirs, ours := s.Configs()
		theirs.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
		inside := &keepingConn{RedisConnOpt: s.Asynq}
		server := expect.Got(worker.NewServer(inside, theirs, ours))(t)
		t.Cleanup(server.Shutdown)
		inside.made.AddHook(hooktest.Hook(lost.See))
		expect.Must(t, server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			if s.Ok(ctx, task); len(s.Runs()) <= int(row.fails) {
				return errors.New("no")
			}
			close(running)
			<-finish
			return nil
		})))
		time.Sleep(10 * time.Second)
		s.WantCounters(sitetest.Counters{Active: 1, Leases: 1, Processed: row.fails, Failed: row.fails})
		close(finish)
		time.Sleep(time.Second)
		s.WantCounters(sitetest.Counters{Processed: 1 + row.fails, Failed: row.fails})
		expect.Equal(t, len(s.Runs()), 1+int(row.fails), "ran")
	})
}
