package worker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A refusal by the upstream pauses the policy everywhere, costs no retry, and nobody's place.
func TestRetryAfterPausesThePolicyAndCostsNothing(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1000, time.Minute))
	var refuse atomic.Bool
	refuse.Store(true)
	handler := func(ctx context.Context, task *asynq.Task) error {
		if refuse.CompareAndSwap(true, false) {
			return fmt.Errorf("calling: %w", worker.RetryAfter(1500*time.Millisecond))
		}
		return s.Ok(ctx, task)
	}
	one := func(c *asynq.Config, _ *worker.Config) { c.Concurrency = 1 }
	s.Serve(handler, one)
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("first"), asynq.MaxRetry(0))
	s.WaitState(asynq.TaskStateScheduled, "first")
	text := s.Task("first").LastErr
	expect.That(t, strings.Contains(text, "throttled: api") && strings.Contains(text, "the upstream refuses calls for 1.5s"), text)
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("second"), asynq.MaxRetry(0))
	s.Enqueue(sitetest.Task("other"), asynq.TaskID("third"), asynq.MaxRetry(0)) // its limit is its own
	s.WaitGone("third", "first", "second")
	ran := s.Starts()
	expect.That(t, len(ran) == 3 && slices.Index(ran, "first") <= slices.Index(ran, "second"), "ran in the order", ran)
	for _, d := range s.Denials() {
		expect.Equal(t, d.Tenant, "acme", "a task of", "was denied, and acme's were refused")
	}
	s.WantCounters(sitetest.Counters{Processed: 3})
	s.WantReported(nil, nil)
}

// A handler can have a refusal burn a retry.
func TestAJobMayPauseItsPolicyAndFail(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1000, time.Minute))
	s.Serve(func(ctx context.Context, _ *asynq.Task) error {
		job := worker.FromContext(ctx)
		expect.Equal(t, errors.Join(job.Pause(ctx, time.Minute), job.Pause(ctx, time.Minute)), nil)
		return errors.New("429")
	})
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
	s.WaitState(asynq.TaskStateArchived, "t")
	d, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
	expect.That(t, err == nil && !d.Granted && !sitetest.Off(time.Now().Add(d.RetryIn), time.Now().Add(time.Minute)),
		"granted", d.Granted, "denied for", d.RetryIn, err)
	expect.Equal(t, s.Logs.Count(`msg="throttle: the upstream refused a call: its policy pauses" policy=api tenant=acme for=1m0s`), 1, s.Logs)
}

func TestAJobSettlesAndCancels(t *testing.T) {
	p := sitetest.Policy(1500, time.Hour)
	p.Windows[0].Unit = "tokens"
	s := sitetest.OnRedis(t, p)
	tokens := map[string]int64{"tokens": 1500}
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		id, _ := asynq.GetTaskID(ctx)
		var err error
		if strings.HasPrefix(id, "settle") {
			err = errors.Join(worker.FromContext(ctx).Settle(ctx, "tokens", 1200), worker.FromContext(ctx).Settle(ctx, "tokens", 0))
		} else {
			err = worker.FromContext(ctx).Cancel(ctx)
		}
		expect.That(t, err == nil, err)
		return s.Ok(ctx, task)
	})
	ids := []string{"settle1", "cancel1", "settle2", "cancel2"} // one at a time in an hour's window
	for _, id := range ids {
		s.Enqueue(sitetest.Task("acme", tokens), asynq.TaskID(id), asynq.MaxRetry(0))
	}
	s.WaitGone(ids...)
}

