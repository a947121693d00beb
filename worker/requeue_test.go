package worker_test

import (
	"context"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// Asynq's Redis goes away just when a task was denied. Asynq would leave the task active until
// its lease runs out, and then count a retry, or archive it.
func TestRequeueOutlastsABrokenConnection(t *testing.T) {
	each(t, []throttle.Policy{policy(1, time.Hour)}, func(t *testing.T, s *site) {
		var c cable
		s.asynq = dialed{c.options(like(s.redis))}
		s.fill("acme")
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.serve(s.ok, func(_ *asynq.Config, ours *worker.Config) {
			ours.OnDecision = func(_ context.Context, _ *asynq.Task, d throttle.Decision) {
				if !d.Granted {
					c.cut()
					time.AfterFunc(time.Second, c.mend)
				}
			}
		})
		s.waitState(asynq.TaskStateScheduled, "a")
		s.wantCounters(counters{Scheduled: 1})
		s.open("a")
		s.waitGone("a")
		s.wantCounters(counters{Processed: 1})
	})
}

// When it stays away for longer than the lease, the recoverer finds the task, and would archive
// it: that is a denied task still.
func TestRequeueAfterTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(1, 10*time.Minute))
		var c cable
		s.asynq = dialed{c.options(like(s.redis))}
		s.fill("acme")
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.serve(s.ok, calm, func(_ *asynq.Config, ours *worker.Config) {
			ours.OnDecision = func(_ context.Context, _ *asynq.Task, d throttle.Decision) {
				if !d.Granted {
					c.cut()
				}
			}
		})
		time.Sleep(2 * time.Minute)
		s.wantCounters(counters{Active: 1, Leases: 1})
		c.mend()
		time.Sleep(2 * time.Minute)
		if task := s.task("a"); task.State != asynq.TaskStateScheduled || task.Retried != 0 || !strings.HasPrefix(task.LastErr, "throttled: api/window") {
			t.Errorf("the task is %v after %d retries by %q", task.State, task.Retried, task.LastErr)
		}
		time.Sleep(10 * time.Minute)
		s.wantCounters(counters{Processed: 1})
	})
}

// Asynq's recoverer, which has all the time there is, must not be held up by one task.
func TestRequeueInTheRecovererFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(1, time.Hour))
		refused := &losesReply{unsent: true}
		s.asynq = hooktest.With(s.asynq, hooktest.Hook(refused.see))
		s.fill("acme")
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("a"), asynq.MaxRetry(0))
		server := s.serve(s.ok, calm)
		time.Sleep(3 * time.Minute)
		if !refused.repeated() {
			t.Error("the requeue was not repeated")
		}
		down := make(chan struct{})
		go func() { server.Shutdown(); close(down) }()
		select {
		case <-down:
		case <-time.After(time.Minute):
			t.Fatal("the server does not shut down")
		}
		s.wantCounters(counters{Active: 1, Leases: 1})
	})
}

// The requeue went through, but its reply was lost, and the task was picked up again before it
// is repeated: the worker that runs it now must keep it.
func TestRequeueWhoseReplyWasLost(t *testing.T) {
	each(t, []throttle.Policy{policy(1, time.Hour)}, func(t *testing.T, s *site) {
		running, finish := make(chan struct{}), make(chan struct{})
		lost := &losesReply{meanwhile: func() {
			s.open("a")
			<-running
		}}
		s.asynq = hooktest.With(s.asynq, hooktest.Hook(lost.see))
		s.fill("acme")
		s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("a"), asynq.MaxRetry(0))
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			s.ok(ctx, task)
			close(running)
			<-finish
			return nil
		})
		s.wait("the requeue is repeated", func() bool { return lost.repeated() })
		s.wantCounters(counters{Active: 1, Leases: 1})
		close(finish)
		s.waitGone("a")
		s.wantCounters(counters{Processed: 1})
		if len(s.runs()) != 1 {
			t.Errorf("ran %q, want once", s.runs())
		}
	})
}

// losesReply loses the first reply to the requeue of a denied task, or all such calls before they
// are sent.
type losesReply struct {
	meanwhile func()
	unsent    bool
	calls     journal
}

func (l *losesReply) repeated() bool { return l.calls.count("ok") > 1 }

func (l *losesReply) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	args := cmd.Args()
	if !isRequeue(args) {
		return next(ctx, cmd)
	}
	if l.unsent {
		io.WriteString(&l.calls, "ok")
		cmd.SetErr(io.ErrUnexpectedEOF)
		return io.ErrUnexpectedEOF
	}
	if err := next(ctx, cmd); err != nil {
		return err
	}
	io.WriteString(&l.calls, "ok")
	if l.calls.count("ok") > 1 {
		return nil
	}
	l.meanwhile()
	cmd.SetErr(io.ErrUnexpectedEOF)
	return io.ErrUnexpectedEOF
}
