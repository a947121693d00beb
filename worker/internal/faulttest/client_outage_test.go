package faulttest

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// An enqueue waits for a limiter that does not answer as long as LimiterTimeout and no longer,
// once: the next ones do not ask it for a while. By a made-up clock.
func TestAnEnqueueWaitsForASilentLimiterOnce(t *testing.T) {
	for name, dial := range map[string]func() (net.Conn, error){
		"silent": func() (net.Conn, error) {
			ours, theirs := net.Pipe()
			go func() { // it reads, and never answers
				for b := make([]byte, 1024); ; {
					if _, err := theirs.Read(b); err != nil {
						return
					}
				}
			}()
			return sitetest.TCP{Conn: ours}, nil
		},
		"refusing": func() (net.Conn, error) { return nil, &net.OpError{Op: "dial", Err: net.ErrClosed} },
	} {
		for timeout, most := range map[time.Duration]time.Duration{
			0:                     250 * time.Millisecond,
			20 * time.Millisecond: 20 * time.Millisecond,
		} {
			t.Run(name+" "+timeout.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := sitetest.NewInBubble(t, sitetest.Policy(1, time.Hour))
					down := redis.NewClient(&redis.Options{
						Dialer:                   func(context.Context, string, string) (net.Conn, error) { return dial() },
						MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
					})
					defer down.Close()
					client := expect.Got(worker.NewClient(s.Asynq, worker.ClientConfig{Limiter: s.LimiterOn(down), LimiterTimeout: timeout}))(t)
					defer client.Close()
					begun := time.Now()
					for range 100 {
						start := worker.ExpectedStart{Joined: true}
						info, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(), worker.ReportStart(&start))
						expect.Require(t, err == nil && info.State == asynq.TaskStatePending && start == (worker.ExpectedStart{}), info, start, err)
					}
					took := time.Since(begun)
					expect.That(t, took <= most, "took", took, ", want at most", most)
					results := client.EnqueueBulk(t.Context(), []*asynq.Task{sitetest.AcmeTask(), sitetest.AcmeTask()})
					for _, r := range results {
						expect.That(t, r.Err == nil && r.Start.At.IsZero(), "in a batch:", r)
					}
					s.WantStates("default", 102, 0)
					time.Sleep(time.Minute) // the call ends
				})
			})
		}
	}
}

// A call whose own time runs out says nothing of the limiter: the next one asks it.
func TestACallersTimeIsNoOutage(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		client := s.Client(s.AnotherLimiter(hooktest.Hook(func(callCtx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if ctx.Err() == nil && hooktest.IsScript(cmd) {
				<-callCtx.Done()
				cmd.SetErr(callCtx.Err())
				return callCtx.Err()
			}
			return next(callCtx, cmd)
		})))
		expect.Must(t, expect.ErrOf(client.EnqueueContext(ctx, sitetest.AcmeTask())))
		var start worker.ExpectedStart
		_, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(), worker.ReportStart(&start))
		expect.That(t, err == nil && start.Joined, start, err)
	})
}

// Many tasks that join together take longer than LimiterTimeout. Nobody is silent meanwhile.
func TestManyThatJoinAreNoOutage(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		slow := hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if hooktest.IsScript(cmd) {
				time.Sleep(20 * time.Millisecond)
			}
			return next(ctx, cmd)
		})
		client := expect.Got(worker.NewClient(s.Asynq, worker.ClientConfig{Limiter: s.AnotherLimiter(slow)}))(t)
		defer client.Close()
		var callers sync.WaitGroup
		for range 10 {
			callers.Go(func() {
				for _, r := range client.EnqueueBulk(t.Context(), slices.Repeat([]*asynq.Task{sitetest.AcmeTask()}, 200)) {
					expect.That(t, r.Err == nil && r.Start.Joined, r)
				}
			})
		}
		callers.Wait()
		s.WantStates("default", 0, 2000)
	})
}

// A task that was refused stays refused if a later call of its bulk has no answer.
func TestARefusalHoldsWhateverElseFails(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		const answered = 128 // in two calls, and one for the text of the script
		fault := &sitetest.Fault{Is: sitetest.WithArg("join"), Hits: func(n int) bool { return n > 1+answered/64 }, Err: io.EOF}
		client := s.Client(s.AnotherLimiter(hooktest.Hook(fault.See)))
		refused, pending := 0, 0
		for i, r := range client.EnqueueBulk(t.Context(), slices.Repeat([]*asynq.Task{sitetest.AcmeTask()}, 200), worker.Backlog(1)) {
			switch {
			case errors.As(r.Err, new(*throttle.DeniedError)):
				refused++
			case r.Err == nil && r.Info.State == asynq.TaskStatePending:
				pending++
			default:
				expect.That(t, i == 0 && r.Err == nil && r.Start.Joined, i, r)
			}
		}
		expect.Equal(t, []int{refused, pending}, []int{answered - 1, 200 - answered}, "refused and pending")
		s.WantStates("default", pending, 1)
	})
}

// A client whose call ends while it stores the task leaves no ticket of a task that is not there;
// and a task without a ticket joins when workers look after it.
func TestACallThatEndsWhileItStoresLosesNothing(t *testing.T) {
	sitetest.EachBubble(t, map[string]bool{
		"before the task is stored": false,
		"after it":                  true, // the call arrives, and its reply is lost
	}, func(t *testing.T, sent bool) {
		s := sitetest.NewInBubble(t, sitetest.Shared(1, time.Second))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		fault := &sitetest.Fault{Is: sitetest.WithArg("asynq:{default}:scheduled"), Lost: sent, Meanwhile: cancel, Err: context.Canceled}
		config := worker.ClientConfig{Limiter: s.Limiter, LimiterTimeout: time.Minute}
		client := expect.Got(worker.NewClient(hooktest.With(s.Asynq, hooktest.Hook(fault.See)), config))(t)
		defer client.Close()
		info, err := client.EnqueueContext(ctx, sitetest.AcmeTask(asynq.TaskID("cut")))
		expect.Require(t, err != nil && strings.Contains(err.Error(), context.Canceled.Error()), info, err)
		s.WantNobodyInLine()
		expect.Equal(t, s.Task("cut").ID != "", sent, "the task is there")
		s.Serve(s.Ok)
		time.Sleep(3 * time.Minute)
		ran := len(s.Runs())
		expect.That(t, (ran == 1) == sent, ran, "tasks ran")
	})
}

// A client whose call ends after the task was stored has enqueued it.
func TestACallThatEndsWhileItJoinsHasEnqueued(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Shared(1, time.Hour))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	fault := &sitetest.Fault{Is: sitetest.WithArg("sluice:{api}:q"), Meanwhile: cancel, Err: context.Canceled}
	client := s.Client(s.AnotherLimiter(hooktest.Hook(fault.See)))
	info, err := client.EnqueueContext(ctx, sitetest.AcmeTask(asynq.TaskID("cut")))
	expect.That(t, err == nil && info.State == asynq.TaskStatePending && s.Task("cut").State == asynq.TaskStatePending,
		info, err, s.Task("cut").State)
}
