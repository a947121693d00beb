package worker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A denied task waits, and is as it was but for the reason.
func TestADeniedTaskWaits(t *testing.T) {
	kinds := map[string][]asynq.Option{
		"plain":         nil,
		"kept":          {asynq.Retention(time.Hour)},
		"unique":        {asynq.Unique(time.Hour)},
		"kept, unique":  {asynq.Unique(time.Hour), asynq.Retention(time.Hour)},
		"with deadline": {asynq.Deadline(time.Now().Add(3 * time.Hour)), asynq.Timeout(time.Minute)},
	}
	for _, retries := range []int{0, 3} {
		t.Run(fmt.Sprint("MaxRetry ", retries), func(t *testing.T) {
			s := sitetest.OnRedis(t, sitetest.Policy(1, time.Hour))
			promised := map[string]time.Time{}
			observe := func(_ *asynq.Config, ours *worker.Config) {
				onDecision := ours.OnDecision
				ours.OnDecision = func(ctx context.Context, task *asynq.Task, d throttle.Decision) {
					onDecision(ctx, task, d)
					if d.Granted {
						return
					}
					s.Mu.Lock()
					promised[task.Type()] = time.Now().Add(d.RetryIn)
					s.Mu.Unlock()
				}
			}
			var ids []string
			enqueued := map[string]asynq.TaskInfo{}
			for name, kind := range kinds {
				s.Fill(name)
				opts := append([]asynq.Option{asynq.TaskID(name), asynq.MaxRetry(retries)}, kind...)
				s.Enqueue(worker.NewTask(worker.Identity{Tenant: name}, name, []byte("payload of "+name)), opts...)
				ids = append(ids, name)
				enqueued[name] = s.Task(name)
			}
			server := s.Serve(s.Ok, observe)

			for _, id := range ids { // a limiter that is too slow to decide denies it, too, for a second
				s.Wait(id+" is denied", func() bool { return strings.Contains(s.Task(id).LastErr, ": expected to start at ") })
			}
			reason := map[string]string{}
			for _, d := range s.Denials() {
				reason[d.Tenant] = d.Reason()
			}
			for _, id := range ids {
				task := s.Task(id)
				text, start, _ := strings.Cut(task.LastErr, ": expected to start at ")
				told := text == reason[id] && strings.HasPrefix(reason[id], "throttled: api/window, tenant ")
				expect.That(t, told, id, "last error", task.LastErr, "want", reason[id])
				at, err := time.Parse(time.RFC3339, start)
				expect.That(t, err == nil && !sitetest.Off(at, time.Now().Add(time.Hour)), id, task.LastErr)
				s.Mu.Lock()
				promise := promised[id]
				s.Mu.Unlock()
				// RetryIn is from just before; the task is seen just after.
				in := time.Until(task.NextProcessAt)
				expect.That(t, !task.NextProcessAt.Before(promise) && in <= time.Hour+time.Hour/2+time.Second, id, in, promise)
				since := time.Since(task.LastFailedAt)
				expect.That(t, since >= 0 && since <= time.Minute, id, ": last error", since, "ago")
				task.State, task.LastErr, task.LastFailedAt, task.NextProcessAt = enqueued[id].State, "", time.Time{}, enqueued[id].NextProcessAt
				expect.Equal(t, fmt.Sprint(task), fmt.Sprint(enqueued[id]), "the task has changed")
			}
			s.WantCounters(sitetest.Counters{Scheduled: int64(len(ids))})
			_, err := s.Plain.Enqueue(worker.NewTask(worker.Identity{}, "unique", []byte("payload of unique")), asynq.Unique(time.Hour))
			expect.That(t, errors.Is(err, asynq.ErrDuplicateTask), err)
			waitForgotten(s, server)

			s.Open() // RunTask would run those that are kept again, if they have run by then
			s.Wait("all have run", func() bool { return s.Counters().Processed == int64(len(ids)) })
			expect.That(t, len(s.Runs()) == len(ids), "ran", s.Runs(), "want each once")
			s.WantCounters(sitetest.Counters{Processed: int64(len(ids))})
			s.Mu.Lock()
			defer s.Mu.Unlock()
			expect.That(t, len(s.Reported)+len(s.Asked) == 0,
				"the user's functions were told of", s.Reported, ", and asked about", s.Asked)
		})
	}
}