// Two policies in one task: the second is waited for in the handler, or in line.
func TestAJobReservesByASecondPolicy(t *testing.T) {
	github, slack := sitetest.Policy(1000, time.Minute), sitetest.Policy(1, 2*time.Second)
	slack.Name, slack.Match = "slack", nil
	s := sitetest.OnRedis(t, github, slack)
	var inLine atomic.Int64
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		id, _ := asynq.GetTaskID(ctx)
		wait := 10 * time.Second
		if strings.HasPrefix(id, "line") {
			wait = time.Millisecond // it is known at once that it is too long
		}
		r, err := worker.FromContext(ctx).Wait(ctx, throttle.Request{Policy: "slack", MaxWait: wait})
		if errors.As(err, new(*throttle.DeniedError)) {
			inLine.Add(1)
			return errors.Join(err, worker.FromContext(ctx).Cancel(ctx))
		}
		expect.That(t, err == nil && r.Tenant == "acme", "tenant", r.Tenant, err)
		return s.Ok(ctx, task)
	})
	ids := []string{"wait1", "wait2", "line1", "line2"}
	for _, id := range ids {
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(id), asynq.MaxRetry(0))
	}
	s.WaitGone(ids...)
	got := s.Runs()
	expect.That(t, slices.Equal(got, slices.Sorted(slices.Values(ids))), "ran:", got)
	expect.That(t, inLine.Load() != 0, "nobody was requeued")
	s.WantCounters(sitetest.Counters{Processed: 4})
	s.WantReported(nil, nil)
	s.WaitUsed(4) // of the task's own policy
}

// A task whose handler could not enqueue another one fails by that, and does not wait.
func TestARefusedTaskIsNoDenialOfItsHandler(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1000, time.Minute))
	client := s.Client(s.Limiter)
	s.Serve(func(ctx context.Context, _ *asynq.Task) error {
		return expect.ErrOf(client.EnqueueContext(ctx, sitetest.AcmeTask(), asynq.Deadline(time.Now())))
	})
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
	s.WaitState(asynq.TaskStateArchived, "t")
}

// The limiter hangs from when the handler returns until the task's time is over. What the handler has returned holds.
func TestTheLimiterHangsWhenAHandlerReturns(t *testing.T) {
	waits := fmt.Errorf("reserving: %w", throttle.ErrUnavailable)
	results := map[string]error{"done": nil, "refused": worker.RetryAfter(1), "a call was refused": io.EOF, "no Redis": waits}
	sitetest.EachBubble(t, results, func(t *testing.T, result error) {
		s := sitetest.NewInBubble(t, sitetest.AtOnce(1))
		var proxy sitetest.BreakableProxy
		s.Limiter = s.LimiterThrough(&proxy)
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			if _ = s.Ok(ctx, task); len(s.Runs()) == 1 {
				proxy.Hang(30 * time.Second)
				if result == io.EOF {
					throttle.CallerFrom(ctx).Refused("api", time.Second)
				}
				return result
			}
			return nil
		})
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0), asynq.Timeout(time.Second))
		time.Sleep(5 * time.Minute)
		expect.That(t, (len(s.Runs()) == 1) == (result == nil), "ran", s.Runs())
		s.WantCounters(sitetest.Counters{Processed: 1})
		s.WantReported(nil, nil)
	})
}

// A task whose call was refused waits for the pause, and not for the lease of its own slot.
func TestARefusedTaskDoesNotWaitForItsOwnSlot(t *testing.T) {
	sitetest.Bubble(t, sitetest.AtOnce(1), func(t *testing.T, s *sitetest.Site) {
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			expect.Must(t, worker.FromContext(ctx).Pause(ctx, time.Minute))
			throttle.CallerFrom(ctx).Refused("api", time.Minute)
			return io.EOF
		})
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"))
		time.Sleep(10 * time.Second)
		expect.That(t, time.Until(s.Task("t").NextProcessAt) < 4*time.Minute, s.Task("t").LastErr)
	})
}

