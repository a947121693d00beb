//go:build unix

package faulttest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// The test binary is a worker process too, if these say so.
const (
	workerEnv = "SLUICE_TEST_WORKER" // the address of its Redis
	diesEnv   = "SLUICE_TEST_DIES"   // where it is killed, if it is
)

func init() {
	if addr := os.Getenv(workerEnv); addr != "" {
		logging.Disable()
		if err := work(addr, os.Getenv(diesEnv)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// work is the worker process: its handler never ends, and Run does by a signal.
func work(addr, dies string) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM) // os/signal's own goroutine stays
	signal.Stop(signals)
	atStart := runtime.NumGoroutine()
	limiterClient := redis.NewClient(&redis.Options{Addr: addr})
	isReserve := func(args []any) bool { return slices.Contains(args, any("reserve")) }
	limiterClient.AddHook(hooktest.Hook(killer{dies, "reserve", isReserve}.see))
	limiter, err := throttle.New(throttle.Config{Client: limiterClient, Policies: []throttle.Policy{sitetest.Policy(2, time.Hour)}})
	if err != nil {
		return err
	}
	opt := hooktest.With(asynq.RedisClientOpt{Addr: addr}, hooktest.Hook(killer{dies, "requeue", sitetest.IsRequeue}.see))
	server, err := worker.NewServer(opt, asynq.Config{
		Concurrency: 2, LogLevel: asynq.FatalLevel, ShutdownTimeout: time.Second, TaskCheckInterval: 10 * time.Millisecond,
	}, worker.Config{Limiter: limiter})
	if err != nil {
		return err
	}
	if err := server.Run(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
		die(dies == "in the handler")
		<-ctx.Done() // asynq ends it once it has put the task back
		return ctx.Err()
	})); err != nil {
		return err
	}
	limiterClient.Close()
	for end := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > atStart; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			stacks := make([]byte, 1<<16)
			return fmt.Errorf("%d goroutines are left, and %d were there before:\n%s",
				runtime.NumGoroutine(), atStart, stacks[:runtime.Stack(stacks, true)])
		}
	}
	return nil
}