// A function of the user's panics over a decision, and the ErrorHandler is told. A denied task waits. One that
// was granted does not start, and what it took is given back, slots too.
func TestAPanicOverADecisionIsReported(t *testing.T) {
	slots := sitetest.Policy(1, time.Hour)
	slots.Windows = append(slots.Windows, throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 1})
	s := sitetest.OnRedis(t, slots)
	s.Fill("full")
	s.Enqueue(sitetest.Task("full"), asynq.TaskID("denied"), asynq.MaxRetry(0))
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("granted"), asynq.MaxRetry(0))
	s.Serve(s.Ok, func(_ *asynq.Config, ours *worker.Config) {
		ours.OnDecision = func(context.Context, *asynq.Task, throttle.Decision) { panic("on purpose") }
	})
	s.WaitState(asynq.TaskStateScheduled, "denied")
	s.WaitState(asynq.TaskStateArchived, "granted")
	s.Wait("the grant is given back", func() bool {
		d, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		return err == nil && d.Granted
	})
	s.Mu.Lock()
	defer s.Mu.Unlock()
	other := slices.DeleteFunc(slices.Clone(s.Reported), asynq.IsPanicError)
	expect.That(t, len(s.Reported) >= 2 && len(other) <= 0,
		"the user's ErrorHandler was told", s.Reported, ", want the panics")
}

// To asynq a denied task is done, and it is about to delete it. It is not deleted, even if the server
// has lost track of its attempt, or does not know asynq's call.
func TestADeniedTaskIsNeverDeleted(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1, time.Hour))
	missed, unknown := []string{"missed", "missed, kept"}, []string{"unknown", "unknown, kept"}
	for _, tenant := range slices.Concat(missed, unknown) {
		s.Fill(tenant)
		opts := []asynq.Option{asynq.TaskID(tenant), asynq.MaxRetry(0)}
		if strings.HasSuffix(tenant, "kept") {
			opts = append(opts, asynq.Retention(time.Hour))
		}
		s.Enqueue(sitetest.Task(tenant), opts...)
	}
	isUnknown := func(args []any) bool {
		return slices.ContainsFunc(unknown, func(id string) bool { return sitetest.WithArg(id)(args) })
	}
	s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		args := cmd.Args()
		if isUnknown(args) && args[3] == "asynq:{default}:active" && args[5] != "asynq:{default}:scheduled" {
			args[3], args[5] = args[5], args[3] // as no asynq that is known calls to end a task
		}
		return next(ctx, cmd)
	}))
	var server *worker.Server
	started, log := make(chan struct{}), &sitetest.Logs{}
	server = s.Serve(s.Ok, func(theirs *asynq.Config, ours *worker.Config) {
		theirs.Logger, theirs.LogLevel = sitetest.AsynqLog{Logs: log}, asynq.WarnLevel
		ours.OnDecision = func(_ context.Context, _ *asynq.Task, d throttle.Decision) {
			if <-started; slices.Contains(missed, d.Tenant) {
				server.EndOf(d.Tenant)()
			}
		}
	})
	close(started)
	s.WaitState(asynq.TaskStateScheduled, unknown...)
	s.Wait("asynq was refused", func() bool { return log.Count("has not ended here") == 2 })
	s.WaitState(asynq.TaskStateActive, missed...) // for asynq's recoverer
	s.WantCounters(sitetest.Counters{Active: 2, Leases: 2, Scheduled: 2})
}