// A slot is released after its policy has lost its slots: else it would be renewed once they are back.
func TestASlotIsReleasedThoughItsPolicyHasNoneNow(t *testing.T) {
	sitetest.Bubble(t, sitetest.AtOnce(1), func(t *testing.T, s *sitetest.Site) {
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			return s.Limiter.SetPolicies([]throttle.Policy{sitetest.Policy(9, time.Minute)})
		})
		s.Enqueue(sitetest.AcmeTask())
		time.Sleep(3 * time.Second)
		expect.Must(t, s.Limiter.SetPolicies([]throttle.Policy{sitetest.AtOnce(1)}))
		time.Sleep(5 * time.Minute) // ten leases
		expect.Equal(t, s.Used(), 0)
	})
}

// What a goroutine that a handler has left behind reserves is given back too.
func TestAReservationAfterTheHandlerIsReleased(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t)
		client := throttletest.InMemory(t).Client(t)
		var late atomic.Bool
		answer := make(chan struct{})
		client.AddHook(hooktest.Hook((&sitetest.Fault{
			Is: sitetest.WithArg("reserve"), Lost: true, Hits: func(int) bool { return late.Load() }, Meanwhile: func() { <-answer },
		}).See))
		second := sitetest.AtOnce(1)
		second.Name, second.Match = "second", nil
		var err error
		s.Limiter, err = throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{sitetest.Policy(100, time.Minute), second}})
		expect.Require(t, err == nil, err)
		warm := expect.Got(s.Limiter.Reserve(t.Context(), throttle.Request{Policy: "second", Tenant: "acme"}))(t)
		expect.Must(t, warm.Reservation.Release(t.Context()))
		left := make(chan error, 1)
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			late.Store(true)
			go func() {
				_, err := worker.FromContext(ctx).Reserve(context.WithoutCancel(ctx), throttle.Request{Policy: "second"})
				left <- err
			}()
			time.Sleep(time.Second)
			return s.Ok(ctx, task)
		})
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"))
		time.Sleep(10 * time.Second)
		late.Store(false)
		close(answer)
		err = <-left
		expect.That(t, err != nil, "reserved after the handler had returned")
		time.Sleep(5 * time.Minute)
		d, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "second", Tenant: "acme"})
		expect.That(t, err == nil && d.Windows[0].Used == 0, d.Windows[0].Used, "are held", err)
	})
}

// A handler learns that it has lost a slot that it reserved itself.
func TestAHandlerLearnsThatASlotOfItsOwnIsLost(t *testing.T) {
	second := sitetest.AtOnce(1)
	second.Name, second.Match = "second", nil
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, sitetest.Policy(100, time.Minute), second)
		var cause error
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			r, err := worker.FromContext(ctx).Wait(ctx, throttle.Request{Policy: "second"})
			expect.Must(t, errors.Join(err, r.Release(ctx)))
			time.Sleep(time.Second)
			expect.Must(t, ctx.Err()) // it was released, and not lost
			r, err = worker.FromContext(ctx).Wait(ctx, throttle.Request{Policy: "second"})
			expect.Must(t, errors.Join(err, expect.ErrOf(s.Limiter.Reset(ctx, "second", "acme"))))
			expect.Must(t, expect.ErrOf(s.Limiter.Reserve(t.Context(), throttle.Request{Policy: "second", Tenant: r.Tenant})))
			<-ctx.Done()
			cause = context.Cause(ctx)
			return s.Ok(ctx, task)
		})
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"))
		time.Sleep(5 * time.Minute)
		synctest.Wait() // for the race detector: a sleep orders nothing
		expect.Equal(t, cause, throttle.ErrLeaseLost)
	})
}

// A refusal is passed on even if the task's time has run out.
func TestRetryAfterPausesThoughTheTasksTimeIsOver(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1000, time.Minute), func(t *testing.T, s *sitetest.Site) {
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			<-ctx.Done()
			return worker.RetryAfter(time.Hour)
		})
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.Timeout(5*time.Second), asynq.MaxRetry(0))
		time.Sleep(time.Minute)
		d, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		expect.That(t, err == nil && !d.Granted, "granted", d.Granted, err)
	})
}