// die is kill -9, and does not return.
func die(now bool) {
	if now {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

// A killer kills its own process before or after a call: dies is "before CALL" or "after CALL".
type killer struct {
	dies, call string
	is         func(args []any) bool
}

func (k killer) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	is := k.is(cmd.Args())
	die(is && k.dies == "before "+k.call)
	err := next(ctx, cmd)
	die(is && err == nil && k.dies == "after "+k.call)
	return err
}

// process starts a worker process on the site's Redis, and tells when it has ended.
func process(s *sitetest.Site, dies string) (*exec.Cmd, <-chan error, *sitetest.Logs) {
	s.Helper()
	cmd, log := exec.Command(os.Args[0]), &sitetest.Logs{}
	cmd.Env = append(os.Environ(), workerEnv+"="+s.Redis.Options().Addr, diesEnv+"="+dies)
	cmd.Stdout, cmd.Stderr = log, log
	expect.Must(s, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	s.Cleanup(func() { cmd.Process.Kill() })
	return cmd, ended, log
}

func waitEnd(s *sitetest.Site, ended <-chan error) (err error) {
	s.Helper()
	select {
	case err = <-ended:
	case <-time.After(50 * time.Second):
		s.Fatal("the worker process does not end")
	}
	return err
}

// lapse lets the leases of all active tasks run out long ago.
func lapse(s *sitetest.Site) {
	ctx := context.Background()
	for _, id := range s.Redis.ZRange(ctx, "asynq:{default}:lease", 0, -1).Val() {
		s.Redis.ZAdd(ctx, "asynq:{default}:lease", redis.Z{Score: float64(time.Now().Add(-time.Hour).Unix()), Member: id})
	}
}

// A worker that is killed costs its tasks no more than they lose with plain asynq: the recoverer of another
// worker archives those on their last attempt that have started. The others go back, as they started a
// moment ago or not at all. At most one task's cost for each of its handlers is charged without a run.
func TestWorkerIsKilled(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		at     string
		denied bool // the window is full
		active int  // at least; two handlers race to the end
		lost   int64
		never  bool // no task has started
	}{
		{at: "before reserve", active: 1, never: true},
		{at: "after reserve", active: 1, lost: 2, never: true},
		{at: "in the handler", active: 1, lost: 2},
		{at: "before requeue", denied: true, active: 1, never: true},
		{at: "after requeue", denied: true},
	} {
		for _, retries := range []int{0, 1} {
			t.Run(fmt.Sprintf("%s, MaxRetry %d", row.at, retries), func(t *testing.T) {
				s := sitetest.OnRedis(t, sitetest.Policy(2, time.Hour))
				if row.denied {
					s.Fill("acme", "acme")
				}
				ids := []string{"a", "b", "c"}
				for _, id := range ids {
					s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(id), asynq.MaxRetry(retries))
				}
				filled := s.Used()
				begun := time.Now()
				_, ended, log := process(s, row.at)
				err := waitEnd(s, ended)
				slow := time.Since(begun) > 2*time.Second // then takes may have timed out: tasks start, and ask by themselves
				expect.Require(t, err != nil && strings.Contains(err.Error(), "killed"), "the worker process", err, log)
				active := s.Redis.LRange(t.Context(), "asynq:{default}:active", 0, -1).Val()
				n := len(active)
				expect.That(t, n >= row.active && n <= 2, n, "tasks are active")
				charged := s.Used() - filled
				expect.That(t, charged <= row.lost, charged, "units are charged, want", row.lost, "at most")
				waits := s.Redis.ZRange(t.Context(), "asynq:{default}:scheduled", 0, -1).Val()
				for _, id := range waits {
					task := s.Task(id)
					expect.That(t, task.Retried == 0 && strings.HasPrefix(task.LastErr, "throttled: "), id, task.Retried, task.LastErr)
				}

				started := map[string]bool{} // as far as is known: two handlers race to the end
				for _, id := range active {
					task := s.Stored(id)
					started[id] = task["sluice_started"] == task["sluice_call"]
					expect.That(t, !started[id] || !row.never || slow, id, "has started")
				}
				lapse(s)
				s.Open() // so that nobody waits
				s.Serve(s.Ok)
				var archived int64
				for _, id := range ids {
					if started[id] {
						s.Wait(id+" has ended", func() bool {
							task, err := s.Inspector.GetTaskInfo("default", id)
							return err != nil || task.State == asynq.TaskStateArchived
						})
						a := s.Task(id)
						expect.That(t, a.LastErr == asynq.ErrLeaseExpired.Error() && a.Retried == 0, "archived:", a)
						archived++
						continue
					}
					s.Inspector.RunTask("default", id) // unless it has run already
					s.WaitGone(id)
				}
				// What was taken for a task that has ended, or before its slot, is given back in the
				// background. Nothing is taken any more once nobody stands in line.
				s.Wait("units are given back", func() bool {
					return len(s.InLine()) == 0 && s.Used() == filled+charged+int64(len(s.Runs()))
				})
				expect.Equal(t, int64(len(s.Runs())), 3-archived, s.Runs(), "ran")
				expect.Equal(t, s.Used(), filled+charged+3-archived, "used; filled, charged:", filled, charged)
				expect.That(t, row.at != "in the handler" || retries != 0 || archived != 0,
					"no task was archived, and one had started")
				s.WantCounters(sitetest.Counters{Processed: 3, Failed: archived, Archived: archived})
			})
		}
	}
}

// A worker ends by a signal, and leaves no goroutine behind. Tasks in handlers go back, denied ones wait.
func TestWorkerIsTerminated(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(2, time.Hour))
	ids := []string{"a", "b", "c", "d", "e", "f"}
	for i, id := range ids {
		tenant := []string{"acme", "beta"}[i/5] // one of beta's gets through
		s.Enqueue(sitetest.Task(tenant), asynq.TaskID(id), asynq.MaxRetry(0))
	}
	s.Fill("acme", "acme", "beta")
	cmd, ended, log := process(s, "")
	s.WaitState(asynq.TaskStateScheduled, ids[:5]...)
	s.WaitState(asynq.TaskStateActive, "f")
	cmd.Process.Signal(syscall.SIGTERM)
	err := waitEnd(s, ended)
	expect.Require(t, err == nil, "the worker process:", err, log)
	s.WaitState(asynq.TaskStatePending, "f")
	s.WantCounters(sitetest.Counters{Scheduled: 5})
	for _, id := range ids {
		task := s.Task(id)
		expect.That(t, task.Retried == 0 && task.MaxRetry == 0, id, "has lost a retry:", task)
	}
	s.Open()
	s.Serve(s.Ok)
	for _, id := range ids {
		s.Inspector.RunTask("default", id)
	}
	s.WaitGone(ids...)
	got := s.Runs()
	expect.That(t, slices.Equal(got, ids), "ran", got)
	s.WantCounters(sitetest.Counters{Processed: 6})
}
