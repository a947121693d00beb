package faulttest

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Asynq's Redis goes away just when a task was denied, for a moment, or for longer than its lease: then the
// recoverer finds the task. Asynq would leave it active, and count a retry or archive it: it waits.
func TestRequeueOutlastsABrokenConnection(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(time.Second, 2*time.Minute), func(t *testing.T, away time.Duration) {
		s := sitetest.NewInBubble(t, sitetest.Policy(1, 10*time.Minute))
		var proxy sitetest.Proxy
		s.Asynq = sitetest.Dialed{Options: proxy.Options(sitetest.SameRedis(s.Redis))}
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.Serve(s.Ok, sitetest.Calm, func(_ *asynq.Config, ours *worker.Config) {
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
		if task := s.Task("a"); task.State != asynq.TaskStateScheduled || task.Retried != 0 ||
			!strings.HasPrefix(task.LastErr, "throttled: api/window") {
			t.Errorf("the task is %v after %d retries by %q", task.State, task.Retried, task.LastErr)
		}
		time.Sleep(10 * time.Minute)
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
		server := s.Serve(s.Ok, sitetest.Calm)
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

// A requeue takes so long that the task's ticket is taken meanwhile. It is due when it is back, and starts then.
func TestRequeueThatIsLaterThanItsTicket(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, 2*time.Second), func(t *testing.T, s *sitetest.Site) {
		late := &sitetest.Fault{Is: sitetest.IsRequeue, Hits: sitetest.Only(1), Meanwhile: func() { time.Sleep(3 * time.Second) }}
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(late.See))
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask())
		s.Serve(s.Ok, sitetest.Calm)
		begun := time.Now()
		s.SleepUntil(1, time.Minute)
		if started := s.Grants()[0].At.Sub(begun); started < 3*time.Second || started > 3*time.Second+100*time.Millisecond {
			t.Errorf("it started after %v", started)
		}
	})
}

// The requeue went through, but its reply was lost, and the task was picked up again before it
// is repeated: the worker that runs it now must keep it.
func TestRequeueWhoseReplyWasLost(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{sitetest.Policy(1, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
		running, finish := make(chan struct{}), make(chan struct{})
		lost := &sitetest.Fault{
			Is: sitetest.IsRequeue, Hits: sitetest.Only(1), Lost: true, Err: io.ErrUnexpectedEOF,
			Meanwhile: func() {
				s.Open("a")
				<-running
			},
		}
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(lost.See))
		s.Fill("acme")
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			s.Ok(ctx, task)
			close(running)
			<-finish
			return nil
		})
		s.Wait("the requeue is repeated", func() bool { return lost.Calls() > 1 })
		s.WantCounters(sitetest.Counters{Active: 1, Leases: 1})
		close(finish)
		s.WaitGone("a")
		s.WantCounters(sitetest.Counters{Processed: 1})
		expect.That(t, len(s.Runs()) == 1, "ran", s.Runs(), ", want once")
	})
}