// A handler whose own reserve is denied waits in no other policy's line. Its task waits for the
// denial's RetryIn, and then in the line of its own policy, at the front.
func TestADeniedJobWaitsInItsOwnLineOnly(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(false, true), func(t *testing.T, earliestReset bool) {
		policy := sitetest.Policy(1, 3*time.Minute)
		policy.EarliestReset = earliestReset
		slack := sitetest.Policy(4, 2*time.Minute)
		slack.Name, slack.Match = "slack", nil
		s := sitetest.NewInBubble(t, policy, slack)
		bot := throttle.Request{Policy: "slack", Tenant: "bot", Cost: map[string]int64{"requests": 3}}
		expect.Must(t, expect.ErrOf(s.Limiter.Reserve(t.Context(), bot)))
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			if id, _ := asynq.GetTaskID(ctx); id == "t" {
				if _, err := worker.FromContext(ctx).Reserve(ctx, bot); err != nil {
					return fmt.Errorf("posting: %w", err)
				}
			}
			return s.Ok(ctx, task)
		})
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
		time.Sleep(30 * time.Second)
		s.WantNobodyInLine()
		info := s.Task("t")
		next, text := time.Until(info.NextProcessAt), info.LastErr
		expect.That(t, info.State == asynq.TaskStateScheduled && (next-90*time.Second).Abs() <= time.Second, info.State, next)
		expect.That(t, strings.Count(text, "throttled") == 1 && strings.HasPrefix(text, "throttled: slack/window, tenant bot, "), text)
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("later"))
		time.Sleep(2 * time.Minute)
		got := s.InLine()
		expect.That(t, earliestReset || slices.Equal(got, []string{"default/later", "default/t"}), "in line", got)
		time.Sleep(time.Minute)
		got = s.Runs()
		expect.That(t, earliestReset || slices.Equal(got, []string{"t"}), "ran", got)
		time.Sleep(210 * time.Second)
		expect.Equal(t, s.Runs(), []string{"later", "t"}, "ran")
		s.WantCounters(sitetest.Counters{Processed: 2})
	})
}

// A task whose call is denied runs again when the pause, or what is left upstream, lets the call in, slots or not.
func TestADeniedJobWaitsForThePauseOfItsCall(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values("refused", "used up", "paused"), func(t *testing.T, stop string) {
		for _, slots := range []int64{1, 2} { // all are held, or not
			calls := sitetest.AtOnceOf("calls", slots)
			calls.KeepRate, calls.UpstreamShared, calls.Windows[0].Shared = true, true, true
			calls.Windows = append(calls.Windows, throttle.Window{Name: "rate", Limit: 100, Period: time.Second})
			s, length := sitetest.NewInBubble(t, sitetest.Policy(1000, time.Hour), calls), 150*time.Second
			held := expect.Got(s.Limiter.Reserve(t.Context(), throttle.Request{Policy: "calls", Tenant: "acme"}))(t)
			switch pause := (throttle.Pause{Policy: "calls", Until: time.Now().Add(length)}); stop {
			case "refused":
				expect.Must(t, expect.ErrOf(held.Reservation.Pause(t.Context(), length, "429")))
			case "used up":
				expect.Must(t, held.Reservation.ReportRemaining(t.Context(), throttle.Requests, 0, length))
			default:
				s.Limiter.SetInterventions(throttle.Interventions{At: time.Now(), Pauses: []throttle.Pause{pause}})
			}
			s.Serve(func(ctx context.Context, task *asynq.Task) error {
				return expect.ErrOf(worker.FromContext(ctx).Reserve(ctx, throttle.Request{Policy: "calls"}))
			})
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
			time.Sleep(2 * time.Minute)
			expect.That(t, s.Used() == 1, "with", slots, "slots the handler ran", s.Used(), "times, want 1")
			time.Sleep(time.Minute)
			s.WaitGone("t")
		}
	})
}
